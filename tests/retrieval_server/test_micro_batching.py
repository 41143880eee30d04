"""The batcher: what is searched together, what is searched once, what is refused, and whom a failure reaches."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
from retrieval_helpers import ScriptedRetriever, document

from retrieval_server.batching import Hits, MicroBatcher, SearchFailedError
from retrieval_server.cache import ResultCache
from retrieval_server.errors import PartialSearchError, QueueFullError, SearchUnavailableError
from retrieval_server.metrics import ServerMetrics
from retrieval_server.settings import Settings
from retrieval_server.types import Hit


@asynccontextmanager
async def batching(retriever: ScriptedRetriever, **settings: Any) -> AsyncIterator[MicroBatcher]:
    batcher = MicroBatcher(retriever, Settings(**settings), ServerMetrics())
    try:
        yield batcher
    finally:
        retriever.gate.set()
        await batcher.stop()


def ids(results: list[Hits]) -> list[list[str]]:
    return [[hit.document.id for hit in hits] for hits in results]


async def settle(condition: Callable[[], bool] = lambda: True) -> None:
    """Let tasks run until a condition holds."""
    for _ in range(500):
        await asyncio.sleep(0.002)
        if condition():
            return
    raise AssertionError("condition never held")


async def test_what_waits_is_searched_together_and_identical_queries_once() -> None:
    retriever = ScriptedRetriever({"a": ["1"], "b": ["2"], "c": ["3"]})
    retriever.gate.clear()
    async with batching(retriever) as batcher:
        first = asyncio.create_task(batcher.search(["a"], 3))
        await settle()
        others = [asyncio.create_task(batcher.search(queries, 3)) for queries in (["b", "a"], ["c", "b", "b"])]
        await settle()
        retriever.gate.set()
        assert [ids(await task) for task in (first, *others)] == [[["1"]], [["2"], ["1"]], [["3"], ["2"], ["2"]]]
    assert retriever.calls == [(["a"], 3), (["b", "c"], 3)]


async def test_another_k_is_another_search() -> None:
    retriever = ScriptedRetriever({"a": ["1", "2"]})
    retriever.gate.clear()
    async with batching(retriever) as batcher:
        tasks = [asyncio.create_task(batcher.search(["a"], k)) for k in (1, 2)]
        await settle()
        retriever.gate.set()
        assert [ids(await task) for task in tasks] == [[["1"]], [["1", "2"]]]
    assert retriever.calls == [(["a"], 1), (["a"], 2)]


async def test_batches_have_a_limit() -> None:
    retriever = ScriptedRetriever({})
    async with batching(retriever, max_batch=2, cache_units=0) as batcher:
        await batcher.search(["a", "b", "c", "d", "e"], 1)
        await batcher.search(["a"], 1)  # no cache: searched again
    assert [queries for queries, _ in retriever.calls] == [["a", "b"], ["c", "d"], ["e"], ["a"]]


async def test_a_repeated_query_comes_from_the_cache() -> None:
    retriever = ScriptedRetriever({"a": ["1"]})
    async with batching(retriever) as batcher:
        assert ids(await batcher.search(["a", "a"], 2)) == ids(await batcher.search(["a", "a"], 2)) == [["1"], ["1"]]
    assert retriever.calls == [(["a"], 2)]


async def test_a_failure_reaches_its_batch_only_and_is_not_cached() -> None:
    retriever = ScriptedRetriever({"a": ["1"], "b": ["2"]})
    retriever.gate.clear()
    async with batching(retriever) as batcher:
        good = asyncio.create_task(batcher.search(["a"], 1))
        await settle()
        bad = asyncio.create_task(batcher.search(["fail", "b"], 1))
        await settle()
        retriever.gate.set()
        assert ids(await good) == [["1"]]
        with pytest.raises(SearchFailedError, match="ValueError: scripted failure"):
            await bad
        assert ids(await batcher.search(["b"], 1)) == [["2"]]


async def test_a_backend_that_loses_a_result_is_an_error_and_not_a_shift() -> None:
    class Lossy(ScriptedRetriever):
        def search(self, queries: Any, k: int) -> list[list[Hit]]:
            return super().search(queries, k)[:-1]

    async with batching(Lossy({"a": ["1"], "b": ["2"]})) as batcher:
        with pytest.raises(SearchFailedError, match="1 results for 2 queries"):
            await batcher.search(["a", "b"], 1)


class Partial(ScriptedRetriever):
    """Refuses the queries that begin with "no", and answers the others of the same search."""

    def __init__(self, answers: dict[str, list[str]], origin: object | None = None) -> None:
        super().__init__(answers)
        self.origin = origin or self

    def search(self, queries: Any, k: int) -> list[list[Hit]]:
        found = super().search(queries, k)
        refusal = SearchUnavailableError("spent", 60)
        if any(query.startswith("no") for query in queries):
            outcomes = [refusal if q.startswith("no") else hits for q, hits in zip(queries, found, strict=True)]
            raise PartialSearchError(self.origin, outcomes)
        return found


async def test_a_refused_query_leaves_the_others_of_its_batch_their_answers() -> None:
    retriever = Partial({"a": ["1"], "b": ["2"]})
    retriever.gate.clear()
    async with batching(retriever) as batcher:
        running = asyncio.create_task(batcher.search(["a"], 1))
        await settle()
        refused = asyncio.create_task(batcher.search(["no 1", "b"], 1))
        answered = asyncio.create_task(batcher.search(["b"], 1))
        await settle()
        retriever.gate.set()
        await running
        with pytest.raises(SearchUnavailableError, match=r"^spent$"):
            await refused
        assert ids(await answered) == [["2"]]
        await batcher.search(["b"], 1)  # kept
        with pytest.raises(SearchUnavailableError):
            await batcher.search(["no 1"], 1)  # not kept
    assert [queries for queries, _ in retriever.calls] == [["a"], ["no 1", "b"], ["no 1"]]


async def test_partial_answers_of_a_part_are_not_those_of_the_whole() -> None:
    async with batching(Partial({"b": ["2"]}, origin=ScriptedRetriever({}))) as batcher:
        with pytest.raises(SearchUnavailableError, match="1 of 2 queries: spent"):
            await batcher.search(["no 1", "b"], 1)


async def test_a_full_queue_refuses_before_it_takes_anything() -> None:
    retriever = ScriptedRetriever({"a": ["1"]})
    retriever.gate.clear()
    async with batching(retriever, max_queue=3, max_queries=3) as batcher:
        running = asyncio.create_task(batcher.search(["a"], 1))
        await settle()
        waiting = asyncio.create_task(batcher.search(["b", "c"], 1))
        await settle()
        with pytest.raises(QueueFullError, match="2 queries are waiting, the limit is 3"):
            await batcher.search(["d", "e"], 1)
        shared = asyncio.create_task(batcher.search(["a", "b", "c"], 1))  # nothing new: costs no room
        await settle()
        retriever.gate.set()
        assert ids(await running) == [["1"]]
        await asyncio.gather(waiting, shared)
        await batcher.search(["d", "e"], 1)
    assert [queries for queries, _ in retriever.calls] == [["a"], ["b", "c"], ["d", "e"]]


async def test_a_caller_that_gives_up_takes_nothing_from_the_others() -> None:
    retriever = ScriptedRetriever({"a": ["1"]})
    retriever.gate.clear()
    async with batching(retriever) as batcher:
        gone = asyncio.create_task(batcher.search(["a", "fail"], 1))
        await settle()
        stays = asyncio.create_task(batcher.search(["a"], 1))
        await settle()
        gone.cancel()
        await settle(gone.done)
        retriever.gate.set()
        with pytest.raises(SearchFailedError):  # it shares the batch with the failing query
            await stays
        assert ids(await batcher.search(["a"], 1)) == [["1"]]


async def test_stopping_finishes_what_was_accepted() -> None:
    retriever = ScriptedRetriever({"a": ["1"]})
    retriever.gate.clear()
    async with batching(retriever, max_batch=1) as batcher:
        tasks = [asyncio.create_task(batcher.search([query], 1)) for query in "abc"]
        await settle()
    assert [ids(task.result()) for task in tasks] == [[["1"]], [[]], [[]]]


def hits(n: int) -> tuple[Hit, ...]:
    return tuple(Hit(document(str(i)), 1.0) for i in range(n))


def test_the_cache_is_bounded_by_weight_and_drops_the_longest_unused() -> None:
    cache = ResultCache(10)
    for name in "abc":
        cache.put((name, 2), hits(2))  # weighs 3
    assert cache.weight == 9
    assert cache.get(("a", 2)) is not None
    cache.put(("d", 2), hits(2))
    assert cache.get(("b", 2)) is None
    assert cache.get(("a", 2)) is not None
    cache.put(("e", 9), hits(9))  # weighs all of it
    assert (len(cache), cache.weight) == (1, 10)
    cache.put(("f", 10), hits(10))  # more than all of it: not kept, and nothing dropped for it
    assert (len(cache), cache.weight) == (1, 10)
    cache.put(("e", 9), hits(1))
    assert cache.weight == 2
    cache.put(("x" * 5000, 1), hits(1))  # a long query weighs too
    assert cache.weight == 2 + 1 + 1 + 4


class Wide(ScriptedRetriever):
    """Three searches at a time, and the most that ever ran at once."""

    parallel = 3

    def __init__(self, answers: dict[str, list[str]]) -> None:
        super().__init__(answers)
        self._lock = threading.Lock()
        self.running = self.most = 0

    def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        with self._lock:
            self.running += 1
            self.most = max(self.most, self.running)
        try:
            return super().search(queries, k)
        finally:
            with self._lock:
                self.running -= 1


async def test_a_parallel_backend_gets_its_share_of_searches_and_no_more() -> None:
    retriever = Wide({query: [query] for query in "abcdefgh"})
    retriever.gate.clear()
    async with batching(retriever) as batcher:
        first = asyncio.create_task(batcher.search(list("abcde"), 1))
        await settle(lambda: retriever.running == 3)
        second = asyncio.create_task(batcher.search(list("fgh"), 1))
        await settle()
        assert retriever.running == 3
        retriever.gate.set()
        assert ids(await first) == [[query] for query in "abcde"]
        assert ids(await second) == [[query] for query in "fgh"]
    assert retriever.most == 3
    batches = sorted(queries for queries, _ in retriever.calls)
    assert batches == [["a", "b"], ["c", "d"], ["e"], ["f", "g", "h"]]


async def test_of_parallel_searches_one_fails_alone_and_stopping_waits_for_all() -> None:
    retriever = Wide({"a": ["1"], "b": ["2"]})
    retriever.gate.clear()
    async with batching(retriever) as batcher:
        tasks = [asyncio.create_task(batcher.search([query], 1)) for query in ("a", "fail", "b")]
        await settle(lambda: retriever.running == 3)
    assert ids(tasks[0].result()) == [["1"]]
    assert isinstance(tasks[1].exception(), SearchFailedError)
    assert ids(tasks[2].result()) == [["2"]]


async def test_a_backend_that_cannot_answer_now_is_told_apart_from_one_that_breaks() -> None:
    class Spent(ScriptedRetriever):
        def search(self, queries: Any, k: int) -> list[list[Hit]]:
            raise SearchUnavailableError("the budget is spent", None)

    async with batching(Spent({})) as batcher:
        with pytest.raises(SearchUnavailableError, match="the budget is spent"):
            await batcher.search(["a"], 1)


async def test_the_stages_of_a_search_are_measured_apart() -> None:
    class Staged(ScriptedRetriever):
        def timings(self) -> dict[str, float]:
            return {"encode": 0.2, "search": 0.5}

    metrics = ServerMetrics()
    batcher = MicroBatcher(Staged({}), Settings(), metrics)
    await batcher.search(["a"], 1)
    await batcher.search(["b"], 1)
    await batcher.stop()
    for stage, seconds in (("encode", 0.4), ("search", 1.0)):
        assert metrics.registry.get_sample_value("retrieval_stage_seconds_sum", {"stage": stage}) == seconds
        assert metrics.registry.get_sample_value("retrieval_stage_seconds_count", {"stage": stage}) == 2
