"""Balances searches over other servers of the same wire format, ours or the published ones.

A large batch is split over the replicas that are ready; each piece goes to the one with the fewest queries under way,
and to another one when it fails. A search is lost only when no replica answers it within its deadline.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import random
import threading
import time
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

import httpx

from retrieval_server.backends.replica import Replica, ReplicaError
from retrieval_server.errors import CorpusError, PartialSearchError, SearchUnavailableError, SettingsError
from retrieval_server.specs import ProxySpec
from retrieval_server.types import Hit, LoadProgress

logger = logging.getLogger(__name__)

T = TypeVar("T")

_MIN_PIECE = 8
"""Queries of a piece at least: splitting a small batch costs more than it gains."""
# Shorter than the 5 s after which the published servers close an idle connection, so that we close first.
_KEEP_ALIVE_S = 3.0
_POLL_S = 0.05
_BACKOFF_S = 0.1


class ProxyRetriever:
    """Implements ``types.Retriever``; ``search`` may be called from several threads.

    Everything that talks to replicas runs in one event loop, in a thread of its own.
    """

    name = "proxy"

    def __init__(self, spec: ProxySpec) -> None:
        """Start the loop; nothing is asked yet. Raises SettingsError when the key is not in the environment."""
        self._spec = spec
        self.parallel = spec.parallel
        headers = _authorization(spec.api_key_env)
        self._client = httpx.AsyncClient(
            headers=headers,
            timeout=httpx.Timeout(None, connect=spec.try_timeout_s),
            limits=httpx.Limits(max_connections=None, keepalive_expiry=_KEEP_ALIVE_S),
            trust_env=False,  # an HTTP_PROXY of the machine is meant for the world, not for the replicas
        )
        self._replicas = [
            Replica(address, self._client, spec.health_interval_s, self._is_last) for address in spec.replicas
        ]
        self._corpus: dict[str, Any] = {}
        self._watchers: list[asyncio.Task[None]] = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy", daemon=True)
        self._thread.start()

    @classmethod
    def load(cls, spec: ProxySpec, progress: LoadProgress) -> ProxyRetriever:
        """Wait until a replica is ready.

        Raises CorpusError, with both values, when replicas serve different corpora, and SettingsError with the
        problem of each when none is ready in time.
        """
        logging.getLogger("httpx").setLevel(logging.WARNING)  # it would log every look at every replica
        proxy = cls(spec)
        try:
            proxy._run(proxy._start(progress))
        except BaseException:
            proxy.close()
            raise
        progress.update("ready", 1.0)
        return proxy

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _start(self, progress: LoadProgress) -> None:
        until = time.monotonic() + self._spec.start_timeout_s
        while True:
            await asyncio.gather(*(replica.look(lambda _: None) for replica in self._replicas))
            ready = [replica for replica in self._replicas if replica.ready]
            if ready:
                break
            if time.monotonic() > until:
                raise SettingsError(f"no replica is ready after {self._spec.start_timeout_s:g} s: {self._problems()}")
            progress.update("waiting for a replica", 0.0)
            await asyncio.sleep(min(0.5, self._spec.health_interval_s))
        self._check_corpora(ready)
        self._watchers = [asyncio.create_task(replica.watch(self._objection)) for replica in self._replicas]

    def _check_corpora(self, ready: Sequence[Replica]) -> None:
        known = [replica for replica in ready if replica.corpus]
        if not known:
            return
        self._corpus = known[0].corpus
        for replica in known[1:]:
            if replica.corpus["sha256"] != self._corpus["sha256"]:
                raise CorpusError(
                    f"replicas serve different corpora: {known[0].address} {_described(self._corpus)}, "
                    f"{replica.address} {_described(replica.corpus)}"
                )
        backends = sorted({str(replica.identity.get("retriever")) for replica in known})
        if len(backends) > 1:
            logger.warning("replicas search in different ways (%s): results depend on who answers", ", ".join(backends))

    def _is_last(self, replica: Replica) -> bool:
        return not any(other.ready for other in self._replicas if other is not replica)

    def _objection(self, replica: Replica) -> str | None:
        """A replica that comes later, or again, must serve the corpus of the others."""
        corpus = replica.corpus
        if not corpus:
            return None
        if not self._corpus:
            self._corpus = corpus
        if corpus["sha256"] == self._corpus["sha256"]:
            return None
        return f"it serves another corpus: {_described(corpus)}, the others {_described(self._corpus)}"

    @property
    def size(self) -> int | None:
        """Number of passages, where a replica tells it."""
        sizes = [replica.identity.get("passages") for replica in self._replicas if replica.ready]
        return next((size for size in sizes if isinstance(size, int)), None)

    def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        """Return the hits of each query; see the protocol.

        Raises SearchUnavailableError when no replica answers within the deadline and the tries, or when one says that
        the request is wrong; PartialSearchError when that is true of a part of the queries.
        """
        return self._run(self._search(queries, k))

    async def _search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        deadline = self._loop.time() + self._spec.timeout_s
        pieces = self._split(queries, k)
        results = await asyncio.gather(*(self._ask(piece, k, deadline) for piece in pieces), return_exceptions=True)
        outcomes: list[Any] = []
        for piece, result in zip(pieces, results, strict=True):
            if isinstance(result, BaseException) and not isinstance(result, SearchUnavailableError):
                raise result
            outcomes += [result] * len(piece) if isinstance(result, BaseException) else result
        failures = [result for result in results if isinstance(result, SearchUnavailableError)]
        if failures:
            raise failures[0] if len(failures) == len(pieces) else PartialSearchError(self, outcomes)
        return outcomes

    def _split(self, queries: Sequence[str], k: int) -> list[Sequence[str]]:
        """Return even pieces in order: one per ready replica if they are large enough, more where limits demand it."""
        ready = [replica for replica in self._replicas if replica.ready]
        n_pieces = max(1, min(len(ready), len(queries) // _MIN_PIECE))
        for replica in ready:
            largest = replica.limit("max_queries") or len(queries)
            if documents := replica.limit("max_documents"):
                largest = min(largest, max(1, documents // k))
            n_pieces = max(n_pieces, -(-len(queries) // max(1, largest)))
        bounds = [len(queries) * piece // n_pieces for piece in range(n_pieces + 1)]
        return [queries[start:end] for start, end in itertools.pairwise(bounds)]

    async def _ask(self, queries: Sequence[str], k: int, deadline: float) -> list[list[Hit]]:
        problems: dict[str, str] = {}
        for attempt in range(self._spec.max_tries):
            replica = await self._pick(problems, attempt, deadline)
            left = deadline - self._loop.time()
            if replica is None or left <= 0:
                break
            try:
                return await replica.retrieve(queries, k, min(left, self._spec.try_timeout_s))
            except ReplicaError as error:
                problems[replica.address] = str(error)
        told = "; ".join(f"{address}: {problem}" for address, problem in problems.items()) or self._problems()
        raise SearchUnavailableError(f"no replica answered: {told}", self._spec.health_interval_s)

    async def _pick(self, asked: dict[str, str], attempt: int, deadline: float) -> Replica | None:
        """Return the ready replica with the fewest queries under way, one that was not asked yet if there is any.

        When all were asked, wait a little longer each time; when none is ready, wait for one to come back, for at
        most two of the intervals at which they are looked at. None when there is none even then.
        """
        until = min(deadline, self._loop.time() + 2 * self._spec.health_interval_s)
        while True:
            ready = [replica for replica in self._replicas if replica.ready]
            fresh = [replica for replica in ready if replica.address not in asked]
            if ready and not fresh:
                await asyncio.sleep(_BACKOFF_S * 2**attempt * random.uniform(0.5, 1.0))
            if candidates := fresh or [replica for replica in ready if replica.ready]:
                return min(candidates, key=lambda replica: (replica.outstanding, random.random()))
            if self._loop.time() >= until:
                return None
            await asyncio.sleep(_POLL_S)

    def _problems(self) -> str:
        return "; ".join(f"{replica.address}: {replica.last_error}" for replica in self._replicas)

    def info(self) -> dict[str, Any]:
        """Return the common corpus, the manifest of a replica that has one, and the state of each."""
        states = [replica.state() for replica in self._replicas]
        shown: dict[str, Any] = {"corpus": self._corpus, "replicas": states}
        manifests = [replica.identity["manifest"] for replica in self._replicas if replica.identity.get("manifest")]
        return {**shown, "manifest": manifests[0]} if manifests else shown

    def close(self) -> None:
        """Stop looking at the replicas and end the loop."""
        if self._loop.is_closed():
            return
        self._run(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _stop(self) -> None:
        for watcher in self._watchers:
            watcher.cancel()
        await asyncio.gather(*self._watchers, return_exceptions=True)
        await self._client.aclose()


def _authorization(variable: str | None) -> dict[str, str]:
    """Return the header with the key; raises SettingsError that names the environment variable and not the key."""
    if variable is None:
        return {}
    key = os.environ.get(variable, "").strip()
    if not key:
        raise SettingsError(f"api_key_env is {variable}, but that environment variable is empty: export it")
    if not (key.isascii() and key.isprintable()):
        raise SettingsError(f"the key in the environment variable {variable} has characters that no header can carry")
    return {"Authorization": f"Bearer {key}"}


def _described(corpus: dict[str, Any]) -> str:
    return f"{corpus.get('file', 'a corpus')} ({corpus.get('passages')} passages, sha256 {corpus['sha256'][:16]})"
