"""The client of the retrieval service: ``POST /retrieve`` with coalescing, deadlines and bounded retries.

Speaks to our service and to the published servers (documents without title and text, with or without scores, bare
strings). It never waits without a limit, and a wrong answer is a failure, not a passage.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httpx

from search_r1.config import RetrieverConfig
from verl.errors import ConfigError, RetrievalError
from verl.types import Document

logger = logging.getLogger(__name__)

_WINDOW_S = 0.002
"""How long the first search of a batch waits for company; far below the time of one generation."""
_MAX_BATCH = 512
_MAX_PAUSE_S = 8.0
_SERVICE_HINT = "start it with `bash retrieval_launch.sh`, or set retriever.url to where it runs"


class _RejectedError(Exception):
    """The service understood and refused the request: a repetition cannot help."""


@dataclass
class Counts:
    """What the client has done so far."""

    requests: int = 0
    queries: int = 0
    """Queries sent; identical ones of a batch are sent once."""
    retries: int = 0
    failures: int = 0
    """Queries that ended in RetrievalError."""


@dataclass
class _Batch:
    """Searches that will travel in one request."""

    futures: dict[str, asyncio.Future[tuple[Document, ...]]] = field(default_factory=dict)


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
        self._tasks: set[asyncio.Task[None]] = set()
        self._jitter = random.Random(0)
        self.counts = Counts()

    async def search(self, query: str) -> tuple[Document, ...]:
        """Return at most topk passages in rank order; raises RetrievalError after the last attempt."""
        self._bind()
        batch = self._batch
        if batch is None or len(batch.futures) >= _MAX_BATCH:
            batch = self._batch = _Batch()
            task = asyncio.create_task(self._flush(batch))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        if query not in batch.futures:
            batch.futures[query] = asyncio.get_running_loop().create_future()
        # Shielded: an episode that runs out of time must not take the others' passages with it.
        return await asyncio.shield(batch.futures[query])

    async def start(self, corpus_sha256: str | None = None) -> None:
        """Wait until the service is ready and check that it serves the corpus the data was made from.

        Raises RetrievalError with the remedy: unreachable, still loading after ``start_timeout_s``, other corpus.
        """
        self._bind()
        await self._wait_until_ready()
        if corpus_sha256 is not None:
            await self._check_corpus(corpus_sha256)

    async def close(self) -> None:
        """Close connections and forget what is under way."""
        for task in list(self._tasks):
            task.cancel()
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
                timeout=self._config.timeout_s,
                # A company proxy must not be asked for this machine's own service.
                trust_env=host not in ("127.0.0.1", "localhost", "::1"),
            )
            self._loop, self._batch, self._tasks = loop, None, set()
        return self._client

    def _headers(self) -> dict[str, str]:
        name = self._config.api_key_env
        if name is None:
            return {}
        key = os.environ.get(name)
        if not key:
            raise ConfigError(f"retriever.api_key_env: environment variable {name!r} is not set")
        return {"Authorization": f"Bearer {key}"}

    async def _flush(self, batch: _Batch) -> None:
        await asyncio.sleep(_WINDOW_S)
        if self._batch is batch:
            self._batch = None
        queries = list(batch.futures)
        for query, result in zip(queries, await self._fetch(queries), strict=True):
            future = batch.futures[query]
            if isinstance(result, RetrievalError):
                self.counts.failures += 1
                future.set_exception(result)
                future.exception()  # seen, even when every episode that asked has been aborted meanwhile
            else:
                future.set_result(result)

    async def _fetch(self, queries: Sequence[str]) -> list[tuple[Document, ...] | RetrievalError]:
        """Return passages or an error per query; one refused query does not take the others with it."""
        try:
            return list(await self._request(queries))
        except _RejectedError as error:
            if len(queries) == 1:
                return [RetrievalError(str(error))]
            alone = await asyncio.gather(*(self._fetch([query]) for query in queries))
            return [results[0] for results in alone]
        except RetrievalError as error:
            return [RetrievalError(str(error)) for _ in queries]

    async def _request(self, queries: Sequence[str]) -> list[tuple[Document, ...]]:
        config, client = self._config, self._bind()
        payload = {"queries": list(queries), "topk": config.topk, "return_scores": True}
        started, last, wait = time.monotonic(), "", None
        self.counts.queries += len(queries)
        for attempt in range(config.retries + 1):
            if attempt:
                self.counts.retries += 1
                await asyncio.sleep(self._pause(attempt, wait))
            self.counts.requests += 1
            wait = None
            try:
                async with asyncio.timeout(config.timeout_s):
                    response = await client.post(config.url, json=payload)
                if response.status_code == 429 or response.status_code >= 500:
                    last, wait = _status(response), _retry_after(response)
                elif response.status_code != 200:
                    raise _RejectedError(f"retriever.url {config.url} refused the request: {_status(response)}")
                else:
                    return parse_response(response.json(), len(queries), config.topk)
            except TimeoutError:
                last = f"no complete answer within {config.timeout_s:g} s"
            except httpx.TransportError as error:
                last = f"{type(error).__name__}: {error}"
            except ValueError as error:
                last = f"unusable answer: {error}"
        seconds = time.monotonic() - started
        raise RetrievalError(
            f"retriever.url {config.url}: {config.retries + 1} attempts in {seconds:.1f} s failed; last: {last}"
        )

    def _pause(self, attempt: int, asked_for: float | None) -> float:
        """Seconds before retry ``attempt`` (from 1): exponential with jitter, or what the service asked for."""
        pause = self._config.backoff_s * 2 ** (attempt - 1) * (0.5 + self._jitter.random())
        return float(min(max(pause, asked_for or 0.0), _MAX_PAUSE_S))

    async def _wait_until_ready(self) -> None:
        """Poll ``/readyz``; a server without one (the published ones) has to answer an empty request."""
        config, client = self._config, self._bind()
        deadline = time.monotonic() + config.start_timeout_s
        refused, said = 0, ""
        while True:
            try:
                async with asyncio.timeout(config.timeout_s):
                    response = await client.get(_beside(config.url, "readyz"))
            except (httpx.TransportError, TimeoutError) as error:
                refused += 1
                if refused > config.retries:
                    reason = str(error) or type(error).__name__
                    raise RetrievalError(
                        f"retriever.url {config.url}: retrieval service not reachable ({reason}); {_SERVICE_HINT}"
                    ) from error
                await asyncio.sleep(self._pause(refused, None))
                continue
            if response.status_code == 200:
                return
            if response.status_code in (404, 405):
                await self._probe()
                return
            progress = " ".join(response.text.split())[:200]
            if _failed_to_load(response):
                raise RetrievalError(f"retriever.url {config.url}: the service could not load its index: {progress}")
            if time.monotonic() > deadline:
                raise RetrievalError(
                    f"retriever.url {config.url}: still not ready after {config.start_timeout_s:g} s ({progress}); "
                    "raise retriever.start_timeout_s or look at the service's log"
                )
            if progress != said:
                logger.info("waiting for the retrieval service: %s", progress)
                said = progress
            await asyncio.sleep(min(1.0, max(config.backoff_s, 0.05)))

    async def _probe(self) -> None:
        result = (await self._fetch(["test"]))[0]
        if isinstance(result, RetrievalError):
            raise RetrievalError(f"{result}; {_SERVICE_HINT}")

    async def _check_corpus(self, expected: str) -> None:
        client, url = self._bind(), _beside(self._config.url, "info")
        try:
            async with asyncio.timeout(self._config.timeout_s):
                response = await client.get(url)
            found = _corpus_sha256(response.json()) if response.status_code == 200 else None
        except (httpx.TransportError, TimeoutError, ValueError):
            found = None
        if found is None:
            logger.warning("%s does not say which corpus it serves; the data expects sha256 %s", url, expected[:16])
        elif found != expected:
            raise RetrievalError(
                f"retriever.url {self._config.url} serves a corpus with sha256 {found[:16]}, but the data was made "
                f"from {expected[:16]}; start the service on the right corpus, or rebuild the index"
            )


def parse_response(body: Any, n_queries: int, topk: int) -> list[tuple[Document, ...]]:
    """Read a ``/retrieve`` answer of any known server; raises ValueError that says what is wrong with it."""
    if not isinstance(body, dict) or not isinstance(body.get("result"), list):
        raise ValueError(f"expected an object with a list 'result', got {str(body)[:120]!r}")
    result = body["result"]
    if len(result) != n_queries:
        raise ValueError(f"{n_queries} queries but {len(result)} results")
    if not all(isinstance(items, list) for items in result):
        raise ValueError("every result must be a list of documents")
    return [tuple(parse_document(item) for item in items[:topk]) for items in result]


def parse_document(item: Any) -> Document:
    """Read one hit: ``{document, score}``, a document alone, or bare text; raises ValueError."""
    score, document = None, item
    if isinstance(item, dict) and "document" in item:
        document = item["document"]
        score = float(item["score"]) if item.get("score") is not None else None
    if isinstance(document, str):
        document = {"contents": document}
    if not isinstance(document, dict):
        raise ValueError(f"a document must be an object or a string, got {str(document)[:80]!r}")
    identity = str(document["id"]) if document.get("id") is not None else ""
    if isinstance(document.get("title"), str) and isinstance(document.get("text"), str):
        return Document(identity, document["title"], document["text"], score)
    if not isinstance(document.get("contents"), str):
        raise ValueError(f"document {identity!r} has no text in 'contents'")
    title, text = split_contents(document["contents"])
    return Document(identity, title, text, score)


def split_contents(contents: str) -> tuple[str, str]:
    """Split a passage's ``contents`` into title and text at the first line break; the title loses its quotes.

    Without a line break there is no title: ``split_contents("a b")`` is ``("", "a b")``.
    """
    first, found, rest = contents.partition("\n")
    if not found:
        return "", contents
    title = first.strip()
    while len(title) >= 2 and title[0] == title[-1] == '"':
        title = title[1:-1]
    return title, rest.strip()


def _corpus_sha256(info: Any) -> str | None:
    """Find the corpus hash in an ``/info`` answer: at the top, or inside its manifest."""
    for holder in (info, info.get("manifest") if isinstance(info, dict) else None):
        corpus = holder.get("corpus") if isinstance(holder, dict) else None
        if isinstance(corpus, dict) and isinstance(corpus.get("sha256"), str):
            return str(corpus["sha256"])
    return None


def _failed_to_load(response: httpx.Response) -> bool:
    try:
        state = response.json()
    except ValueError:
        return False
    return isinstance(state, dict) and state.get("status") == "failed"


def _beside(url: str, name: str) -> str:
    return f"{url.rstrip('/').rsplit('/', 1)[0]}/{name}"


def _status(response: httpx.Response) -> str:
    return f"HTTP {response.status_code} {' '.join(response.text.split())[:200]}"


def _retry_after(response: httpx.Response) -> float | None:
    try:
        return float(response.headers["Retry-After"])
    except (KeyError, ValueError):
        return None
