"""Runs an app on a socket until it is told to stop."""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import gc
import logging
import os
import resource
import signal
import socket
import sys
from collections.abc import Callable
from types import FrameType

import uvicorn
from fastapi import FastAPI

from retrieval_server.app import create_app
from retrieval_server.connection import Connection, Draining, connection_class
from retrieval_server.errors import RetrievalServerError, SettingsError
from retrieval_server.service import Loader
from retrieval_server.settings import Settings
from retrieval_server.types import LoadProgress, Retriever

logger = logging.getLogger(__name__)

_BACKLOG = 2048
# Longer than any client keeps an idle connection: the side that closes first should be the one that sends, or its
# next request meets a closing connection.
_KEEP_ALIVE_S = 75
_GRACE_S = 30
_LAST_CALL_S = 0.5
"""How long connections without a request stay open when the server stops: a request may be on its way."""
_LOOPBACK = ("127.", "::1", "localhost")
_COLLECT_AFTER = 20_000
_OTHER_FILES = 128
"""Open files beside the connections: index, libraries, logs."""


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

    On a signal every request that has reached the server is finished, for at most 30 s, and no connection is taken any
    more.
    """
    failures: list[Exception] = []

    def stop_on_failure(error: Exception) -> None:
        failures.append(error)
        server.should_exit = True

    server = build(create_app(_then_freeze(load), settings, stop_on_failure), settings)
    signal.signal(signal.SIGTERM, _exit_cleanly)
    host, port = listener.getsockname()[:2]
    if not host.startswith(_LOOPBACK) and not settings.api_key_env:
        logger.warning(
            "%s serves other machines and asks for no key: set --api_key_env, or keep it behind a gate", host
        )
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


def _then_freeze(load: Loader) -> Loader:
    """Return a loader after which the garbage collector no longer looks at what is there: it stays until the end.

    Otherwise it stops all requests for a tenth of a second now and then, to walk through libraries and index. And it
    looks less often: one request makes more objects than the default number, and hardly any of them in a cycle.
    """

    def load_and_freeze(progress: LoadProgress) -> Retriever:
        retriever = load(progress)
        gc.collect()
        gc.freeze()
        gc.set_threshold(_COLLECT_AFTER, 20, 20)
        return retriever

    return load_and_freeze


def build(app: FastAPI, settings: Settings) -> DrainingServer:
    """Return a server for an app of ``create_app``, not yet running."""
    settings = dataclasses.replace(settings, max_connections=allow_open_files(settings.max_connections))
    draining = Draining()
    config = uvicorn.Config(
        app,
        http=connection_class(settings, draining),
        ws="none",
        log_config=None,
        access_log=False,
        proxy_headers=False,  # nobody in front of us is trusted to name the client
        server_header=False,
        lifespan="on",
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=_GRACE_S,
        backlog=_BACKLOG,
    )
    server = DrainingServer(config, draining)
    app.state.metrics.connections.set_function(lambda: len(server.server_state.connections))
    return server


class DrainingServer(uvicorn.Server):
    """uvicorn's server, but it stops without turning anybody away who has already come in."""

    def __init__(self, config: uvicorn.Config, draining: Draining) -> None:
        super().__init__(config)
        self.draining = draining

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Take the connections that wait in the kernel, answer what they and the others ask, then close them."""
        self.draining.active = True
        for connection in self._open():
            connection.finish()
        for _ in range(3):  # one turn to see that the listener is readable, one to accept, one to begin
            await asyncio.sleep(0)
        for server in self.servers:
            server.close()
        deadline = asyncio.get_running_loop().time() + _LAST_CALL_S
        while self._open() and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.02)
        await super().shutdown(sockets)

    def _open(self) -> list[Connection]:
        return [connection for connection in self.server_state.connections if isinstance(connection, Connection)]


def allow_open_files(connections: int) -> int:
    """Raise this process's limit on open files so that as many connections fit; return how many do."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    wanted = connections + _OTHER_FILES
    if soft != unlimited and soft < wanted:
        soft = wanted if hard == unlimited else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    fit = connections if soft == unlimited else min(connections, max(1, soft - _OTHER_FILES))
    if fit < connections:
        logger.warning(
            "only %d of max_connections %d fit into the limit on open files, %d: raise it with ulimit -Hn",
            fit, connections, soft,
        )  # fmt: skip
    return fit


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
