"""The outermost layer of the app: request ids, timing, the access log, and an answer even to our own mistakes."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import time
import uuid
from datetime import UTC, datetime
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from retrieval_server.metrics import ServerMetrics

logger = logging.getLogger(__name__)
access_logger = logging.getLogger("retrieval_server.access")

CLIENT_CLOSED = 499
"""Status, in metrics and log, of a request whose client left before it was answered."""
_GIVEN_ID = re.compile(rb"[\x21-\x7e]{1,128}")
_PATHS = frozenset(("/retrieve", "/rerank", "/healthz", "/readyz", "/info", "/metrics"))


class Envelope:
    """Pure ASGI middleware, since it is on the way of every request.

    A client's ``X-Request-ID`` is kept if it is printable ASCII of at most 128 characters, else one is made; it is in
    the answer's headers, in the log lines and in the body of a 500. A request whose client leaves is cancelled: the
    connection calls ``scope["give_up"]``. What a route puts into ``scope["log"]`` is in its line of the access log.
    """

    def __init__(self, app: ASGIApp, metrics: ServerMetrics, access_log: bool) -> None:
        self._app = app
        self._metrics = metrics
        self._access_log = access_log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = time.perf_counter()
        request_id, body_is_unread = _read_headers(scope)
        status = 0
        gone = False
        task = asyncio.current_task()

        def give_up() -> None:
            nonlocal gone
            gone = True
            if task is not None:
                task.cancel()

        async def receive_and_look() -> Message:
            nonlocal body_is_unread
            message = await receive()
            if not message.get("more_body", False):
                body_is_unread = False
            return message

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", request_id)]
                if body_is_unread:  # its rest would be taken for the next request
                    message["headers"].append((b"connection", b"close"))
            await send(message)

        scope["give_up"] = give_up
        try:
            await self._app(scope, receive_and_look, send_with_id)
        except asyncio.CancelledError:
            if not gone:
                raise
            status = status or CLIENT_CLOSED
        except Exception:
            logger.exception("request %s to %s failed", request_id.decode(), _shown_path(scope))
            if status == 0:
                await _send_500(send_with_id, request_id)
        finally:
            del scope["give_up"]
            self._note(scope, request_id, status, time.perf_counter() - started)

    def _note(self, scope: Scope, request_id: bytes, status: int, seconds: float) -> None:
        path = scope["path"] if scope["path"] in _PATHS else "other"
        self._metrics.requests.labels(path, str(status)).inc()
        self._metrics.request_seconds.labels(path).observe(seconds)
        if not self._access_log:
            return
        entry: dict[str, Any] = {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "request_id": request_id.decode(),
            "client": scope["client"][0] if scope.get("client") else None,
            "method": scope["method"],
            "path": _shown_path(scope),
            "status": status,
            "ms": round(1000 * seconds, 2),
            **scope.get("log", {}),
        }
        access_logger.info(json.dumps(entry))


def _read_headers(scope: Scope) -> tuple[bytes, bool]:
    """Return the request's id and whether it has a body."""
    request_id: bytes | None = None
    has_body = False
    for name, value in scope["headers"]:
        if name == b"x-request-id" and _GIVEN_ID.fullmatch(value):
            request_id = value
        elif (name == b"content-length" and value != b"0") or name == b"transfer-encoding":
            has_body = True
    return request_id or uuid.uuid4().hex.encode(), has_body


def _shown_path(scope: Scope) -> str:
    """Return the path as it came, percent-encoded: it cannot break a line of the log."""
    raw: bytes = scope.get("raw_path") or b""
    return raw.decode("ascii", "replace") or ascii(scope["path"])[1:-1]


async def _send_500(send: Send, request_id: bytes) -> None:
    body = json.dumps({"detail": "internal error; see the server's log", "request_id": request_id.decode()}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 500, "headers": headers})
    await send({"type": "http.response.body", "body": body})
