"""Both directions of the published wire: our client against servers that answer as the published ones do, defects
included, and the requests of the published clients, byte for byte, against our server.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from published_app import KINDS, PASSAGES, published_app
from starlette.types import ASGIApp

from retrieval_server.app import create_app
from retrieval_server.types import Document as ServedDocument
from retrieval_server.types import Hit
from search_r1.config import RetrieverConfig
from search_r1.search_client import SearchClient
from verl.errors import RetrievalError
from verl.types import Document

# -- our client, their servers ----------------------------------------------------------------------------------


@asynccontextmanager
async def client_of(app: ASGIApp, **config: Any) -> AsyncIterator[SearchClient]:
    values = {"url": "http://published/retrieve", "backoff_s": 0.001, "retries": 1, **config}
    client = SearchClient(RetrieverConfig(**values), httpx.ASGITransport(app, raise_app_exceptions=False))
    try:
        yield client
    finally:
        await client.close()


EXPECTED: dict[str, dict[str, Document]] = {
    "dense": {i: Document(i, title, text, 1.0) for i, title, text in PASSAGES},
    "bm25": {i: Document("", title.replace('"', ""), text, 2.5) for i, title, text in PASSAGES},
    "rerank_chatr1": {i: Document("", title, text, 0.5) for i, title, text in PASSAGES},
    "rerank_search_r1": {i: Document("", title, text, 0.5) for i, title, text in PASSAGES},
    "web": {i: Document("", title, text) for i, title, text in PASSAGES},
}


@pytest.mark.parametrize("n_queries", [1, 2, 3])
@pytest.mark.parametrize("kind", KINDS)
async def test_passages_of_every_published_server(kind: str, n_queries: int) -> None:  # T32
    async with client_of(published_app(kind), topk=1) as client:
        answers = await asyncio.gather(*map(client.search, ["river", "fjord", "ship"][:n_queries]))
    assert answers == [(EXPECTED[kind][passage],) for passage in ["7", "8", "9"][:n_queries]]


async def test_padding_of_the_published_dense_server_is_no_passage() -> None:  # T33
    async with client_of(published_app("dense"), topk=3) as client:
        assert await client.search("river") == (EXPECTED["dense"]["7"],)
        assert await client.search("xylophone") == ()


async def test_a_query_that_breaks_the_published_server_fails_alone() -> None:
    async with client_of(published_app("bm25")) as client:
        found = await asyncio.gather(*map(client.search, ("river", "poison", "ship")), return_exceptions=True)
    assert [type(answer) for answer in found] == [tuple, RetrievalError, tuple]


@pytest.mark.parametrize("n_queries", [1, 2, 3])
async def test_scores_are_always_asked_for_since_published_servers_fail_without(n_queries: int) -> None:
    """The imitation has the published defect; a client that left the field out would meet it here."""
    app = published_app("dense")
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://published") as plain:
        answer = await plain.post("/retrieve", json={"queries": ["river", "fjord", "ship"][:n_queries], "topk": 2})
    if n_queries == 2:
        assert answer.status_code == 200 and isinstance(answer.json()["result"][0], dict)
    else:
        assert answer.status_code == 500


async def test_published_servers_have_no_health_route_and_are_asked_a_query(caplog: pytest.LogCaptureFixture) -> None:
    async with client_of(published_app("web")) as client:
        with caplog.at_level(logging.WARNING):
            await client.start("a" * 64)
    assert "does not say which corpus" in caplog.text


@pytest.mark.parametrize(("url", "port"), [("http://127.0.0.1:9/retrieve", 9), ("http://localhost:9", 9)])
async def test_an_address_where_nobody_listens_is_told_with_the_published_ports(url: str, port: int) -> None:
    client = SearchClient(RetrieverConfig(url=url, retries=0))
    with pytest.raises(RetrievalError, match=rf"not reachable.*port {port} was asked; 8002 is .*8000 is"):
        await client.start()
    await client.close()


@pytest.mark.parametrize("url", ["127.0.0.1:8002/retrieve", "ftp://host/retrieve", "http:///retrieve", "http://h:x/"])
def test_what_is_no_address_is_refused_in_the_config(url: str) -> None:
    with pytest.raises(ValueError, match=r"url"):
        RetrieverConfig(url=url)


def test_a_bare_address_means_its_endpoint() -> None:
    assert RetrieverConfig(url="http://host:8000").url == "http://host:8000/retrieve"
    assert RetrieverConfig(url="https://host/").url == "https://host/retrieve"
    assert RetrieverConfig(url="https://host/search/v2").url == "https://host/search/v2"


# -- their clients, our server ----------------------------------------------------------------------------------


class Words:
    """Every passage for every query, with its rank as score."""

    name = "words"
    size = len(PASSAGES)
    parallel = 1

    def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        documents = [ServedDocument.of(i, f'"{title}"\n{text}', title, text) for i, title, text in PASSAGES]
        return [[Hit(document, 3.0 - rank) for rank, document in enumerate(documents)][:k] for _ in queries]

    def info(self) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        pass


async def answer_of(body: bytes, content_type: str = "application/json") -> Any:
    app = create_app(Words())
    async with app.router.lifespan_context(app):
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://ours") as client:
            response = await client.post("/retrieve", content=body, headers={"Content-Type": content_type})
    assert response.status_code == 200, response.text
    return response.json()["result"]


def as_the_training_loop_shows_it(hits: Sequence[dict[str, Any]]) -> str:
    """What the published loop makes of one query's result: the first line of ``contents`` is the title."""
    shown = ""
    for number, hit in enumerate(hits, 1):
        lines = hit["document"]["contents"].split("\n")
        shown += f"Doc {number}(Title: {lines[0]}) " + "\n".join(lines[1:]) + "\n"
    return shown


async def test_the_request_of_the_published_training_loop() -> None:
    result = await answer_of(b'{"queries": ["Caf\\u00e9 \\ud83d\\ude00", "b"], "topk": 2, "return_scores": true}')
    assert [as_the_training_loop_shows_it(hits) for hits in result] == [
        'Doc 1(Title: "Nile") A long river.\nDoc 2(Title: "Oslo") A city by a fjord.\n'
    ] * 2


async def test_the_request_of_the_published_demonstration() -> None:
    queries = ["What is the capital of France?", "Explain neural networks."] * 200
    result = await answer_of(json.dumps({"queries": queries, "topk": 5, "return_scores": True}).encode())
    assert [len(hits) for hits in result] == [3] * 400
    assert all(set(hit) == {"document", "score"} for hit in result[0])
    assert {"id", "contents"} <= set(result[0][0]["document"])


async def test_the_request_of_the_published_reranking_client() -> None:
    body = {"queries": ["a"], "topk_retrieval": 10, "topk_rerank": 3, "return_scores": True}
    assert len((await answer_of(json.dumps(body).encode()))[0]) == 3


@pytest.mark.parametrize("fields", ["", ', "topk": null', ', "topk": 0', ', "return_scores": false'])
@pytest.mark.parametrize("n_queries", [0, 1, 2, 3])
async def test_the_shortest_requests_give_documents_alone(n_queries: int, fields: str) -> None:  # T32
    result = await answer_of(f'{{"queries": {json.dumps(["x"] * n_queries)}{fields}}}'.encode())
    assert [[document["id"] for document in hits] for hits in result] == [["7", "8", "9"]] * n_queries


async def test_clients_that_forget_the_content_type() -> None:
    result = await answer_of(b'{"queries":["x"],"topk":1}', "application/x-www-form-urlencoded")
    assert result[0][0]["id"] == "7"


async def test_our_client_sends_the_published_request_and_nothing_else() -> None:
    seen: list[dict[str, Any]] = []

    def record(request: httpx.Request) -> httpx.Response:
        assert request.headers["Content-Type"] == "application/json"
        seen.append(json.loads(request.content))
        return httpx.Response(200, json={"result": [[]]})

    client = SearchClient(RetrieverConfig(topk=3), httpx.MockTransport(record))
    await client.search("river")
    await client.close()
    assert seen == [{"queries": ["river"], "topk": 3, "return_scores": True}]
