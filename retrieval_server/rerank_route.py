"""What an app serves when its backend is a cross-encoder: ``/rerank``, and a ``/retrieve`` with two topk's."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import Response

from retrieval_server.backends.rerank import RerankRetriever, passage_text
from retrieval_server.batching import Hits, MicroBatcher
from retrieval_server.metrics import ServerMetrics
from retrieval_server.rerank_queue import RerankQueue
from retrieval_server.rerank_wire import RerankRequest, encode_reranked, parse_combined, parse_rerank
from retrieval_server.service import RetrievalService
from retrieval_server.settings import Settings
from retrieval_server.types import Hit
from retrieval_server.wire import RequestError, encode_response

ReadBody = Callable[[Request, Settings], Awaitable[bytes]]


class Reranking:
    """The part of an app that talks to a cross-encoder. Idle with any other backend."""

    def __init__(self, service: RetrievalService, settings: Settings, metrics: ServerMetrics) -> None:
        self._service, self._settings, self._metrics = service, settings, metrics
        self._queue: RerankQueue | None = None
        self._at_depth: MicroBatcher | None = None

    def add_routes(self, app: FastAPI, read_body: ReadBody) -> None:
        """Add ``/rerank``."""
        schema = {"required": True, "content": {"application/json": {"schema": RerankRequest.model_json_schema()}}}

        @app.post("/rerank", openapi_extra={"requestBody": schema}, response_model=None)
        async def rerank(request: Request) -> Response:
            """Return each query's own documents, the best first. 404 when the backend is not a cross-encoder."""
            answer = await self.rerank(await read_body(request, self._settings))
            return Response(answer, media_type="application/json")

    async def rerank(self, body: bytes) -> bytes:
        """Answer ``/rerank``; raises RequestError, NotReadyError, QueueFullError or SearchFailedError."""
        retriever = self._service.loaded()
        if not isinstance(retriever, RerankRetriever):
            raise RequestError(404, f"the backend is {retriever.name}, which has no cross-encoder: serve rerank")
        wanted = parse_rerank(body, self._settings)
        texts = [[passage_text(contents) for contents in given] for given in wanted.contents]
        if self._queue is None:
            self._queue = RerankQueue(retriever.order, self._settings.max_documents)
        orders = await self._queue.rerank(wanted.queries, texts)
        ranked = [
            [(own[position], score) for position, score in order[: wanted.topk]]
            for own, order in zip(texts, orders, strict=True)
        ]
        return encode_reranked(ranked, wanted.return_scores)

    async def retrieve(self, body: bytes) -> bytes | None:
        """Answer ``/retrieve`` when the backend reranks, else return None.

        Raises what ``/retrieve`` raises, and RequestError with 404 when there is no first stage.
        """
        retriever = self._service.loaded()
        if not isinstance(retriever, RerankRetriever):
            return None
        if retriever.first is None:
            raise RequestError(404, "this server only reranks given documents: POST /rerank, or serve a first stage")
        wanted = parse_combined(body, retriever.depth, self._settings)
        if wanted.depth == retriever.depth:
            results = await self._service.retrieve(wanted.queries, wanted.topk)
        else:
            results = await self._retrieve_at(retriever, wanted.queries, wanted.depth)
        return encode_response([hits[: wanted.topk] for hits in results], wanted.return_scores)

    async def _retrieve_at(self, retriever: RerankRetriever, queries: Sequence[str], depth: int) -> list[Hits]:
        """Retrieve with another depth than the server's. Batches and a cache of their own: the results are others."""
        if self._at_depth is None:
            self._at_depth = MicroBatcher(_AtDepth(retriever), self._settings, self._metrics)
        asked = [query for query in queries if query.strip()]
        hits = iter(await self._at_depth.search(asked, depth) if asked else [])
        return [next(hits) if query.strip() else () for query in queries]

    async def stop(self) -> None:
        """Finish what was accepted. The retriever is closed by who owns it."""
        if self._queue is not None:
            await self._queue.stop()
        if self._at_depth is not None:
            await self._at_depth.stop()


class _AtDepth:
    """A reranker whose k is the depth of its first stage: what a batcher needs to search at any depth."""

    def __init__(self, retriever: RerankRetriever) -> None:
        self._retriever = retriever
        self.name, self.parallel = retriever.name, retriever.parallel

    @property
    def size(self) -> int | None:
        return self._retriever.size

    def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        return self._retriever.rank(queries, k)

    def info(self) -> dict[str, Any]:
        return self._retriever.info()

    def close(self) -> None:
        """Nothing: the retriever is another's."""
