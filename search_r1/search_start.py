"""What is asked of a retrieval service before the first search: is it ready, does it serve the right corpus."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import urlsplit

import httpx

from search_r1.config import RetrieverConfig
from search_r1.search_wire import corpus_sha256, request_limits
from verl.errors import RetrievalError

logger = logging.getLogger(__name__)

_PORTS = {8002: "this service and the published ChatR1 servers", 8000: "the published Search-R1 servers"}
_POLL_S = 1.0
_NO_LIMIT = 1_000_000


async def wait_until_ready(
    client: httpx.AsyncClient, config: RetrieverConfig, probe: Callable[[], Awaitable[None]]
) -> None:
    """Poll ``/readyz`` until it says 200; a server without one (the published ones) has to answer ``probe``.

    Raises RetrievalError with the remedy: unreachable, failed to load, still loading after ``start_timeout_s``.
    """
    deadline = time.monotonic() + config.start_timeout_s
    refused, said = 0, ""
    while True:
        try:
            response = await _get(client, config, "readyz")
        except (httpx.HTTPError, TimeoutError) as error:
            refused += 1
            if refused > config.retries:
                reason = str(error) or type(error).__name__
                raise RetrievalError(
                    f"retriever.url {config.url}: retrieval service not reachable ({reason}); {_hint(config.url)}"
                ) from error
            await asyncio.sleep(config.backoff_s * 2 ** (refused - 1))
            continue
        if response.status_code == 200:
            return
        if response.status_code in (404, 405):
            await _probe(probe, config.url)
            return
        said = _report_loading(response, config, said)
        if time.monotonic() > deadline:
            raise RetrievalError(
                f"retriever.url {config.url}: still not ready after {config.start_timeout_s:g} s ({said}); "
                "raise retriever.start_timeout_s or look at the service's log"
            )
        await asyncio.sleep(min(_POLL_S, max(config.backoff_s, 0.05)))


def _report_loading(response: httpx.Response, config: RetrieverConfig, said: str) -> str:
    """Log what a service that is not ready says, unless it was ``said`` before, and return it.

    Raises RetrievalError when waiting cannot help.
    """
    progress = " ".join(response.text.split())[:200]
    if _failed_to_load(response):
        raise RetrievalError(f"retriever.url {config.url}: the service could not load its index: {progress}")
    if response.status_code in (401, 403):
        raise RetrievalError(
            f"retriever.url {config.url}: HTTP {response.status_code}; the service wants a key: "
            "retriever.api_key_env names the environment variable that holds it"
        )
    if progress != said:
        logger.info("waiting for the retrieval service: %s", progress)
    return progress


async def _probe(probe: Callable[[], Awaitable[None]], url: str) -> None:
    try:
        await probe()
    except RetrievalError as error:
        raise RetrievalError(f"{error}; {_hint(url)}") from error


async def check_service(client: httpx.AsyncClient, config: RetrieverConfig, expected: str | None) -> tuple[int, Any]:
    """Compare ``/info`` with what will be asked; return the number of queries of one request, and what it said.

    ``expected`` is the SHA-256 of the corpus that the data were made from, None when the data do not say. Raises
    RetrievalError when the service serves another one, or fewer passages per query than ``topk``. A server without
    ``/info`` passes with a warning.
    """
    url = _beside(config.url, "info")
    try:
        response = await _get(client, config, "info")
        info = response.json() if response.status_code == 200 else None
    except (httpx.HTTPError, TimeoutError, ValueError):
        info = None
    found = corpus_sha256(info)
    if expected is not None and found is None:
        logger.warning("%s does not say which corpus it serves; the data expects sha256 %s", url, expected[:16])
    elif expected is not None and found != expected:
        raise RetrievalError(
            f"retriever.url {config.url} serves a corpus with sha256 {str(found)[:16]}, but the data was made "
            f"from {expected[:16]}; start the service on the right corpus, or rebuild the index"
        )
    limits = request_limits(info)
    if config.topk > limits.get("max_topk", config.topk):
        raise RetrievalError(
            f"retriever.topk={config.topk} is above the service's max_topk {limits['max_topk']} ({config.url}); "
            "lower it, or start the service with a larger --max_topk"
        )
    by_documents = limits.get("max_documents", _NO_LIMIT) // config.topk
    return max(1, min(limits.get("max_queries", _NO_LIMIT), by_documents)), info


async def _get(client: httpx.AsyncClient, config: RetrieverConfig, name: str) -> httpx.Response:
    async with asyncio.timeout(config.timeout_s):
        return await client.get(_beside(config.url, name))


def _beside(url: str, name: str) -> str:
    return f"{url.rstrip('/').rsplit('/', 1)[0]}/{name}"


def _hint(url: str) -> str:
    ports = ", ".join(f"{port} is the default of {whose}" for port, whose in _PORTS.items())
    asked = urlsplit(url).port
    return (
        "start it with `bash retrieval_launch.sh`, or set retriever.url to where it runs"
        f" (port {asked} was asked; {ports})"
    )


def _failed_to_load(response: httpx.Response) -> bool:
    try:
        state = response.json()
    except ValueError:
        return False
    return isinstance(state, dict) and state.get("status") == "failed"
