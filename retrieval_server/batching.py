"""Searches queries of many requests together: everything that waits goes into the next search.

No artificial delay: while one batch is searched the next one gathers, so batches grow with the load and a lone query
is searched at once. A backend that waits for other machines may be given several batches at a time; what waits is then
shared out among the searches that are free.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from retrieval_server.cache import Key, ResultCache
from retrieval_server.errors import PartialSearchError, QueueFullError, SearchUnavailableError
from retrieval_server.metrics import ServerMetrics
from retrieval_server.settings import Settings
from retrieval_server.types import Hit, Retriever, Timed

logger = logging.getLogger(__name__)

Hits = tuple[Hit, ...]


class SearchFailedError(Exception):
    """The backend failed on the batch that a query was in. The message names the cause."""


@dataclass(slots=True, eq=False)
class _Caller:
    """One call of ``search`` that waits. One future for all of its queries: a future for each would cost more."""

    done: asyncio.Future[None]
    missing: int
    """Queries it has no answer to yet."""
    gone: bool = False


@dataclass(slots=True, eq=False)
class _InFlight:
    """A query that waits or is searched."""

    since: float
    callers: list[_Caller] = field(default_factory=list)
    outcome: Hits | Exception = ()
    """What the search gave, once the callers are told."""

    def is_wanted(self) -> bool:
        """Return whether anybody still waits for it; else it is not searched."""
        return any(not caller.gone for caller in self.callers)

    def answer(self, outcome: Hits | Exception) -> None:
        """Tell all callers."""
        self.outcome = outcome
        for caller in self.callers:
            caller.missing -= 1
            if caller.missing == 0 and not caller.done.done():
                caller.done.set_result(None)


class MicroBatcher:
    """Cache, in-flight sharing and a bounded queue in front of one retriever.

    Lives in one event loop; searches run in threads of their own, ``retriever.parallel`` at a time.
    """

    def __init__(self, retriever: Retriever, settings: Settings, metrics: ServerMetrics) -> None:
        self._retriever = retriever
        self._settings = settings
        self._metrics = metrics
        self._cache = ResultCache(settings.cache_units)
        self._in_flight: dict[Key, _InFlight] = {}
        self._queue: deque[Key] = deque()
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        """Set while no query waits or is searched."""
        self._idle.set()
        self._parallel = max(1, retriever.parallel)
        self._running = 0
        self._threads = ThreadPoolExecutor(self._parallel, thread_name_prefix="search")
        self._workers = [asyncio.create_task(self._work()) for _ in range(self._parallel)]

    async def search(self, queries: Sequence[str], k: int) -> list[Hits]:
        """Return the hits of each query, in order.

        Raises QueueFullError, before anything is queued, when the queue has no room for the new ones among them, and
        SearchUnavailableError or SearchFailedError when the backend had no answer to one of them.
        """
        found: dict[Key, Hits] = {}
        waiting: dict[Key, _InFlight] = {}
        new: dict[Key, None] = {}
        for query in queries:
            key = (query, k)
            if (hits := self._cache.get(key)) is not None:
                found[key] = hits
            elif (in_flight := self._in_flight.get(key)) is not None:
                waiting[key] = in_flight
            else:
                new[key] = None
        if len(self._queue) + len(new) > self._settings.max_queue:
            raise QueueFullError(f"{len(self._queue)} queries are waiting, the limit is {self._settings.max_queue}")
        self._metrics.queries.inc(len(queries))
        self._metrics.cache_hits.inc(len(found))
        self._metrics.shared.inc(len(waiting))
        if new:
            waiting.update(self._enqueue(new))
        if waiting:
            await self._wait_for(waiting.values())
            for key, in_flight in waiting.items():
                if isinstance(in_flight.outcome, Exception):
                    raise in_flight.outcome
                found[key] = in_flight.outcome
        return [found[query, k] for query in queries]

    def _enqueue(self, keys: Iterable[Key]) -> dict[Key, _InFlight]:
        now = time.perf_counter()
        entered = {key: _InFlight(now) for key in keys}
        self._in_flight.update(entered)
        self._queue.extend(entered)
        self._metrics.queue.set(len(self._queue))
        self._idle.clear()
        self._wake.set()
        return entered

    async def _wait_for(self, wanted: Collection[_InFlight]) -> None:
        """Wait until all are answered."""
        caller = _Caller(asyncio.get_running_loop().create_future(), len(wanted))
        for in_flight in wanted:
            in_flight.callers.append(caller)
        try:
            await caller.done
        finally:
            caller.gone = True

    async def _work(self) -> None:
        while True:
            while not self._queue:
                self._wake.clear()
                await self._wake.wait()
            batch = self._next_batch()
            if not batch:
                continue
            self._count_running(1)
            try:
                await self._run(batch)
            finally:
                self._count_running(-1)

    def _count_running(self, change: int) -> None:
        self._running += change
        self._metrics.running.set(self._running)

    def _next_batch(self) -> list[Key]:
        """Take a share of what waits, in order of arrival, up to the batch limit or the first query with another k.

        What nobody waits for any more is dropped on the way, so the batch may be empty.
        """
        free = self._parallel - self._running
        size = min(self._settings.max_batch, -(-len(self._queue) // free))
        k = self._queue[0][1]
        batch: list[Key] = []
        while self._queue and len(batch) < size and self._queue[0][1] == k:
            key = self._queue.popleft()
            if self._in_flight[key].is_wanted():
                batch.append(key)
            else:
                self._metrics.abandoned.inc()
                self._finish(key, ())
        self._metrics.queue.set(len(self._queue))
        if batch:
            self._metrics.queue_seconds.observe(time.perf_counter() - self._in_flight[batch[0]].since)
        return batch

    def _finish(self, key: Key, outcome: Hits | Exception) -> None:
        self._in_flight.pop(key).answer(outcome)
        if not self._in_flight:
            self._idle.set()

    async def _run(self, batch: list[Key]) -> None:
        """Search one batch and answer everybody who waits for it. A failure is theirs alone."""
        queries, k = [query for query, _ in batch], batch[0][1]
        outcomes: Sequence[Sequence[Hit] | Exception]
        try:
            results = await asyncio.get_running_loop().run_in_executor(self._threads, self._search, queries, k)
            if len(results) != len(batch):
                raise RuntimeError(f"{len(results)} results for {len(batch)} queries")
        except PartialSearchError as error:
            if error.origin is not self._retriever or len(error.outcomes) != len(batch):
                self._fail(batch, error)
                return
            self._metrics.failed_batches.inc()
            outcomes = error.outcomes
        except Exception as error:
            self._fail(batch, error)
            return
        else:
            outcomes = results
        for key, outcome in zip(batch, outcomes, strict=True):
            if isinstance(outcome, Exception):
                self._finish(key, outcome)
            else:
                hits = tuple(outcome)
                self._cache.put(key, hits)
                self._finish(key, hits)
        self._metrics.cache_weight.set(self._cache.weight)
        self._metrics.batch_size.observe(len(batch))

    def _search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        """Search in this thread, and note how long it took."""
        started = time.perf_counter()
        results = self._retriever.search(queries, k)
        self._metrics.search_seconds.observe(time.perf_counter() - started)
        if isinstance(self._retriever, Timed):
            for stage, seconds in self._retriever.timings().items():
                self._metrics.stage_seconds.labels(stage).observe(seconds)
        return results

    def _fail(self, batch: list[Key], error: Exception) -> None:
        self._metrics.failed_batches.inc()
        failure: Exception
        if isinstance(error, SearchUnavailableError):
            logger.warning("search of %d queries refused: %s", len(batch), error)
            failure = error
        else:
            logger.error("search of %d queries failed", len(batch), exc_info=error)
            failure = SearchFailedError(f"{type(error).__name__}: {error}")
        for key in batch:
            self._finish(key, failure)

    async def stop(self) -> None:
        """Finish what was accepted, then end the threads."""
        await self._idle.wait()
        for worker in self._workers:
            worker.cancel()
        self._threads.shutdown(wait=True)
