"""The client against a scripted transport: coalescing, retries, shapes, start (T33, T35, T36)."""

import asyncio
import json
import logging
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from search_r1.config import RetrieverConfig
from search_r1.search_client import SearchClient
from search_r1.search_wire import parse_document, parse_response, split_contents
from verl.errors import ConfigError, RetrievalError
from verl.types import Document

Handler = Callable[[httpx.Request], Any]


def hit(text: str) -> dict[str, Any]:
    return {"document": {"id": text, "contents": f'"T"\n{text}'}, "score": 1.0}


def echo(request: httpx.Request) -> httpx.Response:
    queries = json.loads(request.content)["queries"]
    return httpx.Response(200, json={"result": [[hit(query)] for query in queries]})


class Server:
    """Answers ``/retrieve`` from a script, the last entry for ever; other paths from a dictionary."""

    def __init__(self, *script: Handler | httpx.Response | Exception, **others: httpx.Response) -> None:
        self.script, self.others = list(script or (echo,)), others
        self.bodies: list[dict[str, Any]] = []
        self.requests: list[httpx.Request] = []

    async def __call__(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        name = request.url.path.strip("/")
        if name != "retrieve":
            return self.others.get(name, httpx.Response(404))
        self.bodies.append(json.loads(request.content))
        step = self.script[min(len(self.bodies), len(self.script)) - 1]
        if isinstance(step, Exception):
            raise step
        if isinstance(step, httpx.Response):
            return step
        result = step(request)
        return await result if asyncio.iscoroutine(result) else result


def client(server: Server, **config: Any) -> SearchClient:
    values = {"url": "http://service:8002/retrieve", "backoff_s": 0.001, "retries": 2, **config}
    return SearchClient(RetrieverConfig(**values), httpx.MockTransport(server))


async def test_searches_issued_together_are_one_request_and_identical_ones_one_query() -> None:
    server = Server()
    searching = client(server, topk=5)
    answers = await asyncio.gather(*(searching.search(query) for query in ("a", "b", "a")))
    assert [documents[0].text for documents in answers] == ["a", "b", "a"]
    assert server.bodies == [{"queries": ["a", "b"], "topk": 5, "return_scores": True}]
    assert answers[0] == (Document("a", "T", "a", 1.0),)
    assert (searching.counts.requests, searching.counts.queries) == (1, 2)
    await searching.search("a")
    assert len(server.bodies) == 2
    await searching.close()


@pytest.mark.parametrize(
    "trouble",
    [
        httpx.Response(500, text="boom"),
        httpx.Response(429, headers={"Retry-After": "0"}),
        httpx.Response(503, json={"detail": "loading 37%"}),
        httpx.Response(200, json={"error": "no index"}),
        httpx.Response(200, text="<html>"),
        httpx.Response(200, json={"result": []}),
        httpx.ConnectError("refused"),
        httpx.ReadError("reset half way"),
        httpx.RemoteProtocolError("closed"),
    ],
)
async def test_passing_trouble_is_retried(trouble: Any) -> None:  # T35
    server = Server(trouble, echo)
    searching = client(server)
    assert (await searching.search("q"))[0].text == "q"
    assert (searching.counts.requests, searching.counts.retries, searching.counts.failures) == (2, 1, 0)


async def test_lasting_trouble_ends_in_a_named_error() -> None:  # T35
    server = Server(httpx.Response(500, text="index exploded"))
    searching = client(server)
    with pytest.raises(RetrievalError, match=r"service:8002/retrieve: 3 attempts .*HTTP 500 index exploded"):
        await searching.search("q")
    assert len(server.bodies) == 3 and searching.counts.failures == 1


async def test_a_hang_is_cut_at_the_deadline() -> None:  # T35
    async def hang(request: httpx.Request) -> httpx.Response:
        await asyncio.sleep(60)
        return httpx.Response(200)

    with pytest.raises(RetrievalError, match=r"2 attempts .*no complete answer within 0\.02 s"):
        await client(Server(hang), timeout_s=0.02, retries=1).search("q")


async def test_a_refused_query_does_not_take_the_others_with_it() -> None:
    def picky(request: httpx.Request) -> httpx.Response:
        if "bad" in json.loads(request.content)["queries"]:
            return httpx.Response(422, json={"detail": "too long"})
        return echo(request)

    server = Server(picky)
    results = await asyncio.gather(*map(client(server).search, ("a", "bad", "b")), return_exceptions=True)
    assert [type(result) for result in results] == [tuple, RetrievalError, tuple]
    assert "refused the request: HTTP 422" in str(results[1])
    asked = [body["queries"] for body in server.bodies]
    assert asked[0] == ["a", "bad", "b"]
    assert sorted(asked[1:]) == [["a"], ["b"], ["bad"], ["bad", "b"]]  # in halves; a refusal is not repeated


async def test_an_aborted_episode_leaves_the_others_their_passages() -> None:
    async def slow(request: httpx.Request) -> httpx.Response:
        await asyncio.sleep(0.05)
        return echo(request)

    searching = client(Server(slow))
    first, second = (asyncio.ensure_future(searching.search("q")) for _ in range(2))
    await asyncio.sleep(0.02)
    first.cancel()
    assert (await second)[0].text == "q"


def test_a_client_outlives_its_event_loop() -> None:
    searching = client(Server())
    assert [asyncio.run(searching.search(query))[0].text for query in ("a", "b")] == ["a", "b"]


@pytest.mark.parametrize(
    ("item", "document"),
    [
        ({"document": {"id": 7, "contents": '"Nile"\nA river.'}, "score": 2}, Document("7", "Nile", "A river.", 2.0)),
        ({"id": "7", "contents": '"Nile"\nA river.'}, Document("7", "Nile", "A river.")),  # without scores
        ({"document": {"contents": '""Foo""\nbar'}, "score": 1}, Document("", "Foo", "bar", 1.0)),  # rerank server
        ({"document": '"Foo (bar)"\nbaz', "score": None}, Document("", "Foo (bar)", "baz")),  # bare string
        ({"document": {"id": "1", "contents": "x", "title": "T", "text": "y"}}, Document("1", "T", "y")),
        ("one line", Document("", "", "one line")),
    ],
)
def test_documents_of_every_known_server(item: Any, document: Document) -> None:
    assert parse_document(item) == document


def test_wrong_shapes_are_named() -> None:
    for body, message in (
        ([], "expected an object"),
        ({"result": [[], []]}, "1 queries but 2 results"),
        ({"result": [{}]}, "must be a list"),
        ({"result": [[{"id": 1}]]}, "no text in 'contents'"),
        ({"result": [[3]]}, "an object or a string"),
    ):
        with pytest.raises(ValueError, match=message):
            parse_response(body, 1, 3)
    assert parse_response({"result": [[]]}, 1, 3) == [()]  # T33: no hit is no error
    assert len(parse_response({"result": [["a", "b", "c"]]}, 1, 2)[0]) == 2
    assert split_contents('"A"\n\n b ') == ("A", "b")
    assert split_contents('""A" and "B""\nc') == ('"A" and "B"', "c")


async def test_start_waits_while_the_index_loads(caplog: pytest.LogCaptureFixture) -> None:  # T36
    states = [httpx.Response(503, json={"status": "loading", "progress": 0.37}), httpx.Response(200, json={})]

    class Loading(Server):
        async def __call__(self, request: httpx.Request) -> httpx.Response:
            return states.pop(0) if request.url.path == "/readyz" else httpx.Response(404)

    with caplog.at_level(logging.INFO):
        await client(Loading()).start()
    assert states == [] and "0.37" in caplog.text


async def test_start_gives_up_with_the_remedy() -> None:
    class Dead(Server):
        async def __call__(self, request: httpx.Request) -> httpx.Response:
            raise httpx.ConnectError("connection refused")

    with pytest.raises(RetrievalError, match=r"retriever\.url .*not reachable.*retrieval_launch\.sh"):
        await client(Dead()).start()
    with pytest.raises(RetrievalError, match="could not load its index"):
        await client(Server(readyz=httpx.Response(503, json={"status": "failed", "error": "bad"}))).start()
    loading = Server(readyz=httpx.Response(503, json={"status": "loading"}))
    with pytest.raises(RetrievalError, match=r"still not ready after 0\.01 s.*start_timeout_s"):
        await client(loading, start_timeout_s=0.01).start()


async def test_start_on_a_published_server_without_health_routes() -> None:
    server = Server()
    await client(server).start()
    assert len(server.bodies) == 1
    with pytest.raises(RetrievalError, match="HTTP 500"):
        await client(Server(httpx.Response(500))).start()


async def test_corpus_identity(caplog: pytest.LogCaptureFixture) -> None:
    ready = httpx.Response(200, json={})
    for info in ({"corpus": {"sha256": "f" * 64}}, {"manifest": {"corpus": {"sha256": "f" * 64}}}):
        server = Server(readyz=ready, info=httpx.Response(200, json=info))
        await client(server).start("f" * 64)
        with pytest.raises(RetrievalError, match=r"sha256 ffff.*made from eeee"):
            await client(server).start("e" * 64)
    with caplog.at_level(logging.WARNING):
        await client(Server(readyz=ready)).start("e" * 64)
    assert "does not say which corpus" in caplog.text


async def test_api_key_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SEARCH_TEST_KEY", "s3cret")
    server = Server()
    await client(server, api_key_env="SEARCH_TEST_KEY").search("q")
    assert server.requests[0].headers["Authorization"] == "Bearer s3cret"
    with pytest.raises(ConfigError, match="'SEARCH_TEST_NONE' is not set"):
        await client(server, api_key_env="SEARCH_TEST_NONE").search("q")
