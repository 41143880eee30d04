"""The state behind the routes: a retriever that is being loaded, ready or failed, and the batcher in front of it."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from retrieval_server.batching import Hits, MicroBatcher
from retrieval_server.errors import NotReadyError, RetrievalServerError
from retrieval_server.metrics import ServerMetrics
from retrieval_server.settings import Settings
from retrieval_server.types import LoadProgress, Retriever

logger = logging.getLogger(__name__)

Loader = Callable[[LoadProgress], Retriever]


class RetrievalService:
    """Loads the retriever in the background and answers queries once it is there. Lives in one event loop."""

    def __init__(
        self,
        source: Retriever | Loader,
        settings: Settings,
        metrics: ServerMetrics,
        on_failure: Callable[[Exception], None],
    ) -> None:
        """``on_failure`` is called in the event loop with the error when loading fails."""
        self._source = source
        self._settings = settings
        self._metrics = metrics
        self._on_failure = on_failure
        self._progress = LoadProgress()
        self._retriever: Retriever | None = None
        self._batcher: MicroBatcher | None = None
        self._error: Exception | None = None
        self._stopped = False

    def start(self) -> None:
        """Begin to load; with a retriever that is there already, be ready at once."""
        if not callable(self._source):
            self._loaded(self._source, 0.0)
            return
        # A daemon thread: a process that is told to stop while it loads does not wait for it.
        self._load_in_background(self._source)

    def _load_in_background(self, load_retriever: Loader) -> None:
        loop = asyncio.get_running_loop()
        started = time.monotonic()

        def report(callback: Callable[..., None], *arguments: Any) -> None:
            try:
                loop.call_soon_threadsafe(callback, *arguments)
            except RuntimeError:  # the loop was closed meanwhile: nobody is left to tell
                logger.debug("loading ended after the server did")

        def load() -> None:
            try:
                retriever = load_retriever(self._progress)
            except Exception as error:
                report(self._failed, error)
            else:
                report(self._loaded, retriever, time.monotonic() - started)

        threading.Thread(target=load, name="load-index", daemon=True).start()

    def _loaded(self, retriever: Retriever, seconds: float) -> None:
        if self._stopped:
            retriever.close()
            return
        self._retriever = retriever
        self._batcher = MicroBatcher(retriever, self._settings, self._metrics)
        self._metrics.ready.set(1)
        size = "" if retriever.size is None else f", {retriever.size:,} passages"
        logger.info("ready: %s%s, loaded in %.1f s", retriever.name, size, seconds)

    def _failed(self, error: Exception) -> None:
        self._error = error
        if not isinstance(error, RetrievalServerError):
            logger.error("loading the index failed", exc_info=error)
        self._on_failure(error)

    async def stop(self) -> None:
        """Finish accepted queries and release the retriever."""
        self._stopped = True
        if self._batcher is not None:
            await self._batcher.stop()
        if self._retriever is not None:
            self._retriever.close()

    async def retrieve(self, queries: Sequence[str], topk: int) -> list[Hits]:
        """Return at most ``topk`` hits per query, in order; a blank query has none.

        Raises NotReadyError, QueueFullError, SearchUnavailableError or SearchFailedError.
        """
        if self._batcher is None or self._retriever is None:
            raise NotReadyError(self._not_ready_reason())
        k = topk if self._retriever.size is None else min(topk, self._retriever.size)
        asked = [query for query in queries if query.strip()]
        hits = iter(await self._batcher.search(asked, k) if asked else [])
        return [next(hits) if query.strip() else () for query in queries]

    def loaded(self) -> Retriever:
        """Return the retriever; raises NotReadyError before it is loaded."""
        if self._retriever is None:
            raise NotReadyError(self._not_ready_reason())
        return self._retriever

    def _not_ready_reason(self) -> str:
        if self._error is not None:
            return f"the index could not be loaded: {self._error}"
        phase, fraction = self._progress.snapshot()
        return f"loading {fraction:.0%} ({phase})"

    def readiness(self) -> tuple[bool, dict[str, Any]]:
        """Return (ready, what ``/readyz`` says)."""
        phase, fraction = self._progress.snapshot()
        if self._error is not None:
            return False, {"status": "failed", "error": str(self._error), "phase": phase, "progress": fraction}
        if self._retriever is None:
            return False, {"status": "loading", "phase": phase, "progress": round(fraction, 3)}
        return True, {"status": "ready", "phase": "ready", "progress": 1.0}

    def info(self) -> dict[str, Any]:
        """Return what ``/info`` says; raises NotReadyError before the index is loaded."""
        if self._retriever is None:
            raise NotReadyError(self._not_ready_reason())
        settings = self._settings
        limits = {name: getattr(settings, name) for name in ("max_topk", "max_queries", "max_documents", "max_queue")}
        return {
            "retriever": self._retriever.name,
            "passages": self._retriever.size,
            "topk": settings.topk,
            "limits": limits,
            **self._retriever.info(),
        }
