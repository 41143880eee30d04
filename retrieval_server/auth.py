"""The optional key in front of every route but ``/healthz``."""

from __future__ import annotations

import hmac
import os

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from retrieval_server.errors import SettingsError

_OPEN = frozenset(("/healthz",))


def read_key(variable: str) -> bytes | None:
    """Return the key that an environment variable holds, None for no variable; raises SettingsError without a key."""
    if not variable:
        return None
    key = os.environ.get(variable, "").strip()
    if not key:
        raise SettingsError(
            f"api_key_env is {variable!r}, but the environment has no such variable, or an empty one: export it, or "
            "leave api_key_env out to serve without a key"
        )
    return key.encode()


class BearerKey:
    """ASGI middleware that answers 401 to requests without ``Authorization: Bearer KEY``."""

    def __init__(self, app: ASGIApp, key: bytes) -> None:
        self._app = app
        self._key = key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in _OPEN or self._is_allowed(scope):
            await self._app(scope, receive, send)
            return
        answer = JSONResponse(
            {"detail": "send the server's key as the header 'Authorization: Bearer KEY'"},
            401,
            headers={"WWW-Authenticate": "Bearer"},
        )
        await answer(scope, receive, send)

    def _is_allowed(self, scope: Scope) -> bool:
        for name, value in scope["headers"]:
            if name == b"authorization":
                scheme, _, key = value.partition(b" ")
                # The time of the comparison must not tell how much of a guess is right.
                return scheme.lower() == b"bearer" and hmac.compare_digest(key.strip(), self._key)
        return False
