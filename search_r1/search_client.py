"""The client of the retrieval service: ``POST /retrieve`` with coalescing, deadlines and bounded retries.

Speaks to our service and to the published servers (``search_wire`` says what those send). It never waits without a
limit, and a wrong answer is a failure, not a passage. What it asks before the first search is in ``search_start``.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any
from urllib.parse import urlsplit

import httpx

from search_r1.config import RetrieverConfig
from search_r1.search_start import check_service, wait_until_ready
from search_r1.search_wire import clean_query, encode_request, parse_answer
from verl.errors import ConfigError, RetrievalError
from verl.types import Document

logger = logging.getLogger(__name__)

_WINDOW_S = 0.002
"""How long the first search of a batch waits for company; far below the time of one generation."""
_MAX_BATCH = 512
_MAX_PAUSE_S = 8.0
_MAX_ANSWER_BYTES = 256 * 1024 * 1024
"""Hundreds of times the largest honest answer; a server that sends without end must not fill the memory."""
_PROBE = "test"
_PERHAPS_ONE_QUERY = (400, 413, 422)
"""Refusals that can be about one query of many; the others (401, 404 ...) are about the request as such."""

Found = tuple[Document, ...]


class Trouble(StrEnum):
    """What went wrong with an attempt or a query."""

    CONNECTION = "connection"
    TIMEOUT = "timeout"
    """An attempt took longer than ``retriever.timeout_s``, or a search longer than ``retriever.deadline_s``."""
    BUSY = "busy"
    """429 or 503: the service asks to come back later."""
    SERVER_ERROR = "server_error"
    BAD_ANSWER = "bad_answer"
    """200 with something else than one list of documents per query."""
    REFUSED = "refused"
    """4xx: a repetition cannot help."""
    CLOSED = "closed"
    """The client was closed, or failed itself, while the search was under way."""


class _FailedError(Exception):
    """An attempt, or all attempts, of a request failed."""

    def __init__(self, trouble: Trouble, message: str, status: int = 0, pause: float = 0.0) -> None:
        super().__init__(message)
        self.trouble = trouble
        self.status = status
        """Of the last answer; 0 when there was none."""
        self.pause = pause
        """Seconds the service asked to wait."""


@dataclass
class Counts:
    """What the client has done so far."""

    requests: int = 0
    """Attempts included."""
    request_seconds: float = 0.0
    """Sum over the requests, from sending to the whole answer or its failure."""
    searches: int = 0
    queries: int = 0
    """Queries sent; identical ones of a batch are sent once."""
    retries: int = 0
    troubles: Counter[Trouble] = field(default_factory=Counter)
    """Requests that failed, by kind; a later one may have succeeded."""
    failed: Counter[Trouble] = field(default_factory=Counter)
    """Queries that ended in RetrievalError, by the kind of the last failure."""

    @property
    def failures(self) -> int:
        """Queries that ended in RetrievalError."""
        return self.failed.total()

    def totals(self) -> dict[str, float]:
        """Return everything as flat growing totals; kinds of trouble only once they have occurred."""
        return {
            "requests": float(self.requests),
            "request_s": self.request_seconds,
            "searches": float(self.searches),
            "queries": float(self.queries),
            "retries": float(self.retries),
            "failures": float(self.failures),
            **{f"trouble_{kind}": float(count) for kind, count in self.troubles.items()},
            **{f"failed_{kind}": float(count) for kind, count in self.failed.items()},
        }


@dataclass
class _Batch:
    """Searches that will travel in one request."""

    deadline: float
    """On the event loop's clock."""
    futures: dict[str, asyncio.Future[Found]] = field(default_factory=dict)


class SearchClient:
    """One per process; usable from one event loop at a time, and again from a later one.

    Example: ``await SearchClient(RetrieverConfig(topk=3)).search("capital of Peru")``.
    """

    def __init__(self, config: RetrieverConfig, transport: httpx.AsyncBaseTransport | None = None) -> None:
        self._config = config
        self._transport = transport
        self._client: httpx.AsyncClient | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._batch: _Batch | None = None
        self._max_batch = _MAX_BATCH
        self._tasks: set[asyncio.Task[None]] = set()
        self._jitter = random.Random()  # not seeded: clients that failed together must not come back together
        self.counts = Counts()
        self.service_info: Any = None
        """What the service said of itself at the start (``/info``); None before, and of servers that say nothing."""

    async def search(self, query: str) -> Found:
        """Return at most topk passages in rank order.

        Raises RetrievalError after the last attempt, and at the latest ``deadline_s`` after the call.
        """
        self._bind()
        self.counts.searches += 1
        query = clean_query(query)
        loop = asyncio.get_running_loop()
        batch = self._batch
        if batch is None or len(batch.futures) >= self._max_batch:
            batch = self._batch = _Batch(loop.time() + self._config.deadline_s)
            task = asyncio.create_task(self._flush(batch))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        if query not in batch.futures:
            batch.futures[query] = loop.create_future()
        # Shielded: an episode that runs out of time must not take the others' passages with it.
        return await asyncio.shield(batch.futures[query])

    async def start(self, corpus_sha256: str | None = None) -> None:
        """Wait until the service is ready; check that it takes our topk and serves the corpus of the data.

        Raises RetrievalError with the remedy: unreachable, still loading after ``start_timeout_s``, other corpus,
        smaller limits.
        """
        client = self._bind()
        await wait_until_ready(client, self._config, self._probe)
        limit, self.service_info = await check_service(client, self._config, corpus_sha256)
        self._max_batch = min(_MAX_BATCH, limit)

    async def close(self) -> None:
        """Close connections; searches under way end in RetrievalError."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        client, self._client, self._loop, self._batch = self._client, None, None, None
        if client is not None:
            await client.aclose()

    def _bind(self) -> httpx.AsyncClient:
        loop = asyncio.get_running_loop()
        if self._client is None or self._loop is not loop:
            # Connections belong to the loop that opened them; those of a finished loop are dropped with it.
            host = urlsplit(self._config.url).hostname or ""
            self._client = httpx.AsyncClient(
                transport=self._transport,
                headers=self._headers(),
                timeout=None,  # every use stands under a time limit that covers connecting and the pool as well
                # A company proxy must not be asked for this machine's own service.
                trust_env=host not in ("127.0.0.1", "localhost", "::1"),
            )
            self._loop, self._batch, self._tasks = loop, None, set()
        return self._client

    def _headers(self) -> dict[str, str]:
        headers = {"Content-Type": "application/json"}
        name = self._config.api_key_env
        if name is None:
            return headers
        key = os.environ.get(name)
        if not key:
            raise ConfigError(f"retriever.api_key_env: environment variable {name!r} is not set")
        return {**headers, "Authorization": f"Bearer {key}"}

    async def _flush(self, batch: _Batch) -> None:
        """Send a batch and answer everybody who waits for it, whatever happens."""
        results: Mapping[str, Found | _FailedError] = {}
        reason = "the client was closed"
        try:
            await asyncio.sleep(_WINDOW_S)
            if self._batch is batch:
                self._batch = None
            results = await self._fetch(list(batch.futures), batch.deadline, self._config.retries)
        except Exception as error:
            logger.exception("a search failed in the client itself")
            reason = f"{type(error).__name__}: {error}"
        finally:
            missing = _FailedError(Trouble.CLOSED, f"retriever.url {self._config.url}: {reason}")
            for query, future in batch.futures.items():
                self._settle(future, results.get(query, missing))

    def _settle(self, future: asyncio.Future[Found], result: Found | _FailedError) -> None:
        if isinstance(result, _FailedError):
            self.counts.failed[result.trouble] += 1
            future.set_exception(RetrievalError(str(result)))
            future.exception()  # seen, even when every episode that asked has been aborted meanwhile
        else:
            future.set_result(result)

    async def _fetch(self, queries: Sequence[str], deadline: float, retries: int) -> dict[str, Found | _FailedError]:
        """Return passages or a failure per query; one query that the service cannot take leaves the others theirs."""
        try:
            return dict(zip(queries, await self._request(queries, deadline, retries), strict=True))
        except _FailedError as failure:
            if len(queries) == 1 or not await self._is_about_one_query(failure, deadline):
                return dict.fromkeys(queries, failure)
            # After a lasting 500 the retries have been made: a half answers, or it has a query that never will be.
            again = 0 if failure.status == 500 else retries
        middle = len(queries) // 2
        halves = (self._fetch(part, deadline, again) for part in (queries[:middle], queries[middle:]))
        first, second = await asyncio.gather(*halves)
        return first | second

    async def _is_about_one_query(self, failure: _FailedError, deadline: float) -> bool:
        """Say whether parts of a failed request may succeed.

        A published server answers 500 to a query that it cannot encode or parse, so after a lasting 500 a harmless
        query tells whether the service is broken or the batch has such a query.
        """
        if failure.status in _PERHAPS_ONE_QUERY:
            return True
        if failure.status != 500:
            return False
        try:
            await self._request([_PROBE], deadline, 0)
        except _FailedError:
            return False
        return True

    async def _request(self, queries: Sequence[str], deadline: float, retries: int) -> list[Found]:
        """Send one request with its retries; raises _FailedError."""
        clock = asyncio.get_running_loop().time
        started, last, attempts = clock(), _FailedError(Trouble.TIMEOUT, "not sent"), 0
        self.counts.queries += len(queries)
        while attempts <= retries:
            if attempts:
                pause = self._pause(attempts, last.pause)
                if clock() + pause >= deadline:
                    break
                self.counts.retries += 1
                await asyncio.sleep(pause)
            attempts += 1
            try:
                return await self._attempt(queries, deadline - clock())
            except _FailedError as error:
                self.counts.troubles[error.trouble] += 1
                last = error
                if error.trouble is Trouble.REFUSED:
                    raise
        seconds = clock() - started
        raise _FailedError(
            last.trouble,
            f"retriever.url {self._config.url}: {attempts} attempts in {seconds:.1f} s failed; last: {last}",
            last.status,
        )

    async def _attempt(self, queries: Sequence[str], left: float) -> list[Found]:
        """Send one request once; ``left`` seconds remain of the search's deadline."""
        limit = min(self._config.timeout_s, left)
        if limit <= 0:
            raise _FailedError(Trouble.TIMEOUT, f"nothing left of retriever.deadline_s={self._config.deadline_s:g}")
        self.counts.requests += 1
        started = time.perf_counter()
        try:
            async with asyncio.timeout(limit):
                response, body = await self._post(encode_request(queries, self._config.topk))
        except TimeoutError:
            raise _FailedError(Trouble.TIMEOUT, f"no complete answer within {limit:.3g} s") from None
        except httpx.TransportError as error:
            raise _FailedError(Trouble.CONNECTION, f"{type(error).__name__}: {error}") from error
        except (httpx.DecodingError, ValueError) as error:
            raise _FailedError(Trouble.BAD_ANSWER, f"unusable answer: {error}") from error
        finally:
            self.counts.request_seconds += time.perf_counter() - started
        if response.status_code != 200:
            raise self._status_failure(response, body)
        try:
            return parse_answer(body, len(queries), self._config.topk)
        except ValueError as error:
            raise _FailedError(Trouble.BAD_ANSWER, f"unusable answer: {error}") from error

    async def _post(self, content: bytes) -> tuple[httpx.Response, bytes]:
        body = bytearray()
        async with self._bind().stream("POST", self._config.url, content=content) as response:
            async for chunk in response.aiter_bytes():
                body += chunk
                if len(body) > _MAX_ANSWER_BYTES:
                    raise ValueError(f"longer than {_MAX_ANSWER_BYTES} bytes")
        return response, bytes(body)

    def _status_failure(self, response: httpx.Response, body: bytes) -> _FailedError:
        status = response.status_code
        said = f"HTTP {status} {' '.join(body[:1000].decode('utf-8', 'replace').split())[:200]}"
        if status in (429, 503):
            return _FailedError(Trouble.BUSY, said, status, _retry_after(response))
        if status == 408 or status >= 500:
            return _FailedError(Trouble.SERVER_ERROR, said, status, _retry_after(response))
        hint = "; retriever.api_key_env names the variable with the key" if status in (401, 403) else ""
        message = f"retriever.url {self._config.url} refused the request: {said}{hint}"
        return _FailedError(Trouble.REFUSED, message, status)

    def _pause(self, attempt: int, asked_for: float) -> float:
        """Seconds before retry ``attempt`` (from 1): exponential with jitter, or what the service asked for."""
        pause = self._config.backoff_s * 2 ** (attempt - 1) * (0.5 + self._jitter.random())
        return float(min(max(pause, asked_for), _MAX_PAUSE_S))

    async def _probe(self) -> None:
        """Ask for one harmless query; raises RetrievalError."""
        deadline = asyncio.get_running_loop().time() + self._config.deadline_s
        try:
            await self._request([_PROBE], deadline, self._config.retries)
        except _FailedError as failure:
            raise RetrievalError(str(failure)) from failure


def _retry_after(response: httpx.Response) -> float:
    try:
        seconds = float(response.headers["Retry-After"])
    except (KeyError, ValueError):
        return 0.0
    return seconds if seconds > 0 else 0.0
