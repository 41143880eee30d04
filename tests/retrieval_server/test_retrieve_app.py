"""The HTTP surface, in process: the wire format, the limits, what happens to nonsense, readiness."""

from __future__ import annotations

import asyncio
import json
import logging
import random
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx
import pytest
from retrieval_helpers import PASSAGES, ScriptedRetriever, open_index

from retrieval_server.app import create_app
from retrieval_server.errors import IndexFolderError, SearchUnavailableError, SettingsError
from retrieval_server.service import Loader
from retrieval_server.settings import Settings
from retrieval_server.types import LoadProgress, Retriever


@asynccontextmanager
async def client_of(source: Retriever | Loader, **settings: Any) -> AsyncIterator[httpx.AsyncClient]:
    app = create_app(source, Settings(**settings))
    transport = httpx.ASGITransport(app)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://server", timeout=20) as client,
    ):
        yield client


@pytest.fixture
async def client(built: tuple[Path, Path]) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(open_index(*built), topk=2) as client:
        yield client


async def ask(client: httpx.AsyncClient, **request: Any) -> Any:
    response = await client.post("/retrieve", json=request)
    assert response.status_code == 200, response.text
    return response.json()["result"]


QUERIES = ["festival", "Lake Orvel", "Ada Tron"]


@pytest.mark.parametrize("n", [1, 2, 3])
async def test_with_and_without_scores_the_documents_are_the_same(client: httpx.AsyncClient, n: int) -> None:
    scored = await ask(client, queries=QUERIES[:n], topk=3, return_scores=True)
    plain = await ask(client, queries=QUERIES[:n], topk=3, return_scores=False)
    assert [[hit["document"] for hit in hits] for hits in scored] == plain
    assert plain == await ask(client, queries=QUERIES[:n], topk=3)  # false is the default
    assert [hits[0]["id"] for hits in plain] == ["town:2", "lake:0", "person:3"][:n]
    assert all(set(hit) == {"document", "score"} for hits in scored for hit in hits)
    assert all(hits == sorted(hits, key=lambda hit: -hit["score"]) for hits in scored)
    identifier, title, text = PASSAGES[2]
    assert plain[0][0] == {"id": identifier, "contents": f'"{title}"\n{text}', "title": title, "text": text}


async def test_scores_are_those_of_the_backend(client: httpx.AsyncClient, built: tuple[Path, Path]) -> None:
    [hits] = await ask(client, queries=["lake north"], topk=5, return_scores=True)
    assert [hit["score"] for hit in hits] == [hit.score for hit in open_index(*built).search(["lake north"], 5)[0]]


@pytest.mark.parametrize(
    ("topk", "n"),
    [({}, 2), ({"topk": None}, 2), ({"topk": 0}, 2), ({"topk": 1}, 1), ({"topk": "3"}, 3), ({"topk": 1000}, 4)],
)
async def test_topk(client: httpx.AsyncClient, topk: dict[str, Any], n: int) -> None:
    [hits] = await ask(client, queries=["river lake boat mirel"], **topk)
    assert len(hits) == n


async def test_blank_queries_keep_their_place(client: httpx.AsyncClient) -> None:
    result = await ask(client, queries=["", "festival", " \t\n", "the", "quantum", "festival"])
    assert [[hit["id"] for hit in hits] for hits in result] == [[], ["town:2"], [], [], [], ["town:2"]]
    assert await ask(client, queries=[]) == []
    assert await ask(client, queries=[""]) == [[]]


async def test_unknown_fields_are_ignored(client: httpx.AsyncClient) -> None:
    assert len((await ask(client, queries=["boat"], top_k=1, foo=[1], topk_retrieval=9))[0]) == 2


@pytest.mark.parametrize(
    "query", ["x" * 100_000, " ".join(f"w{i}" for i in range(15_000)), "\x00", "\ufffe \U0010ffff", '"}]}', "a\u0301"]
)
async def test_odd_queries_are_answered(client: httpx.AsyncClient, query: str) -> None:
    result = await ask(client, queries=[query, "festival"])
    assert [[hit["id"] for hit in hits] for hits in result] == [[], ["town:2"]]


BAD_BODIES: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", "Invalid JSON"),
    "not JSON": (b"queries", "Invalid JSON"),
    "half": (b'{"queries": ["a"', "Invalid JSON"),
    "invalid UTF-8": (b'{"queries": ["\xff\xfe"]}', "Invalid JSON"),
    "lone surrogate": (b'{"queries": ["\\ud800"]}', "hex escape"),
    "lone low surrogate": (b'{"queries": ["a \\udc00 b"]}', "Invalid JSON"),
    "surrogates the wrong way round": (b'{"queries": ["\\udc00\\ud800"]}', "Invalid JSON"),
    "a list": (b'["a"]', "object"),
    "no queries": (b'{"query": ["a"]}', "Field required"),
    "null queries": (b'{"queries": null}', "valid array"),
    "a string for the list": (b'{"queries": "a"}', "valid array"),
    "a number among the queries": (b'{"queries": ["a", 3]}', "valid string"),
    "nested": (b'{"queries": [["a"]]}', "valid string"),
    "negative topk": (b'{"queries": ["a"], "topk": -1}', "topk is -1; it must be from 1 to 1000"),
    "huge topk": (b'{"queries": ["a"], "topk": 1001}', "topk is 1001"),
    "enormous topk": (b'{"queries": ["a"], "topk": 1e400}', "finite number"),
    "more digits than an integer has": (b'{"queries": ["a"], "topk": ' + b"9" * 5000 + b"}", "out of range"),
    "fractional topk": (b'{"queries": ["a"], "topk": 1.5}', "integer"),
    "textual topk": (b'{"queries": ["a"], "topk": "many"}', "integer"),
    "textual return_scores": (b'{"queries": ["a"], "return_scores": "perhaps"}', "boolean"),
    "deep": (b'{"queries": ' + b"[" * 200_000, "Invalid JSON"),
}


@pytest.mark.parametrize("case", BAD_BODIES)
async def test_nonsense_gets_a_422_that_says_why_and_the_next_request_is_served(
    client: httpx.AsyncClient, case: str
) -> None:
    body, message = BAD_BODIES[case]
    response = await client.post("/retrieve", content=body)
    assert response.status_code == 422, response.text
    assert any(message in entry["msg"] for entry in response.json()["detail"]), response.text
    assert all(entry["loc"][0] == "body" for entry in response.json()["detail"])
    assert len((await ask(client, queries=["festival"]))[0]) == 1


async def test_damaged_requests_are_answered_or_refused_but_never_break_the_server(client: httpx.AsyncClient) -> None:
    draw = random.Random(5)
    good = json.dumps({"queries": ["festival é", "\U0001f600 lake"], "topk": 3, "return_scores": True}).encode()
    statuses = set()
    for _ in range(400):
        body = bytearray(good)
        for _ in range(draw.randint(1, 4)):
            position, action = draw.randrange(len(body)), draw.random()
            if action < 0.5:
                body[position] = draw.randrange(256)
            elif action < 0.75:
                del body[position : position + draw.randint(1, 10)]
            else:
                body[position:position] = draw.choice([b"\\u", b'"', b"[", b"null", b"-", b"1e9", b"\xff", b"}"])
            body = body or bytearray(b" ")
        response = await client.post("/retrieve", content=bytes(body))
        statuses.add(response.status_code)
        assert response.status_code in (200, 422), (bytes(body), response.text)
        assert set(response.json()) == ({"result"} if response.status_code == 200 else {"detail"})
    assert statuses == {200, 422}
    assert len((await ask(client, queries=["festival"]))[0]) == 1


async def test_of_many_mistakes_one_is_told_and_no_time_lost(client: httpx.AsyncClient) -> None:
    """Every field's first mistake. Listing all of a large body's would take the event loop for seconds."""
    body = b'{"queries": ["a", ' + b"1, " * 1_000_000 + b'2], "topk": [], "return_scores": 7}'
    started = time.process_time()
    response = await client.post("/retrieve", content=body)
    assert time.process_time() - started < 1
    assert response.status_code == 422
    assert [entry["loc"] for entry in response.json()["detail"]] == [
        ["body", "queries", 1],
        ["body", "topk"],
        ["body", "return_scores"],
    ]


async def test_wrong_method_and_path(client: httpx.AsyncClient) -> None:
    for method in ("GET", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS", "BREW"):
        refused = await client.request(method, "/retrieve")
        assert (refused.status_code, refused.headers["allow"]) == (405, "POST"), method
    assert (await client.get("/retrieve")).json() == {"detail": "Method Not Allowed"}
    assert (await client.post("/metrics")).status_code == 405
    assert (await client.post("/search", json={})).json() == {"detail": "Not Found"}
    assert len((await ask(client, queries=["festival"]))[0]) == 1


async def test_requests_that_are_too_large() -> None:
    limits = {"max_queries": 3, "max_documents": 20, "max_body_bytes": 200}
    async with client_of(ScriptedRetriever({}), **limits) as client:

        async def status_and_detail(**request: Any) -> tuple[int, str]:
            response = await client.post("/retrieve", **request)
            return response.status_code, response.json()["detail"]

        assert await status_and_detail(json={"queries": ["a"] * 4}) == (
            413,
            "4 queries in one request; the limit is 3: split it",
        )
        assert await status_and_detail(json={"queries": ["a"] * 3, "topk": 7}) == (
            413,
            "3 queries times topk 7 is above 20 documents: split the request",
        )
        too_large = (413, "the body is larger than 200 bytes: split the request")
        assert await status_and_detail(json={"queries": ["a" * 200]}) == too_large

        async def chunks() -> AsyncIterator[bytes]:  # no Content-Length to judge by
            for _ in range(100):
                yield b"x" * 100

        assert await status_and_detail(content=chunks()) == too_large
        assert await ask(client, queries=["a"]) == [[]]


async def test_ten_thousand_queries_are_refused_and_four_thousand_answered(client: httpx.AsyncClient) -> None:
    refused = await client.post("/retrieve", json={"queries": ["boat"] * 10_000})
    assert (refused.status_code, refused.json()["detail"]) == (
        413,
        "10000 queries in one request; the limit is 4096: split it",
    )
    result = await ask(client, queries=[f"boat {i}" for i in range(4096)], topk=1)
    assert [hits[0]["id"] for hits in result] == ["town:2"] * 4096


async def test_the_published_clients_request_is_answered(client: httpx.AsyncClient) -> None:
    """Byte for byte as the published training loop sends it, through a client that sets no content type of its own."""
    body = b'{"queries": ["festival", "Ada Tron"], "topk": 3, "return_scores": true}'
    for headers in ({"Content-Type": "application/json"}, {}, {"Content-Type": "text/plain"}):
        response = await client.post("/retrieve", content=body, headers=headers)
        assert response.headers["content-type"] == "application/json"
        contents = [[hit["document"]["contents"] for hit in hits] for hits in response.json()["result"]]
        assert contents[0] == [f'"{PASSAGES[2][1]}"\n{PASSAGES[2][2]}']
        assert contents[1][0].split("\n")[0] == '"Ada Tron"'


async def test_a_backend_that_cannot_answer_now_is_a_503_that_says_when() -> None:
    class Away(ScriptedRetriever):
        def search(self, queries: Any, k: int) -> Any:
            raise SearchUnavailableError("no replica answers", 2.5 if queries == ["soon"] else None)

    async with client_of(Away({})) as client:
        soon, never = [await client.post("/retrieve", json={"queries": [query]}) for query in ("soon", "never")]
    assert (soon.status_code, soon.json(), soon.headers["retry-after"]) == (503, {"detail": "no replica answers"}, "3")
    assert (never.status_code, "retry-after" in never.headers) == (503, False)


async def test_a_key_is_asked_for_everywhere_but_on_healthz(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv("RETRIEVAL_KEY", "s3cret-ü")
    good = {b"authorization": "Bearer s3cret-ü".encode()}
    wrong: list[dict[bytes, bytes]] = [
        {},
        {b"authorization": b"Bearer s3cret"},
        {b"authorization": b"Bearer s3cret-\xfc"},
        {b"authorization": b"Bearer "},
        {b"authorization": "Basic s3cret-ü".encode()},
        {b"authorization": "s3cret-ü".encode()},
    ]
    async with client_of(ScriptedRetriever({"a": ["1"]}), api_key_env="RETRIEVAL_KEY", access_log=True) as client:
        assert (await client.get("/healthz")).status_code == 200
        for path in ("/readyz", "/info", "/metrics", "/openapi.json", "/nowhere"):
            assert (await client.get(path)).status_code == 401
            assert (await client.get(path, headers=good)).status_code == (404 if path == "/nowhere" else 200)
        for headers in wrong:
            refused = await client.post("/retrieve", json={"queries": ["a"]}, headers=headers)
            assert (refused.status_code, refused.headers["www-authenticate"]) == (401, "Bearer")
            assert refused.headers["connection"] == "close"  # its body was not read
            assert "Authorization: Bearer KEY" in refused.json()["detail"]
        answered = await client.post("/retrieve", json={"queries": ["a"]}, headers=good)
        assert [document["id"] for document in answered.json()["result"][0]] == ["1"]
        lower = {b"authorization": "bearer  s3cret-ü".encode()}
        assert (await client.get("/info", headers=lower)).status_code == 200
        described = (await client.get("/openapi.json", headers=good)).json()
        assert described["paths"]["/healthz"]["get"]["security"] == []
        assert "401" in described["paths"]["/retrieve"]["post"]["responses"]
    assert "s3cret" not in caplog.text


@pytest.mark.parametrize("value", [None, "", "  "])
def test_a_key_that_is_not_there_is_refused_at_start(monkeypatch: pytest.MonkeyPatch, value: str | None) -> None:
    if value is not None:
        monkeypatch.setenv("RETRIEVAL_KEY", value)
    with pytest.raises(SettingsError, match="api_key_env is 'RETRIEVAL_KEY', but the environment has no such variable"):
        create_app(ScriptedRetriever({}), Settings(api_key_env="RETRIEVAL_KEY"))


async def test_a_body_that_does_not_come_is_given_up() -> None:
    async def drip() -> AsyncIterator[bytes]:
        yield b'{"queries"'
        await asyncio.sleep(30)

    async with client_of(ScriptedRetriever({}), body_timeout_s=0.05) as client:
        response = await client.post("/retrieve", content=drip())
        assert response.status_code == 408
        assert response.json()["detail"] == "the body did not arrive within 0.05 s"


async def test_a_full_queue_is_a_429_with_retry_after() -> None:
    retriever = ScriptedRetriever({})
    retriever.gate.clear()
    async with client_of(retriever, max_queue=2, max_queries=2) as client:
        tasks = []
        for query in "abcd":  # the first may be in search already, so up to three are taken
            tasks.append(asyncio.create_task(client.post("/retrieve", json={"queries": [query]})))
            await asyncio.sleep(0.05)
        assert tasks[3].done()
        refused = tasks[3].result()
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        assert "queries are waiting, the limit is 2" in refused.json()["detail"]
        retriever.gate.set()
        assert [(await task).status_code for task in tasks[:3]] == [200, 200, 200]


async def test_a_failing_search_is_a_500_for_its_batch_only(caplog: pytest.LogCaptureFixture) -> None:
    async with client_of(ScriptedRetriever({"a": ["1"]})) as client:
        response = await client.post("/retrieve", json={"queries": ["fail"]})
        assert response.status_code == 500
        assert response.json() == {"detail": "ValueError: scripted failure"}
        assert len((await ask(client, queries=["a"]))[0]) == 1
    assert "scripted failure" in caplog.text


async def test_identical_requests_at_once_agree(built: tuple[Path, Path]) -> None:
    async with client_of(open_index(*built)) as client:
        results = await asyncio.gather(*(ask(client, queries=QUERIES[i % 3 :] + QUERIES[: i % 3]) for i in range(60)))
        for i, result in enumerate(results):
            shift = i % 3
            assert result == results[0][shift:] + results[0][:shift]


async def test_readiness_follows_the_loading() -> None:
    started, gate = threading.Event(), threading.Event()
    retriever = ScriptedRetriever({"a": ["1"]}, size=7)

    def load(progress: LoadProgress) -> Retriever:
        progress.update("reading", 0.37)
        started.set()
        assert gate.wait(10)
        return retriever

    async with client_of(load) as client:
        assert await asyncio.to_thread(started.wait, 10)
        response = await client.get("/readyz")
        assert (response.status_code, response.headers["retry-after"]) == (503, "1")
        assert response.json() == {"status": "loading", "phase": "reading", "progress": 0.37}
        assert (await client.get("/healthz")).status_code == 200
        for early in (await client.post("/retrieve", json={"queries": ["a"]}), await client.get("/info")):
            assert early.status_code == 503
            assert early.json() == {"detail": "loading 37% (reading)"}
        gate.set()
        async with asyncio.timeout(10):
            while (await client.get("/readyz")).status_code != 200:
                await asyncio.sleep(0.01)
        assert len((await ask(client, queries=["a"]))[0]) == 1
    assert retriever.closed


async def test_a_load_that_fails_is_told_everywhere() -> None:
    failures: list[Exception] = []

    def load(progress: LoadProgress) -> Retriever:
        raise IndexFolderError("index is damaged")

    app = create_app(load, on_load_failure=failures.append)
    transport = httpx.ASGITransport(app)
    async with app.router.lifespan_context(app), httpx.AsyncClient(transport=transport, base_url="http://s") as client:
        async with asyncio.timeout(10):
            while not failures:
                await asyncio.sleep(0.01)
        ready = await client.get("/readyz")
        assert (ready.status_code, ready.json()["status"], ready.json()["error"]) == (503, "failed", "index is damaged")
        assert "index is damaged" in (await client.post("/retrieve", json={"queries": []})).json()["detail"]
    assert isinstance(failures[0], IndexFolderError)


async def test_info_identifies_the_corpus(client: httpx.AsyncClient, built: tuple[Path, Path]) -> None:
    info = (await client.get("/info")).json()
    manifest = json.loads((built[0] / "bm25" / "manifest.json").read_text())
    assert info["manifest"] == manifest
    assert info["corpus"] == manifest["corpus"]
    assert (info["retriever"], info["passages"], info["topk"], info["limits"]["max_topk"]) == ("bm25", 6, 2, 1000)


@pytest.mark.parametrize(("given", "kept"), [("abc-1", True), ("x" * 129, False), ("a b", False), ("", False)])
async def test_request_ids(client: httpx.AsyncClient, given: str, kept: bool) -> None:
    response = await client.post("/retrieve", json={"queries": ["a"]}, headers={"X-Request-ID": given})
    assert (response.headers["x-request-id"] == given) is kept
    assert len(response.headers["x-request-id"]) == (len(given) if kept else 32)


async def test_our_own_mistakes_are_answered_in_json(
    monkeypatch: pytest.MonkeyPatch, client: httpx.AsyncClient, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("retrieval_server.app.encode_response", lambda *_: 1 / 0)
    response = await client.post("/retrieve", json={"queries": ["a"]}, headers={"X-Request-ID": "r1"})
    assert response.status_code == 500
    assert response.json() == {"detail": "internal error; see the server's log", "request_id": "r1"}
    assert "request r1 to /retrieve failed" in caplog.text


async def test_the_access_log_is_json_and_off_by_default(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    for on in (False, True):
        async with client_of(ScriptedRetriever({}), access_log=on) as client:
            await client.post("/retrieve", json={"queries": ["a", "b"], "topk": 2}, headers={"X-Request-ID": "r1"})
            await client.get("/no%0Awhere")
    lines = [record.message for record in caplog.records if record.name == "retrieval_server.access"]
    asked, lost = map(json.loads, lines)
    assert set(asked) == {"time", "request_id", "client", "method", "path", "status", "ms", "queries", "topk"}
    assert (asked["request_id"], asked["method"], asked["path"], asked["status"]) == ("r1", "POST", "/retrieve", 200)
    assert (asked["queries"], asked["topk"]) == (2, 2)
    assert datetime.fromisoformat(asked["time"]).tzinfo is not None
    assert (lost["path"], lost["status"]) == ("/no%0Awhere", 404)
    assert all("\n" not in line for line in lines)


async def test_metrics_count(client: httpx.AsyncClient) -> None:
    await ask(client, queries=["festival", "festival", "lake"])
    await ask(client, queries=["festival", ""])
    await client.post("/retrieve", content=b"?")
    await client.get("/somewhere")
    lines = (await client.get("/metrics")).text.splitlines()
    samples = {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if line[0] != "#")}
    assert samples['retrieval_requests_total{path="/retrieve",status="200"}'] == 2
    assert samples['retrieval_requests_total{path="/retrieve",status="422"}'] == 1
    assert samples['retrieval_requests_total{path="other",status="404"}'] == 1
    assert samples["retrieval_queries_total"] == 4  # blank ones are not searched
    assert samples["retrieval_cache_hits_total"] == 1
    assert samples["retrieval_batch_size_sum"] == 2
    assert samples["retrieval_ready"] == 1
    assert samples['retrieval_request_seconds_count{path="/retrieve"}'] == 3
    assert samples["retrieval_search_seconds_count"] == samples["retrieval_batch_size_count"] > 0
    assert samples["retrieval_queue_seconds_count"] == samples["retrieval_batch_size_count"]
    assert samples["retrieval_queue_length"] == samples["retrieval_running_searches"] == 0
    assert samples["process_resident_memory_bytes"] > 1e6


@pytest.mark.parametrize(
    "settings",
    [
        {"topk": 0},
        {"topk": 5, "max_topk": 4},
        {"max_queue": 5},
        {"cache_units": -1},
        {"body_timeout_s": 0},
        {"header_timeout_s": float("nan")},
        {"max_connections": 0},
    ],
)
def test_impossible_settings_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(Exception, match=next(iter(settings))):
        Settings(**settings)


def test_the_openapi_description_knows_the_request(built: tuple[Path, Path]) -> None:
    schema: Callable[[], dict[str, Any]] = create_app(ScriptedRetriever({})).openapi
    body = schema()["paths"]["/retrieve"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert set(body["properties"]) == {"queries", "topk", "return_scores"}
