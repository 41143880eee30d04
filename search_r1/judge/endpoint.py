"""A client of OpenAI's chat completions as any server speaks them: time limits, bounded retries, a cache, counts."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import random
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

from search_r1.config import JudgeConfig
from search_r1.judge.cache import ReplyCache
from search_r1.judge.prompts import Messages
from verl.errors import ChatR1Error, ConfigError

_MAX_PAUSE_S = 60.0
_AGAIN = (408, 409, 429)
"""Refusals that a repetition can mend, beside 5xx."""


class JudgeError(ChatR1Error):
    """The judge gave no usable reply."""


class _FailedError(Exception):
    """An attempt failed."""

    def __init__(self, kind: str, message: str, lasting: bool = False, pause: float = 0.0) -> None:
        super().__init__(message)
        self.kind = kind
        self.lasting = lasting
        """A repetition cannot help."""
        self.pause = pause
        """Seconds the service asked to wait."""


@dataclass(frozen=True, slots=True)
class Reply:
    """One reply. Tokens are 0 where the endpoint does not say."""

    text: str
    prompt_tokens: int
    reply_tokens: int


@dataclass
class Usage:
    """What the client has done so far."""

    asked: int = 0
    """Questions, those answered from the cache included."""
    cached: int = 0
    requests: int = 0
    """Attempts included."""
    retries: int = 0
    failures: int = 0
    """Questions that ended without a usable reply."""
    prompt_tokens: int = 0
    """Paid now; replies from the cache cost nothing."""
    reply_tokens: int = 0
    troubles: Counter[str] = field(default_factory=Counter)
    """Attempts that failed, by kind; a later one may have succeeded."""

    def cost(self, config: JudgeConfig) -> float:
        """Return the money spent now, at the configured prices."""
        return (self.prompt_tokens * config.input_price + self.reply_tokens * config.output_price) / 1e6

    def totals(self, config: JudgeConfig) -> dict[str, float]:
        """Return everything as flat growing totals."""
        names = ("asked", "cached", "requests", "retries", "failures", "prompt_tokens", "reply_tokens")
        counts = {name: float(getattr(self, name)) for name in names}
        return counts | {f"trouble_{kind}": float(n) for kind, n in self.troubles.items()} | {"cost": self.cost(config)}


class ChatEndpoint:
    """One per process; usable from one event loop at a time, and again from a later one."""

    def __init__(self, config: JudgeConfig, transport: httpx.AsyncBaseTransport | None = None) -> None:
        """Raises ConfigError without a key that is asked for, ResourceError for a cache that cannot be used."""
        if config.url is None:
            raise ConfigError("judge.url is not set; name an OpenAI-compatible endpoint and judge.model")
        base = config.url.rstrip("/")
        self._url = base if base.endswith("/chat/completions") else f"{base}/chat/completions"
        self._config = config
        self._transport = transport
        self._headers = _headers(config)
        self._cache = None if config.cache_path is None else ReplyCache(Path(config.cache_path))
        self._client: httpx.AsyncClient | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._room = asyncio.Semaphore(config.max_concurrent)
        self._jitter = random.Random()  # not seeded: clients that failed together must not come back together
        self.usage = Usage()

    async def ask(self, messages: Messages) -> Reply:
        """Return the reply at temperature 0, from the cache where it is. Raises JudgeError after the last attempt."""
        self.usage.asked += 1
        request = {
            "model": self._config.model,
            "messages": messages,
            "temperature": 0,
            "max_tokens": self._config.max_tokens,
        }
        key = hashlib.sha256(json.dumps([self._url, request], sort_keys=True).encode()).hexdigest()
        kept = None if self._cache is None else self._cache.get(key)
        if kept is not None:
            self.usage.cached += 1
            return Reply(*kept)
        client = self._bind()
        async with self._room:
            reply = await self._request(client, request)
        if self._cache is not None:
            self._cache.put(key, reply.text, reply.prompt_tokens, reply.reply_tokens)
        return reply

    async def close(self) -> None:
        """Close the connections."""
        client, self._client, self._loop = self._client, None, None
        if client is not None:
            await client.aclose()

    def _bind(self) -> httpx.AsyncClient:
        loop = asyncio.get_running_loop()
        if self._client is None or self._loop is not loop:
            # Connections belong to the loop that opened them; those of a finished loop are dropped with it.
            local = urlsplit(self._url).hostname in ("127.0.0.1", "localhost", "::1")
            self._client = httpx.AsyncClient(
                transport=self._transport, headers=self._headers, timeout=None, trust_env=not local
            )
            self._loop, self._room = loop, asyncio.Semaphore(self._config.max_concurrent)
        return self._client

    async def _request(self, client: httpx.AsyncClient, request: dict[str, Any]) -> Reply:
        last = _FailedError("none", "not sent")
        for attempt in range(self._config.retries + 1):
            if attempt:
                self.usage.retries += 1
                pause = self._config.backoff_s * 2 ** (attempt - 1) * (0.5 + self._jitter.random())
                await asyncio.sleep(min(max(pause, last.pause), _MAX_PAUSE_S))
            try:
                reply = await self._attempt(client, request)
            except _FailedError as error:
                self.usage.troubles[error.kind] += 1
                last = error
                if error.lasting:
                    break
                continue
            self.usage.prompt_tokens += reply.prompt_tokens
            self.usage.reply_tokens += reply.reply_tokens
            return reply
        self.usage.failures += 1
        raise JudgeError(f"judge.url {self._url}: {attempt + 1} attempts failed; last: {last}")

    async def _attempt(self, client: httpx.AsyncClient, request: dict[str, Any]) -> Reply:
        self.usage.requests += 1
        try:
            async with asyncio.timeout(self._config.timeout_s):
                response = await client.post(self._url, json=request)
        except TimeoutError:
            limit = self._config.timeout_s
            raise _FailedError("timeout", f"no answer within judge.timeout_s={limit:g}") from None
        except (httpx.HTTPError, OSError) as error:
            raise _FailedError("connection", f"{type(error).__name__}: {error}") from error
        if response.status_code != 200:
            raise _refusal(response)
        return _reply(response)


def _headers(config: JudgeConfig) -> dict[str, str]:
    if config.api_key_env is None:
        return {}
    key = os.environ.get(config.api_key_env)
    if not key:
        raise ConfigError(f"judge.api_key_env: environment variable {config.api_key_env!r} is not set")
    return {"Authorization": f"Bearer {key}"}


def _refusal(response: httpx.Response) -> _FailedError:
    said = f"HTTP {response.status_code} {' '.join(response.text.split())[:200]}"
    status = response.status_code
    if status in _AGAIN or status >= 500:
        kind = "busy" if status in (429, 503) else "server_error"
        return _FailedError(kind, said, pause=_retry_after(response))
    hint = "; judge.api_key_env names the variable with the key" if status in (401, 403) else ""
    return _FailedError("refused", f"{said}{hint}", lasting=True)


def _retry_after(response: httpx.Response) -> float:
    try:
        return max(0.0, float(response.headers.get("Retry-After", "0")))
    except ValueError:
        return 0.0


def _reply(response: httpx.Response) -> Reply:
    """Read the first choice; an answer of another shape may be a proxy's, so it is tried again."""
    try:
        body = response.json()
        text = body["choices"][0]["message"]["content"]
        usage = body.get("usage") or {}
        counts = [int(usage.get(name) or 0) for name in ("prompt_tokens", "completion_tokens")]
    except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        said = " ".join(response.text.split())[:200]
        raise _FailedError("bad_answer", f"no chat completion ({error!r}): {said}") from error
    if not isinstance(text, str) or not text.strip():
        raise _FailedError("bad_answer", "a chat completion without text (judge.max_tokens may be too small)")
    return Reply(text, *counts)
