"""``/rerank`` and the two topk's of a reranking ``/retrieve``: the published wire format, limits, nonsense, load."""

from __future__ import annotations

import asyncio
import json
import random
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import hypothesis
import pytest
import requests
import schemathesis
from hypothesis import strategies
from live_server import live
from retrieval_helpers import ScriptedRetriever
from schemathesis import GenerationMode
from schemathesis.specs.openapi.checks import negative_data_rejection, positive_data_acceptance
from tiny_cross_encoder import CountingScorer

from retrieval_server.app import create_app
from retrieval_server.backends.rerank import RerankRetriever
from retrieval_server.errors import SettingsError
from retrieval_server.rerank_server import launch
from retrieval_server.settings import Settings
from retrieval_server.specs import RerankSpec
from retrieval_server.types import Retriever

ANSWERS = {"n3": ["n1", "n2", "n3", "n4", "n5"], "n2 q": ["n1", "n2"]}
RIVER, LAKE = {"contents": '"River"\nA river and a boat.'}, {"contents": '"Lake"\nlake lake'}


@asynccontextmanager
async def client_of(backend: Retriever, **settings: Any) -> AsyncIterator[httpx.AsyncClient]:
    app = create_app(backend, Settings(**settings))
    transport = httpx.ASGITransport(app)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://server", timeout=20) as client,
    ):
        yield client


def backend(depth: int = 4) -> RerankRetriever:
    return RerankRetriever(ScriptedRetriever(ANSWERS), CountingScorer(), depth)


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(backend()) as client:
        yield client


async def post(client: httpx.AsyncClient, path: str, **request: Any) -> Any:
    response = await client.post(path, json=request)
    assert response.status_code == 200, response.text
    assert set(response.json()) == {"result"}
    return response.json()["result"]


async def test_rerank_answers_to_the_letter(client: httpx.AsyncClient) -> None:
    """Scores on: objects of a document, which is the string that was scored, and its score; off: the strings."""
    request = {"queries": ["lake", "boat."], "documents": [[RIVER, LAKE], [{"document": {**LAKE, "id": "7"}}, RIVER]]}
    river, lake = '(Title: "River") A river and a boat.', '(Title: "Lake") lake lake'
    assert await post(client, "/rerank", **request, return_scores=True) == [
        [{"document": lake, "score": 2.0}, {"document": river, "score": 0.0}],
        [{"document": river, "score": 1.0}, {"document": lake, "score": 0.0}],
    ]
    assert await post(client, "/rerank", **request) == [[lake, river], [river, lake]]
    assert await post(client, "/rerank", **request, rerank_topk=1, unknown=3) == [[lake], [river]]
    assert await post(client, "/rerank", **request, rerank_topk=None) == [[lake, river], [river, lake]]


async def test_the_answer_of_retrieve_can_be_reranked_as_it_is(client: httpx.AsyncClient) -> None:
    found = await post(client, "/retrieve", queries=["n3", "n2 q"], return_scores=True)
    ranked = await post(client, "/rerank", queries=["n2", "n1"], documents=found)
    assert [texts[0][-2:] for texts in ranked] == ["n2", "n1"]


async def test_queries_keep_their_place_whatever_they_are_given(client: httpx.AsyncClient) -> None:
    documents: list[Any] = [[], [LAKE], [LAKE, RIVER], [{"contents": ""}]]
    result = await post(client, "/rerank", queries=["a", "", "zürich 😀", "\x00"], documents=documents)
    assert [len(texts) for texts in result] == [0, 1, 2, 1]
    assert await post(client, "/rerank", queries=[], documents=[]) == []


async def test_topk_zero_and_null_mean_the_default() -> None:
    async with client_of(backend(), topk=2) as client:
        for topk in (0, None):
            result = await post(client, "/rerank", queries=["lake"], documents=[[LAKE] * 5], rerank_topk=topk)
            assert len(result[0]) == 2


BAD_BODIES: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", "Invalid JSON"),
    "no documents": (b'{"queries": ["a"]}', "Field required"),
    "fewer lists than queries": (b'{"queries": ["a", "b"], "documents": [[]]}', "1 lists of documents for 2 queries"),
    "one flat list": (b'{"queries": ["a"], "documents": [{"contents": "x"}]}', "valid array"),
    "a string for a document": (b'{"queries": ["a"], "documents": [["x"]]}', "should be an object"),
    "no contents": (b'{"queries": ["a"], "documents": [[{"text": "x"}]]}', "Field required"),
    "null contents": (b'{"queries": ["a"], "documents": [[{"contents": null}]]}', "valid string"),
    "null document": (b'{"queries": ["a"], "documents": [[{"document": null}]]}', "should be an object"),
    "lone surrogate": (b'{"queries": ["a"], "documents": [[{"contents": "\\ud800"}]]}', "hex escape"),
    "negative topk": (b'{"queries": [], "documents": [], "rerank_topk": -1}', "rerank_topk is -1; it must be from 1"),
    "huge topk": (b'{"queries": [], "documents": [], "rerank_topk": 1001}', "rerank_topk is 1001"),
    "deep": (b'{"queries": [], "documents": ' + b"[" * 100_000, "Invalid JSON"),
}


@pytest.mark.parametrize("case", BAD_BODIES)
async def test_nonsense_gets_a_422_that_says_why(client: httpx.AsyncClient, case: str) -> None:
    body, message = BAD_BODIES[case]
    response = await client.post("/rerank", content=body)
    assert response.status_code == 422, response.text
    assert any(message in entry["msg"] for entry in response.json()["detail"]), response.text
    assert await post(client, "/rerank", queries=["a"], documents=[[LAKE]])


async def test_damaged_requests_never_break_the_server(client: httpx.AsyncClient) -> None:
    draw = random.Random(6)
    good = json.dumps({"queries": ["lake é"], "documents": [[LAKE, {"document": RIVER}]], "rerank_topk": 3}).encode()
    for _ in range(200):
        body = bytearray(good)
        for _ in range(draw.randint(1, 4)):
            position = draw.randrange(len(body))
            if draw.random() < 0.5:
                body[position] = draw.randrange(256)
            else:
                body[position:position] = draw.choice([b"\\u", b'"', b"[", b"null", b"-", b"1e9", b"\xff", b"}"])
        response = await client.post("/rerank", content=bytes(body))
        assert response.status_code in (200, 422), (bytes(body), response.text)


async def test_too_much_at_once_is_a_413_and_too_much_waiting_a_429() -> None:
    retriever = backend()
    gate, scored = threading.Event(), CountingScorer.logits
    scorer = retriever._scorer

    def waiting(pairs: Any) -> list[float]:
        assert gate.wait(10)
        return scored(scorer, pairs)  # type: ignore[arg-type]

    scorer.logits = waiting  # type: ignore[method-assign]
    async with client_of(retriever, max_queries=2, max_documents=6) as client:
        many = await client.post("/rerank", json={"queries": ["a"] * 3, "documents": [[]] * 3})
        assert (many.status_code, many.json()["detail"]) == (413, "3 queries in one request; the limit is 2: split it")
        many = await client.post("/rerank", json={"queries": ["a"], "documents": [[LAKE] * 7]})
        assert (many.status_code, many.json()["detail"]) == (
            413,
            "7 documents in one request; the limit is 6: split it",
        )
        accepted = []
        for _ in range(2):  # the first is with the model, the second waits
            accepted.append(asyncio.create_task(post(client, "/rerank", queries=["lake"], documents=[[LAKE] * 4])))
            await asyncio.sleep(0.05)
        refused = await client.post("/rerank", json={"queries": ["a"], "documents": [[LAKE] * 3]})
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        assert refused.json()["detail"] == "4 pairs wait to be reranked, the limit is 6"
        assert (await client.get("/healthz")).status_code == 200  # the loop is free while the model works
        gate.set()
        assert [len((await task)[0]) for task in accepted] == [3, 3]


async def test_what_waits_is_scored_together_and_a_failure_stays_with_its_batch(caplog: Any) -> None:
    retriever = backend()
    async with client_of(retriever) as client:
        requests = [{"queries": ["lake"], "documents": [[LAKE, RIVER]]} for _ in range(8)]
        results = await asyncio.gather(*(post(client, "/rerank", **request) for request in requests))
        assert all(result == results[0] for result in results)
        calls = retriever._scorer.calls  # type: ignore[attr-defined]
        assert sum(map(len, calls)) == 16
        assert len(calls) < 8
        failed = await client.post("/rerank", json={"queries": ["explode"], "documents": [[LAKE]]})
        assert (failed.status_code, failed.json()) == (500, {"detail": "ValueError: scripted failure"})
        assert await post(client, "/rerank", **requests[0]) == results[0]
    assert "reranking for 1 queries failed" in caplog.text


async def test_stopping_scores_what_was_accepted_before_it_closes_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    retriever = backend()
    events: list[str] = []
    scored = CountingScorer.logits

    def slowly(self: CountingScorer, pairs: Any) -> list[float]:
        threading.Event().wait(0.02)
        events.append("scored")
        return scored(self, pairs)

    monkeypatch.setattr(CountingScorer, "logits", slowly)
    monkeypatch.setattr(retriever.first, "close", lambda: events.append("closed"))
    async with client_of(retriever) as client:
        work = [
            post(client, "/rerank", queries=["lake"] * 20, documents=[[LAKE] * 100] * 20),
            post(client, "/retrieve", queries=["n3"], topk_retrieval=2),
        ]
        tasks = [asyncio.create_task(request) for request in work]
        await asyncio.sleep(0.01)
    assert events == ["scored"] * 5 + ["closed"]
    assert [[len(hits) for hits in await task] for task in tasks] == [[3] * 20, [2]]


async def test_a_backend_without_a_cross_encoder_says_so() -> None:
    async with client_of(ScriptedRetriever({})) as client:
        response = await client.post("/rerank", json={"queries": [], "documents": []})
        assert (response.status_code, response.json()["detail"]) == (
            404,
            "the backend is scripted, which has no cross-encoder: serve rerank",
        )


async def test_a_server_that_only_reranks() -> None:
    async with client_of(RerankRetriever(None, CountingScorer(), 10)) as client:
        assert await post(client, "/rerank", queries=["lake"], documents=[[LAKE]]) == [['(Title: "Lake") lake lake']]
        response = await client.post("/retrieve", json={"queries": ["a"]})
        assert response.status_code == 404
        assert "only reranks" in response.json()["detail"]
        info = (await client.get("/info")).json()
        assert (info["retriever"], info["passages"]) == ("rerank", None)


def found(result: Any) -> list[list[str]]:
    return [[hit["document"]["id"] for hit in hits] for hits in result]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, ["n3", "n1", "n2"]),
        ({"topk_rerank": 1}, ["n3"]),
        ({"topk_retrieval": 2, "topk_rerank": 5}, ["n1", "n2"]),
        ({"topk_retrieval": 5, "topk_rerank": 5}, ["n3", "n1", "n2", "n4", "n5"]),
        ({"topk_retrieval": None, "topk_rerank": 0, "topk": 4}, ["n3", "n1", "n2", "n4"]),
        ({"topk": 2}, ["n3", "n1"]),
        ({"topk": 1, "topk_rerank": 2}, ["n3", "n1"]),
        ({"topk": 100}, ["n3", "n1", "n2", "n4"]),
    ],
)
async def test_the_published_combined_request(
    client: httpx.AsyncClient, fields: dict[str, Any], expected: list[str]
) -> None:
    queries = ["n3", " ", "n2 q"]
    result = await post(client, "/retrieve", queries=queries, return_scores=True, **fields)
    assert found(result)[0] == expected
    assert result[1] == []
    plain = await post(client, "/retrieve", queries=queries, **fields)
    assert plain == [[hit["document"] for hit in hits] for hits in result]


@pytest.mark.parametrize(
    ("fields", "status", "message"),
    [
        ({"topk_retrieval": -1}, 422, "topk_retrieval is -1; it must be from 1 to 1000 (null or 0: the default 4)"),
        ({"topk_rerank": -2}, 422, "topk_rerank is -2"),
        ({"topk_retrieval": 1001}, 422, "topk_retrieval is 1001"),
        ({"topk_retrieval": "many"}, 422, "valid integer"),
        ({"topk_retrieval": 40, "topk_rerank": 2}, 413, "2 queries times topk_retrieval 40 is above 60 documents"),
        ({"topk": 31}, 413, "2 queries times topk 31 is above 60 documents"),
    ],
)
async def test_combined_requests_out_of_range(fields: dict[str, Any], status: int, message: str) -> None:
    async with client_of(backend(), max_documents=60) as client:
        response = await client.post("/retrieve", json={"queries": ["a", "b"], **fields})
        assert response.status_code == status
        assert message in response.text


async def test_any_other_backend_ignores_the_two_topks() -> None:
    async with client_of(ScriptedRetriever(ANSWERS)) as client:
        result = await post(client, "/retrieve", queries=["n3"], topk_retrieval=1, topk_rerank=1, return_scores=True)
        assert found(result) == [["n1", "n2", "n3"]]


def generated(operation: Any, url: str, n: int) -> set[int]:
    """Send n generated requests, check every answer against the description, and return the statuses seen."""
    cases = [operation.as_strategy(generation_mode=mode) for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE)]
    seen = set()
    with requests.Session() as session:

        @hypothesis.settings(
            max_examples=n,
            deadline=None,
            database=None,
            derandomize=True,
            suppress_health_check=list(hypothesis.HealthCheck),
            phases=[hypothesis.Phase.generate],
        )
        @hypothesis.given(case=strategies.one_of(*cases))
        def send(case: Any) -> None:
            # A number as text is understood, as by the published server; and no schema says that there must be as many
            # lists of documents as queries.
            excluded = [negative_data_rejection, positive_data_acceptance]
            seen.add(case.call_and_validate(url, session=session, excluded_checks=excluded).status_code)

        send()
    return seen


@pytest.mark.parametrize("path", ["/rerank", "/retrieve"])
@pytest.mark.parametrize("n", [30, pytest.param(500, marks=pytest.mark.slow)])
def test_generated_requests_are_answered_as_described(path: str, n: int) -> None:
    settings: dict[str, Any] = {"max_queries": 4, "max_documents": 30}
    described = schemathesis.openapi.from_dict(create_app(backend(), Settings(**settings)).openapi())
    with live(backend(), **settings) as server:
        seen = generated(described[path]["POST"], server.url, n)
    assert {200, 422} <= seen <= {200, 413, 422}


def test_the_published_flags_and_their_defaults() -> None:
    default = launch([])
    assert default.backend == RerankSpec()
    assert (default.port, default.host, default.settings.topk) == (6980, "127.0.0.1", 3)
    assert (RerankSpec().max_length, RerankSpec().batch_size) == (512, 32)
    assert RerankSpec().model_path == "cross-encoder/ms-marco-MiniLM-L12-v2"
    flags = (
        "--max_length 128 --rerank_topk 5 --rerank_model_name_or_path m --batch_size 8 "
        "--reranker_type sentence_transformer --port 0"
    )
    given = launch(flags.split())
    assert given.backend == RerankSpec(model_path="m", max_length=128, batch_size=8)
    assert (given.port, given.settings.topk) == (0, 5)
    with pytest.raises(SettingsError, match="batch_size"):
        launch(["--batch_size", "0"])


def test_the_openapi_description_knows_the_request(tmp_path: Path) -> None:
    schema = create_app(ScriptedRetriever({})).openapi()
    body = schema["paths"]["/rerank"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert set(body["properties"]) == {"queries", "documents", "rerank_topk", "return_scores"}
    assert "$ref" not in json.dumps(body)
