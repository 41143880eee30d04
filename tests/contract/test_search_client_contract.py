"""The wire between ``search_r1`` and ``retrieval_server``: the real client against the real app.

Nothing but this test keeps the two sides together; neither imports the other.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

import infer
from retrieval_server.app import create_app
from retrieval_server.flags import launch
from retrieval_server.settings import Settings
from retrieval_server.types import Document as ServedDocument
from retrieval_server.types import Hit
from search_r1.config import RetrieverConfig
from search_r1.search_client import SearchClient
from verl.config import load_config
from verl.errors import RetrievalError
from verl.types import Document

PASSAGES = [
    ("d1", "Nile", "A long river."),
    ("d2", "Oslo", "A city by a fjord."),
    ("d3", 'The "Fram"', "A ship (1892)."),
]


class WordRetriever:
    """Finds passages by shared words; the rank is the corpus order."""

    name = "words"
    size = len(PASSAGES)
    parallel = 1

    def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        return [self._hits(query)[:k] for query in queries]

    def _hits(self, query: str) -> list[Hit]:
        words = set(query.lower().split())
        return [
            Hit(ServedDocument.of(i, f'"{title}"\n{text}', title, text), 1.0)
            for i, title, text in PASSAGES
            if words & set(f"{title} {text}".lower().replace(".", "").split())
        ]

    def info(self) -> dict[str, Any]:
        return {"corpus": {"sha256": "c" * 64}}

    def close(self) -> None:
        pass


@asynccontextmanager
async def connected(settings: Settings | None = None, **config: Any) -> AsyncIterator[SearchClient]:
    app = create_app(WordRetriever(), settings)
    values = {"url": "http://service/retrieve", "backoff_s": 0.01, **config}
    async with app.router.lifespan_context(app):
        client = SearchClient(RetrieverConfig(**values), httpx.ASGITransport(app=app))
        try:
            yield client
        finally:
            await client.close()


def test_every_program_has_the_same_default_address(tmp_path: Path) -> None:
    file = tmp_path / "backend.yaml"
    file.write_text("backend: {name: bm25, index_path: i, corpus_path: c}\n", encoding="utf-8")
    service = launch(["--config", str(file)])
    address = f"http://{service.host}:{service.port}/retrieve"
    assert RetrieverConfig().url == load_config().task_config.retriever.url == infer.Recipe().url == address


async def test_start_and_corpus_identity() -> None:
    async with connected() as client:
        await client.start()
        await client.start("c" * 64)
        with pytest.raises(RetrievalError, match="sha256 cccc"):
            await client.start("d" * 64)


@pytest.mark.parametrize("n_queries", [1, 2, 3])
async def test_documents_arrive_whole(n_queries: int) -> None:  # T32
    async with connected() as client:
        queries = ["river", "fjord", "ship"][:n_queries]
        answers = await asyncio.gather(*map(client.search, queries))
        assert answers == [(Document(*PASSAGES[index], 1.0),) for index in range(n_queries)]


async def test_no_hit_blank_query_and_topk_above_the_corpus() -> None:  # T33
    async with connected(topk=100) as client:
        assert await client.search("xylophone") == ()
        assert await client.search("  ") == ()
        assert [d.id for d in await client.search("a")] == ["d1", "d2", "d3"]


async def test_many_searches_at_once() -> None:
    async with connected() as client:
        answers = await asyncio.gather(*(client.search(f"river {index}") for index in range(300)))
        assert all(documents[0].id == "d1" for documents in answers)
        assert client.counts.requests == 1 and client.counts.failures == 0


async def test_a_request_over_the_service_limits_is_split() -> None:
    async with connected(Settings(max_queries=2, max_queue=8)) as client:
        answers = await asyncio.gather(*map(client.search, ("river", "fjord", "ship")))
        assert [documents[0].id for documents in answers] == ["d1", "d2", "d3"]


async def test_topk_above_the_service_limit_is_a_named_error() -> None:
    async with connected(Settings(max_topk=5), topk=6) as client:
        with pytest.raises(RetrievalError, match="HTTP 422"):
            await client.search("river")
