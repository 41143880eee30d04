"""The outermost layer of the app: request ids, timing, the access log, and an answer even to our own mistakes."""

from __future__ import annotations

import json
import logging
import re
import time
import uuid

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from retrieval_server.metrics import ServerMetrics

logger = logging.getLogger(__name__)
access_logger = logging.getLogger("retrieval_server.access")

_GIVEN_ID = re.compile(rb"[\x21-\x7e]{1,128}")
_PATHS = frozenset(("/retrieve", "/rerank", "/healthz", "/readyz", "/info", "/metrics"))


class Envelope:
    """Pure ASGI middleware, since it is on the way of every request.

    A client's ``X-Request-ID`` is kept if it is printable ASCII of at most 128 characters, else one is made; it is in
    the answer's headers, in the log lines and in the body of a 500.
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
        request_id = _request_id(scope)
        status = 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", request_id)]
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except Exception:
            logger.exception("request %s to %s failed", request_id.decode(), scope["path"])
            if status == 0:
                await _send_500(send_with_id, request_id)
        finally:
            seconds = time.perf_counter() - started
            path = scope["path"] if scope["path"] in _PATHS else "other"
            self._metrics.requests.labels(path, str(status)).inc()
            self._metrics.request_seconds.labels(path).observe(seconds)
            if self._access_log:
                access_logger.info(
                    json.dumps(
                        {
                            "request_id": request_id.decode(),
                            "client": scope["client"][0] if scope.get("client") else None,
                            "method": scope["method"],
                            "path": scope["path"],
                            "status": status,
                            "ms": round(1000 * seconds, 2),
                        }
                    )
                )


def _request_id(scope: Scope) -> bytes:
    for name, value in scope["headers"]:
        if name == b"x-request-id" and _GIVEN_ID.fullmatch(value):
            given: bytes = value
            return given
    return uuid.uuid4().hex.encode()


async def _send_500(send: Send, request_id: bytes) -> None:
    body = json.dumps({"detail": "internal error; see the server's log", "request_id": request_id.decode()}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 500, "headers": headers})
    await send({"type": "http.response.body", "body": body})
