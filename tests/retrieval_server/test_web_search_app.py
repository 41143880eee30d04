"""The web backend behind the routes: the published requests, refusals, and what /info shows."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_search_api import PAGED, FakeApi, entry, open_web, running_api, status
from pydantic import ValidationError

from retrieval_server.app import create_app
from retrieval_server.backends.web import pacing
from retrieval_server.settings import Settings
from retrieval_server.specs import WebSpec


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeApi]:
    monkeypatch.setattr(pacing, "_BACKOFF_S", 0.001)
    with running_api() as api:
        yield api


@asynccontextmanager
async def serving(
    api: FakeApi, tmp_path: Path, provider: str = "serper", **options: Any
) -> AsyncIterator[httpx.AsyncClient]:
    app = create_app(open_web(api, tmp_path, provider, **options), Settings(topk=3))
    transport = httpx.ASGITransport(app)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://server", timeout=20) as client,
    ):
        yield client


@pytest.mark.parametrize("provider", PAGED)
async def test_the_request_of_the_published_web_servers(api: FakeApi, tmp_path: Path, provider: str) -> None:
    async with serving(api, tmp_path, provider) as client:
        response = await client.post("/retrieve", json={"queries": ["a", "b"]})
    documents = response.json()["result"]
    assert [[document["contents"] for document in row] for row in documents] == [
        ['"{}"\n{}'.format(*entry(query, i)[::2]) for i in range(3)] for query in "ab"
    ]
    assert all(set(document) == {"id", "contents", "title", "text"} for row in documents for document in row)


async def test_the_request_of_the_published_training_loop(api: FakeApi, tmp_path: Path) -> None:
    async with serving(api, tmp_path) as client:
        request = {"queries": ["a", " "], "topk": 12, "return_scores": True}
        [hits, blank] = (await client.post("/retrieve", json=request)).json()["result"]
    assert [hit["document"]["id"] for hit in hits] == [entry("a", i)[1] for i in range(12)]
    assert [hit["score"] for hit in hits] == [1 / rank for rank in range(1, 13)]
    assert blank == []


async def test_a_spent_budget_is_an_error_of_the_requests_it_concerns(api: FakeApi, tmp_path: Path) -> None:
    async with serving(api, tmp_path, budget=2, parallel=1) as client:

        async def ask(*queries: str) -> httpx.Response:
            return await client.post("/retrieve", json={"queries": queries})

        assert (await ask("a", "b")).status_code == 200
        responses = await asyncio.gather(ask("a"), ask("c"), ask("b", "d"), ask("b"), ask("a", "b"))
        assert [response.status_code for response in responses] == [200, 503, 503, 200, 200]
        assert responses[1].json() == {
            "detail": "query 'c': the budget of 2 paid requests to serper is spent: raise budget; cached queries "
            "are still answered"
        }
        assert "query 'd'" in responses[2].json()["detail"]
        assert responses[1].headers["Retry-After"] == "3600"
        assert (await client.get("/readyz")).status_code == 200
    assert len(api.received) == 2


async def test_a_refusal_is_not_kept(api: FakeApi, tmp_path: Path) -> None:
    async with serving(api, tmp_path, retries=0) as client:
        api.script.append(status(500))
        assert (await client.post("/retrieve", json={"queries": ["a"]})).status_code == 503
        assert (await client.post("/retrieve", json={"queries": ["a"]})).status_code == 200


async def test_info(api: FakeApi, tmp_path: Path) -> None:
    async with serving(api, tmp_path, budget=9) as client:
        for queries in (["a", "b"], ["a"], ["b", "c"]):
            await client.post("/retrieve", json={"queries": queries, "topk": 2})
        await client.post(
            "/retrieve", json={"queries": ["a"], "topk": 7}
        )  # another k: from our cache, not the server's
        info = (await client.get("/info")).json()
    assert info["retriever"] == "web"
    assert info["passages"] is None
    assert {name: info[name] for name in ("provider", "spent", "budget", "requests", "cache")} == {
        "provider": "serper",
        "spent": 3,
        "budget": 9,
        "requests": {"sent": 3, "failed": 0},
        "cache": {"answers": 3, "pages": 0, "hits": 1, "misses": 3, "hit_rate": 0.25},
    }


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"provider": "altavista"}, "'serper', 'serpapi', 'google', 'brave' or 'tavily'"),
        ({"base_url": "ftp://x"}, "must be http"),
        ({"base_url": "https://user:pw@x.example"}, "without user, query"),
        ({"base_url": "https://x.example?key=1"}, "without user, query"),
        ({"base_url": "https://x.example:port"}, "Port"),
        ({"country": "USA"}, "country"),
        ({"language": "english"}, "language"),
        ({"budget": -1}, "greater than or equal to 0"),
        ({"requests_per_second": 0}, "greater than 0"),
        ({"api_key": "x"}, "Extra inputs are not permitted"),
    ],
)
def test_impossible_specs(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        WebSpec(**{"provider": "serper", **options})


def test_a_gateway_may_have_a_path(api: FakeApi, tmp_path: Path) -> None:
    assert (
        WebSpec(provider="serper", base_url="https://gateway.example/serper/").base_url
        == "https://gateway.example/serper"
    )
