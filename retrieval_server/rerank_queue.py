"""Orders given documents for many requests together: what waits goes into the next batch of the cross-encoder."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from retrieval_server.batching import SearchFailedError
from retrieval_server.errors import QueueFullError

logger = logging.getLogger(__name__)

Order = list[tuple[int, float]]
"""(position in the list that was given, score), best first."""
OrderFunction = Callable[[Sequence[str], Sequence[Sequence[str]]], list[Order]]

_BATCH_PAIRS = 512
"""Pairs given to the model together: enough to sort them by length, few enough for a lone request to come soon."""


@dataclass(frozen=True, slots=True)
class _Item:
    query: str
    passages: Sequence[str]
    answer: asyncio.Future[Order]


class RerankQueue:
    """A bounded queue in front of a function that orders documents. Lives in one event loop; calls it in one thread."""

    def __init__(self, order: OrderFunction, max_pairs: int) -> None:
        """``max_pairs`` may wait, over all requests."""
        self._order = order
        self._max_pairs = max_pairs
        self._items: deque[_Item] = deque()
        self._waiting_pairs = 0
        self._open: set[asyncio.Future[Order]] = set()
        self._wake = asyncio.Event()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="rerank")
        self._worker = asyncio.create_task(self._work())

    async def rerank(self, queries: Sequence[str], passages: Sequence[Sequence[str]]) -> list[Order]:
        """Return the order of each query's own passages.

        Raises QueueFullError, before anything is queued, when too many pairs are waiting, and SearchFailedError when
        the model failed on a batch with one of them.
        """
        new_pairs = sum(map(len, passages))
        if self._waiting_pairs + new_pairs > self._max_pairs:
            raise QueueFullError(f"{self._waiting_pairs} pairs wait to be reranked, the limit is {self._max_pairs}")
        loop = asyncio.get_running_loop()
        items = [_Item(query, own, loop.create_future()) for query, own in zip(queries, passages, strict=True)]
        for item in items:
            if item.passages:
                self._items.append(item)
                self._open.add(item.answer)
            else:
                item.answer.set_result([])
        self._waiting_pairs += new_pairs
        self._wake.set()
        if items:
            await asyncio.wait([item.answer for item in items])
        return [item.answer.result() for item in items]

    async def _work(self) -> None:
        while True:
            while not self._items:
                self._wake.clear()
                await self._wake.wait()
            await self._run(self._next_batch())

    def _next_batch(self) -> list[_Item]:
        batch = [self._items.popleft()]
        size = len(batch[0].passages)
        while self._items and size + len(self._items[0].passages) <= _BATCH_PAIRS:
            batch.append(self._items.popleft())
            size += len(batch[-1].passages)
        self._waiting_pairs -= size
        return batch

    async def _run(self, batch: Sequence[_Item]) -> None:
        """Order one batch and answer everybody who waits for it. A failure is theirs alone."""
        queries, passages = [item.query for item in batch], [item.passages for item in batch]
        try:
            orders = await asyncio.get_running_loop().run_in_executor(self._thread, self._order, queries, passages)
            for item, order in zip(batch, orders, strict=True):
                item.answer.set_result(order)
        except Exception as error:
            logger.exception("reranking for %d queries failed", len(batch))
            failure = SearchFailedError(f"{type(error).__name__}: {error}")
            for item in batch:
                if not item.answer.done():
                    item.answer.set_exception(failure)
                    item.answer.exception()  # read once here: with its client gone nobody else may ever look
        self._open.difference_update(item.answer for item in batch)

    async def stop(self) -> None:
        """Finish what was accepted, then end the thread."""
        if self._open:
            await asyncio.wait(list(self._open))
        self._worker.cancel()
        self._thread.shutdown(wait=True)
