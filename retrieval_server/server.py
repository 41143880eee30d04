"""Runs an app on a socket until it is told to stop."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable
from types import FrameType

import uvicorn

from retrieval_server.app import create_app
from retrieval_server.errors import RetrievalServerError, SettingsError
from retrieval_server.service import Loader
from retrieval_server.settings import Settings

logger = logging.getLogger(__name__)

_BACKLOG = 2048
# Longer than any client keeps an idle connection: the side that closes first should be the one that sends, or its
# next request meets a closing connection.
_KEEP_ALIVE_S = 75
_GRACE_S = 30


def bind(host: str, port: int) -> socket.socket:
    """Return a listening socket; raises SettingsError with the remedy. Port 0 takes a free one.

    Called before the index is loaded, so that a taken port shows at once. Clients that connect meanwhile wait in the
    backlog.
    """
    if not 0 <= port <= 65_535:  # getaddrinfo would take it modulo 65536
        raise SettingsError(f"port {port} is not between 0 and 65535")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise SettingsError(f"cannot listen on {host}:{port}: {error}") from None
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise SettingsError(
                f"port {port} on {host} is taken: choose another with --port (0 takes a free one), or stop the "
                "process that holds it"
            ) from None
        raise SettingsError(f"cannot listen on {host}:{port}: {os.strerror(error.errno or 0)}") from None
    return listener


def serve(load: Loader, settings: Settings, listener: socket.socket) -> int:
    """Serve until SIGTERM or SIGINT, or until loading fails; return the exit status (2 for what the user can mend).

    On a signal no new connection is accepted and accepted requests are finished, for at most 30 s.
    """
    failures: list[Exception] = []

    def stop_on_failure(error: Exception) -> None:
        failures.append(error)
        server.should_exit = True

    app = create_app(load, settings, stop_on_failure)
    server = uvicorn.Server(
        uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            server_header=False,
            lifespan="on",
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=_GRACE_S,
            backlog=_BACKLOG,
        )
    )
    signal.signal(signal.SIGTERM, _exit_cleanly)
    host, port = listener.getsockname()[:2]
    logger.info("listening on http://%s:%s", f"[{host}]" if ":" in host else host, port)
    try:
        asyncio.run(server.serve(sockets=[listener]))
    except KeyboardInterrupt:
        return 130
    if not failures:
        return 0
    if isinstance(failures[0], RetrievalServerError):
        sys.stderr.write(f"error: {failures[0]}\n")
        return 2
    return 1


def _exit_cleanly(signal_number: int, frame: FrameType | None) -> None:
    """Exit with 0. uvicorn replaces this while it serves and raises the signal again when it is done."""
    raise SystemExit(0)


def run_or_report(action: Callable[[], int]) -> int:
    """Run ``action``; print a RetrievalServerError as one line and return 2."""
    try:
        return action()
    except RetrievalServerError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
