"""The app factory: routes, limits and the mapping of errors to status codes. Nothing happens at import."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.requests import ClientDisconnect
from starlette.routing import Route

from retrieval_server.auth import BearerKey, read_key
from retrieval_server.batching import SearchFailedError
from retrieval_server.envelope import CLIENT_CLOSED, Envelope
from retrieval_server.errors import NotReadyError, QueueFullError, SearchUnavailableError
from retrieval_server.metrics import ServerMetrics
from retrieval_server.openapi import DescribedApi
from retrieval_server.rerank_route import Reranking
from retrieval_server.service import Loader, RetrievalService
from retrieval_server.settings import Settings
from retrieval_server.types import Retriever
from retrieval_server.wire import RequestError, encode_response, parse_request

_RETRY_SOON = {"Retry-After": "1"}


def create_app(
    retriever: Retriever | Loader,
    settings: Settings | None = None,
    on_load_failure: Callable[[Exception], None] = lambda error: None,
) -> FastAPI:
    """Build the service around a retriever, or around a function that loads one.

    A function is called in the background when the app starts: ``/healthz`` answers at once, ``/readyz`` tells the
    progress and the other routes answer 503 until it returns. ``on_load_failure`` gets its exception.

    Raises SettingsError when ``settings.api_key_env`` names a variable without a key.
    """
    settings = settings or Settings()
    key = read_key(settings.api_key_env)
    metrics = ServerMetrics()
    service = RetrievalService(retriever, settings, metrics, on_load_failure)
    reranking = Reranking(service, settings, metrics)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        service.start()
        try:
            yield
        finally:
            await reranking.stop()
            await service.stop()

    app = DescribedApi(title="ChatR1 retrieval service", lifespan=lifespan, exception_handlers=_error_answers())
    app.settings = settings
    app.state.metrics = metrics
    if key is not None:
        app.add_middleware(BearerKey, key=key)
    app.add_middleware(Envelope, metrics=metrics, access_log=settings.access_log)  # added last: outermost
    _add_retrieve(app, service, reranking, settings)
    reranking.add_routes(app, _read_body)
    _add_state_routes(app, service, metrics)
    return app


def _add_retrieve(app: FastAPI, service: RetrievalService, reranking: Reranking, settings: Settings) -> None:
    async def retrieve(request: Request) -> Response:
        """Return the best documents of each query, in the queries' order."""
        body = await _read_body(request, settings)
        answer = await reranking.retrieve(body)
        if answer is None:
            wanted = parse_request(body, settings)
            request.scope["log"] = {"queries": len(wanted.queries), "topk": wanted.topk}
            results = await service.retrieve(wanted.queries, wanted.topk)
            answer = encode_response(results, wanted.return_scores)
        return Response(answer, media_type="application/json")

    # Starlette's route: FastAPI's takes a third of a small request's time, for dependencies that there are none of.
    app.router.routes.append(Route("/retrieve", retrieve, methods=["POST"]))


def _add_state_routes(app: FastAPI, service: RetrievalService, metrics: ServerMetrics) -> None:
    @app.get("/healthz", response_model=None)
    async def healthz() -> Response:
        """Answer 200 as long as the process serves requests."""
        return JSONResponse({"status": "ok"})

    @app.get("/readyz", response_model=None)
    async def readyz() -> Response:
        """Answer 200 when queries can be answered, else 503 with the progress of loading or the failure."""
        ready, state = service.readiness()
        return JSONResponse(state) if ready else JSONResponse(state, 503, headers=_RETRY_SOON)

    @app.get("/info", response_model=None)
    async def info() -> Response:
        """Return which corpus is served, how it was indexed, and the limits of a request."""
        return JSONResponse(service.info())

    @app.get("/metrics", response_model=None)
    async def prometheus() -> Response:
        """Return the metrics in Prometheus' text format."""
        return Response(metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")


async def _read_body(request: Request, settings: Settings) -> bytes:
    """Return the request's body; raises RequestError when it is too large or too slow."""
    limit = settings.max_body_bytes
    too_large = RequestError(413, f"the body is larger than {limit} bytes: split the request")
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > limit:
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(settings.body_timeout_s):
            async for chunk in request.stream():
                body += chunk
                if len(body) > limit:
                    raise too_large
    except TimeoutError:
        message = f"the body did not arrive within {settings.body_timeout_s:g} s"
        raise RequestError(408, message) from None
    return bytes(body)


Answer = Callable[[Request, Any], Coroutine[Any, Any, Response]]


def _error_answers() -> dict[int | type[Exception], Answer]:
    """The table of exception type -> answer."""

    def answer(status: int, headers: dict[str, str] | None = None) -> Answer:
        async def respond(request: Request, error: Exception) -> Response:
            return JSONResponse({"detail": str(error)}, status, headers=headers)

        return respond

    async def refused(request: Request, error: RequestError) -> Response:
        return JSONResponse({"detail": error.detail}, error.status, headers=error.headers)

    async def unavailable(request: Request, error: SearchUnavailableError) -> Response:
        wait = error.retry_after_s
        headers = {} if wait is None else {"Retry-After": str(max(1, math.ceil(wait)))}
        return JSONResponse({"detail": str(error)}, 503, headers=headers)

    return {
        RequestError: refused,
        SearchUnavailableError: unavailable,
        NotReadyError: answer(503, _RETRY_SOON),
        QueueFullError: answer(429, _RETRY_SOON),
        SearchFailedError: answer(500),
        ClientDisconnect: answer(CLIENT_CLOSED),  # nobody reads it; the status is for the metrics
    }
