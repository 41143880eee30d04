"""One client connection: what uvicorn's lacks for a service that outlives bad clients and stops without losing work.

- Headers have a deadline, so a client that sends them slowly does not hold its place for ever; nor does one that stops
  reading its answer.
- Beyond the limit on connections a client is told so, instead of waiting in the kernel's queue.
- An answer is one write, not one for its headers and one for its body.
- A client that is answered before it has sent all of its body can still read the answer.
- A client that leaves stops the work for it.
- While the server drains, every answer says that it is the connection's last.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from retrieval_server.settings import Settings

_LINGER_S = 2.0
"""How long a client may go on sending after it was answered."""
_STALL_S = 30.0
"""How long a client may take no byte of its answer."""


@dataclass(slots=True)
class Draining:
    """Whether the server is stopping; shared by its connections."""

    active: bool = False


class Connection(H11Protocol):
    """uvicorn's protocol with deadlines. Made by uvicorn, of a class that ``connection_class`` returns."""

    settings: Settings
    draining: Draining

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._left_to_write = 0
        self._request_begun = False
        self._output = _Output(transport, self)
        super().connection_made(self._output)
        limit = self.settings.max_connections
        if len(self.connections) > limit:
            self._refuse("503 Service Unavailable", f"{limit} connections are open, which is the limit", retry=True)
        else:
            self._start("headers", self.settings.header_timeout_s, self._headers_late)

    def data_received(self, data: bytes) -> None:
        if self._output.is_closing():
            return  # read and forgotten: unread bytes would make the kernel drop the answer on its way
        self._request_begun = True
        super().data_received(data)
        if self.is_busy():
            self._stop("headers")
            self._request_begun = False
            if self.draining.active:
                self.finish()
        elif "headers" not in self._timers and not self._output.is_closing():
            self._start("headers", self.settings.header_timeout_s, self._headers_late)

    def connection_lost(self, exc: Exception | None) -> None:
        for name in list(self._timers):
            self._stop(name)
        super().connection_lost(exc)
        if self.is_busy():
            give_up: Any = self.cycle.scope.get("give_up")
            if give_up is not None:
                give_up()

    def is_busy(self) -> bool:
        """Return whether a request is being received or answered."""
        return self.cycle is not None and not self.cycle.response_complete

    def body_is_missing(self) -> bool:
        """Return whether the client has still to send a part of the last request's body."""
        return self.cycle is not None and self.cycle.more_body

    def finish(self) -> None:
        """Close after the request that is under way, and tell the client so."""
        if self.is_busy() and self.cycle.keep_alive:
            self.cycle.keep_alive = False
            self.cycle.default_headers = [*self.cycle.default_headers, (b"connection", b"close")]

    def shutdown(self) -> None:
        """Close, now if nothing is under way (uvicorn's name)."""
        if self.is_busy():
            self.finish()
        else:
            self._output.close()

    def pause_writing(self) -> None:
        super().pause_writing()
        self.watch_progress()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop("stall")

    def watch_progress(self) -> None:
        """Drop the connection when its client takes nothing of what is left to write for a while."""
        self._left_to_write = self._output.get_write_buffer_size()
        self._start("stall", _STALL_S, self._check_progress)

    def _check_progress(self) -> None:
        self._stop("stall")
        left = self._output.get_write_buffer_size()
        if left == 0:
            return
        if left >= self._left_to_write:
            self._output.abort()
        else:
            self.watch_progress()

    def linger(self, close: Callable[[], None]) -> None:
        """Call ``close`` when the client had time to read its answer."""
        self._start("linger", _LINGER_S, close)

    def _headers_late(self) -> None:
        self._stop("headers")
        if self._request_begun:
            seconds = self.settings.header_timeout_s
            self._refuse("408 Request Timeout", f"the headers did not arrive within {seconds:g} s")
        else:
            self._output.close()

    def _refuse(self, status: str, detail: str, retry: bool = False) -> None:
        """Answer without a request, and close."""
        body = json.dumps({"detail": detail})
        lines = [f"HTTP/1.1 {status}", "content-type: application/json", f"content-length: {len(body)}"]
        lines += ["retry-after: 1"] * retry + ["connection: close", "", body]
        self._output.write("\r\n".join(lines).encode())
        self._output.close(linger=True)

    def _start(self, name: str, seconds: float, action: Callable[[], None]) -> None:
        self._stop(name)
        self._timers[name] = self.loop.call_later(seconds, action)

    def _stop(self, name: str) -> None:
        if (timer := self._timers.pop(name, None)) is not None:
            timer.cancel()


class _Output(asyncio.Transport):
    """A transport that gathers what is written in one turn of the event loop, and closes without losing an answer."""

    def __init__(self, transport: asyncio.Transport, connection: Connection) -> None:
        super().__init__()
        self._transport = transport
        self._connection = connection
        self._pending: list[bytes] = []
        self._closing = False

    def write(self, data: Any) -> None:
        if not data or self._closing:
            return
        if not self._pending:
            self._connection.loop.call_soon(self._flush)
        self._pending.append(data)

    def _flush(self) -> None:
        waiting, self._pending = self._pending, []
        if waiting and not self._transport.is_closing():
            self._transport.write(b"".join(waiting))

    def close(self, linger: bool = False) -> None:
        if self._closing:
            return
        self._closing = True
        self._flush()
        if linger or self._connection.body_is_missing():
            self._transport.write_eof()
            self._transport.resume_reading()
            self._connection.linger(self._transport.close)
        else:
            self._transport.close()
        if self._transport.get_write_buffer_size():
            self._connection.watch_progress()

    def abort(self) -> None:
        self._closing = True
        self._transport.abort()

    def is_closing(self) -> bool:
        return self._closing or self._transport.is_closing()

    def get_write_buffer_size(self) -> int:
        return self._transport.get_write_buffer_size()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._transport.get_extra_info(name, default)

    def pause_reading(self) -> None:
        self._transport.pause_reading()

    def resume_reading(self) -> None:
        self._transport.resume_reading()


def connection_class(settings: Settings, draining: Draining) -> type[Connection]:
    """Return the class of a server's connections: uvicorn makes them and passes nothing of ours."""
    return type("Connection", (Connection,), {"settings": settings, "draining": draining})
