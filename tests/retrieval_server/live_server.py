"""A server on a real socket in a thread of the test's process: cheaper than a process, and its parts can be seen."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from retrieval_server.app import create_app
from retrieval_server.server import DrainingServer, bind, build
from retrieval_server.service import Loader
from retrieval_server.settings import Settings
from retrieval_server.types import Retriever


@dataclass
class Live:
    """A running server."""

    url: str
    address: tuple[str, int]
    server: DrainingServer
    thread: threading.Thread
    metrics: Any

    def stop(self) -> None:
        """What a signal does."""
        self.server.should_exit = True

    def block(self, seconds: float) -> None:
        """Let the event loop do nothing for a while."""
        begun = threading.Event()
        self.server.servers[0].get_loop().call_soon_threadsafe(lambda: (begun.set(), time.sleep(seconds)))
        assert begun.wait(10)

    def wait_until_draining(self) -> None:
        deadline = time.monotonic() + 20
        while not self.server.draining.active:
            assert time.monotonic() < deadline
            time.sleep(0.005)

    def connect(self, timeout: float = 20) -> socket.socket:
        return socket.create_connection(self.address, timeout)

    def metric(self, name: str, **labels: str) -> float:
        return float(self.metrics.registry.get_sample_value(f"retrieval_{name}", labels) or 0.0)

    def wait_for(self, name: str, value: float, **labels: str) -> None:
        """Wait until a metric has a value."""
        deadline = time.monotonic() + 20
        while self.metric(name, **labels) != value:
            assert time.monotonic() < deadline, (name, self.metric(name, **labels), value)
            time.sleep(0.005)


@contextmanager
def live(source: Retriever | Loader, **settings: Any) -> Iterator[Live]:
    """Serve until the block ends; every exception of the server's thread is the test's."""
    told = Settings(**settings)
    listener = bind("127.0.0.1", 0)
    address = listener.getsockname()
    app = create_app(source, told)
    server = build(app, told)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])), name="live-server")
    thread.start()
    running = Live(f"http://127.0.0.1:{address[1]}", address, server, thread, app.state.metrics)
    try:
        running.wait_for("ready", 1.0) if not callable(source) else None
        yield running
    finally:
        running.stop()
        thread.join(30)
        assert not thread.is_alive()


def request(body: bytes, *headers: str, path: str = "/retrieve", method: str = "POST") -> bytes:
    """The bytes of one request."""
    lines = [f"{method} {path} HTTP/1.1", "Host: server", f"Content-Length: {len(body)}", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def read_answer(connection: socket.socket) -> tuple[int, dict[str, str], bytes]:
    """(status, headers, body) of the next answer; raises ConnectionError when there is none."""
    data = b""
    while b"\r\n\r\n" not in data:
        if not (more := connection.recv(65_536)):
            raise ConnectionError(f"closed after {data!r}")
        data += more
    head, _, body = data.partition(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    while len(body) < int(headers["content-length"]):
        if not (more := connection.recv(65_536)):
            raise ConnectionError(f"closed within a body: {body!r}")
        body += more
    return int(first.split()[1]), headers, body


def is_closed(connection: socket.socket) -> bool:
    """Wait for the server to close; False when it sends something instead."""
    try:
        return connection.recv(1) == b""
    except ConnectionError:
        return True
