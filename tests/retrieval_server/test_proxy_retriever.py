"""The proxy against replicas that misbehave: what it answers, whom it asks, what it refuses."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from fake_replicas import Cluster, FakeReplica, running_cluster, wait_for
from pydantic import ValidationError

from retrieval_server.app import create_app
from retrieval_server.backends import load
from retrieval_server.backends.proxy import ProxyRetriever
from retrieval_server.backends.proxy_wire import WrongShapeError, decode_answer
from retrieval_server.errors import CorpusError, PartialSearchError, SearchUnavailableError, SettingsError
from retrieval_server.settings import Settings
from retrieval_server.specs import ProxySpec
from retrieval_server.types import LoadProgress

Opener = Callable[..., ProxyRetriever]


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with running_cluster() as cluster:
        yield cluster


@pytest.fixture
def open_proxy(cluster: Cluster) -> Iterator[Opener]:
    opened: list[ProxyRetriever] = []

    def opener(**options: Any) -> ProxyRetriever:
        fast: dict[str, Any] = {"health_interval_s": 0.05, "timeout_s": 5, "try_timeout_s": 1, "start_timeout_s": 5}
        addresses = [replica.address for replica in cluster.replicas]
        proxy = ProxyRetriever.load(ProxySpec(**{"replicas": addresses, **fast, **options}), LoadProgress())
        opened.append(proxy)
        return proxy

    yield opener
    for proxy in opened:
        proxy.close()


def check(proxy: ProxyRetriever, queries: list[str], k: int = 2) -> None:
    """Every query has its own documents, in order."""
    results = proxy.search(queries, k)
    assert [[hit.document.id for hit in hits] for hits in results] == [
        [f"{query}-{rank}" for rank in range(k)] for query in queries
    ]
    assert all(hit.score == 9.0 - rank for hits in results for rank, hit in enumerate(hits))


def batch(n: int, name: str = "q") -> list[str]:
    return [f"{name}{number}" for number in range(n)]


def states(proxy: ProxyRetriever) -> list[bool]:
    return [state["ready"] for state in proxy.info()["replicas"]]


def test_a_large_batch_is_split_and_a_small_one_is_not(cluster: Cluster, open_proxy: Opener) -> None:
    replicas = [cluster.add() for _ in range(3)]
    proxy = open_proxy()
    check(proxy, batch(100))
    assert sorted(len(replica.queries) for replica in replicas) == [33, 33, 34]
    check(proxy, batch(9, "small"))
    assert sum(any(query.startswith("small") for query in replica.queries) for replica in replicas) == 1
    assert all(request["return_scores"] is True for replica in replicas for request in replica.requests)
    assert proxy.search([], 3) == []
    assert (proxy.size, proxy.parallel) == (50, 16)


def test_pieces_keep_within_the_limits_of_the_replicas(cluster: Cluster, open_proxy: Opener) -> None:
    small = cluster.add(limits={"max_queries": 10, "max_documents": 12})
    proxy = open_proxy()
    check(proxy, batch(25), k=3)
    assert sorted(len(request["queries"]) for request in small.requests) == [3, 3, 3, 4, 4, 4, 4]


def test_the_least_busy_replica_is_asked(cluster: Cluster, open_proxy: Opener) -> None:
    slow, quick = cluster.add(), cluster.add()
    proxy = open_proxy(try_timeout_s=10)
    slow.delay_s = 1.0
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda number: check(proxy, [f"q{number}"]), range(40)))
    assert len(quick.queries) > 3 * len(slow.queries)


FAULTS: dict[str, Any] = {
    "500": (500, b'{"detail": "oops"}'),
    "429": (429, b'{"detail": "queue full"}'),
    "503": (503, b'{"detail": "loading"}'),
    "401": (401, b'{"detail": "no key"}'),
    "404": (404, b"nothing here"),
    "hang": "hang",
    "reset": "reset",
    "not JSON": (200, b"<html>"),
    "an error with status 200": (200, b'{"error": "out of memory"}'),
    "too few results": (200, b'{"result": []}'),
    "documents without contents": (200, b'{"result": [[{"document": {"id": "1"}, "score": 1}]]}'),
    "not a number": (200, b'{"result": [[{"document": {"contents": "x"}, "score": NaN}]]}'),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_another_replica_answers_when_one_misbehaves(cluster: Cluster, open_proxy: Opener, fault: str) -> None:
    bad, good = cluster.add(), cluster.add()
    proxy = open_proxy(try_timeout_s=0.3)
    bad.behaviour = FAULTS[fault]
    asked = 0
    while not bad.queries:
        check(proxy, [f"q{asked}"])
        asked += 1
        assert asked < 100
    check(proxy, batch(30, "more"))
    assert {*batch(30, "more")} <= {*good.queries}


def test_one_that_refuses_connections_is_left_alone_until_it_is_back(cluster: Cluster, open_proxy: Opener) -> None:
    first, second = cluster.add(), cluster.add()
    proxy = open_proxy()
    cluster.do(first.kill())
    for number in range(10):
        check(proxy, [f"q{number}"])
    wait_for(lambda: states(proxy) == [False, True])
    [dead, alive] = proxy.info()["replicas"]
    assert "ConnectError" in dead["error"]
    assert (alive["answered"], alive["outstanding"]) == (10, 0)
    cluster.do(first.start())
    wait_for(lambda: states(proxy) == [True, True])
    first.requests.clear()
    check(proxy, batch(40))
    assert len(first.queries) == len(second.queries) - 10 == 20


def test_a_replica_killed_under_load_loses_no_query(cluster: Cluster, open_proxy: Opener) -> None:
    replicas = [cluster.add() for _ in range(3)]
    for replica in replicas:
        replica.delay_s = 0.02
    proxy = open_proxy()
    victim, stop, done = replicas[1], threading.Event(), []

    def client(number: int) -> None:
        for turn in range(1000):
            if stop.is_set():
                return
            check(proxy, batch(20, f"c{number}-{turn}-"))
            done.append(number)

    with ThreadPoolExecutor(8) as pool:
        clients = [pool.submit(client, number) for number in range(8)]
        wait_for(lambda: len(done) > 30)
        assert victim.queries
        cluster.do(victim.kill())  # with requests under way
        at_kill = len(done)
        wait_for(lambda: len(done) > at_kill + 30)
        cluster.do(victim.start())
        wait_for(lambda: states(proxy)[1])
        victim.requests.clear()
        wait_for(lambda: bool(victim.queries))
        stop.set()
        for future in clients:
            future.result()
    assert proxy.info()["replicas"][1]["failed"] > 0


def test_when_no_replica_answers_the_error_names_each(cluster: Cluster, open_proxy: Opener) -> None:
    first, second = cluster.add(), cluster.add()
    proxy = open_proxy()
    first.behaviour, second.behaviour = (500, b"broken disk"), "reset"
    with pytest.raises(SearchUnavailableError) as error:
        proxy.search(["q"], 1)
    message = str(error.value)
    assert message.startswith("no replica answered: ")
    assert f"{first.address}: HTTP 500: broken disk" in message
    assert f"{second.address}: " in message
    for replica in (first, second):
        cluster.do(replica.kill())
    wait_for(lambda: states(proxy) == [False, False])
    with pytest.raises(SearchUnavailableError, match=r"no replica answered: .*ConnectError"):
        proxy.search(["q"], 1)
    for replica in (first, second):
        replica.behaviour = "good"
        cluster.do(replica.start())
    wait_for(lambda: any(states(proxy)))
    check(proxy, ["q"])


def test_a_search_waits_a_moment_for_a_replica_to_come_back(cluster: Cluster, open_proxy: Opener) -> None:
    only = cluster.add()
    proxy = open_proxy(health_interval_s=0.3)
    cluster.do(only.kill())
    wait_for(lambda: states(proxy) == [False])
    timer = threading.Timer(0.1, lambda: cluster.do(only.start()))
    timer.start()
    check(proxy, ["q"])
    timer.join()


def test_all_busy_is_tried_again_a_little_later(cluster: Cluster, open_proxy: Opener) -> None:
    only = cluster.add()
    proxy = open_proxy(health_interval_s=30)  # one that was out would stay out
    only.behaviour = (429, b"full")
    timer = threading.Timer(0.05, lambda: setattr(only, "behaviour", "good"))
    timer.start()
    check(proxy, ["q"])
    timer.join()
    assert states(proxy) == [True]  # busy is not ill


def test_the_deadline_holds_whatever_the_replicas_do(cluster: Cluster, open_proxy: Opener) -> None:
    only = cluster.add()
    proxy = open_proxy(timeout_s=0.3, try_timeout_s=5)
    only.behaviour = "hang"
    with pytest.raises(SearchUnavailableError, match=r"no answer within 0\.3 s"):
        proxy.search(["q"], 1)


def test_a_query_that_breaks_every_replica_takes_none_of_the_others_answers(
    cluster: Cluster, open_proxy: Opener
) -> None:
    replicas = [cluster.add(), cluster.add()]
    proxy = open_proxy(health_interval_s=30)  # nobody comes back within this test
    for replica in replicas:
        replica.behaviour = (500, b"poison")
    for _ in range(5):
        with pytest.raises(SearchUnavailableError, match="poison"):
            proxy.search(["poison"], 1)
    assert sum(states(proxy)) == 1
    for replica in replicas:
        replica.behaviour = "good"
    check(proxy, ["q"])


def test_one_that_goes_on_failing_comes_back_later_each_time(cluster: Cluster, open_proxy: Opener) -> None:
    bad, good = cluster.add(), cluster.add()
    proxy = open_proxy(health_interval_s=0.1)
    bad.behaviour = (200, b"{}")
    times = []
    for _ in range(3):
        wait_for(lambda: states(proxy)[0])
        before = len(bad.requests)
        while len(bad.requests) == before:
            check(proxy, ["q"])
        times.append(proxy._replicas[0]._look_again_at - proxy._loop.time())
    assert times[0] <= 0.1
    assert times[2] > 0.2  # 0.4 when it was put out
    assert good.queries


def test_a_request_that_is_refused_is_not_tried_elsewhere(cluster: Cluster, open_proxy: Opener) -> None:
    replicas = [cluster.add(), cluster.add()]
    proxy = open_proxy()
    for replica in replicas:
        replica.behaviour = (422, b'{"detail": "topk is 900"}')
    with pytest.raises(SearchUnavailableError, match=r"refused the request with HTTP 422: .*topk is 900") as error:
        proxy.search(["q"], 900)
    assert error.value.retry_after_s is None
    assert sum(len(replica.queries) for replica in replicas) == 1
    assert states(proxy) == [True, True]


def test_of_a_split_batch_the_answered_piece_is_kept(cluster: Cluster, open_proxy: Opener) -> None:
    good, bad = cluster.add(), cluster.add()
    proxy = open_proxy(max_tries=1)
    bad.behaviour = (500, b"oops")
    with pytest.raises(PartialSearchError) as error:
        proxy.search(batch(20), 1)
    assert error.value.origin is proxy
    answered = [
        query
        for query, outcome in zip(batch(20), error.value.outcomes, strict=True)
        if not isinstance(outcome, Exception) and outcome[0].document.id == f"{query}-0"
    ]
    assert answered == good.queries
    assert len(answered) == 10


def test_different_corpora_are_refused_with_both(cluster: Cluster, open_proxy: Opener) -> None:
    first, second = cluster.add(corpus="a" * 64), cluster.add(corpus="b" * 64)
    with pytest.raises(CorpusError) as error:
        open_proxy()
    for part in (first.address, second.address, "a" * 16, "b" * 16):
        assert part in str(error.value)


def test_a_replica_that_comes_later_with_another_corpus_stays_out(cluster: Cluster, open_proxy: Opener) -> None:
    first, late = cluster.add(), cluster.add(corpus="other")
    late.health = (503, b'{"status": "loading"}')
    proxy = open_proxy()
    assert states(proxy) == [True, False]
    late.health = (200, b"{}")
    wait_for(lambda: "serves another corpus" in proxy.info()["replicas"][1].get("error", ""))
    check(proxy, batch(40))
    assert late.queries == []
    first.info["corpus"]["sha256"] = "swapped"  # restarted on another corpus, without a failed request
    wait_for(lambda: states(proxy) == [False, False])


def test_a_replica_that_begins_to_load_again_gets_nothing(cluster: Cluster, open_proxy: Opener) -> None:
    first, second = cluster.add(), cluster.add()
    proxy = open_proxy()
    first.health = (503, b'{"status": "loading"}')
    wait_for(lambda: states(proxy) == [False, True])
    check(proxy, batch(40))
    assert len(second.queries) == 40


def test_replicas_that_search_differently_are_reported(
    cluster: Cluster, open_proxy: Opener, caplog: pytest.LogCaptureFixture
) -> None:
    cluster.add()
    cluster.add().info["retriever"] = "dense"
    open_proxy()
    assert "replicas search in different ways (bm25, dense)" in caplog.text


def test_published_servers_are_understood(cluster: Cluster, open_proxy: Opener) -> None:
    published = cluster.add(published=True)
    proxy = open_proxy()
    published.behaviour = (
        200,
        json.dumps(
            {
                "result": [
                    [
                        {"document": {"contents": '"Rome"\nA city.', "title": "Rome", "text": "A city."}, "score": 2},
                        {"document": {"id": 7, "contents": "no title"}, "score": 1.5},
                        {"document": {"id": "last", "contents": "padding"}, "score": -3.4028234663852886e38},
                    ],
                    [{"document": '"Rome"\nA city.'}, {"document": {"contents": "b"}}],
                ]
            }
        ).encode(),
    )
    first, second = proxy.search(["a", "b"], 5)
    assert [(hit.document.title, hit.document.text, hit.score) for hit in first] == [
        ("Rome", "A city.", 2.0),
        ("", "no title", 1.5),
    ]
    assert first[1].document.id == "7"
    assert [hit.score for hit in second] == [1.0, 0.5]
    assert second[0].document == first[0].document  # the same contents are the same document
    assert published.requests[-1] == {"queries": ["a", "b"], "topk": 5, "return_scores": True, "topk_rerank": 5}
    assert proxy.size is None
    assert proxy.info()["corpus"] == {}


def test_more_documents_than_asked_for_are_cut() -> None:
    hits = [{"document": {"contents": name}, "score": 1} for name in "abc"]
    assert [hit.document.contents for hit in decode_answer(json.dumps({"result": [hits]}).encode(), 1, 2)[0]] == [*"ab"]


WRONG_SHAPES = (
    *(b"", b"null", b"[]", b"{}", b"\xff", b"[" * 100_000),
    *(b'{"result": {}}', b'{"result": [1]}', b'{"result": ["ab"]}', b'{"result": [["a"]]}', b'{"result": [[], []]}'),
    b'{"result": [[{"document": null}]]}',
    b'{"result": [[{"document": "a", "score": "1"}]]}',
    b'{"result": [[{"document": "a", "score": true}]]}',
    b'{"result": [[{"document": "\\ud800"}]]}',
    b'{"result": [[{"document": {"id": "\\ud800", "contents": "a"}}]]}',
)


@pytest.mark.parametrize("body", WRONG_SHAPES)
def test_wrong_shapes_are_recognised(body: bytes) -> None:
    with pytest.raises(WrongShapeError):
        decode_answer(body, 1, 3)


def test_the_key_comes_from_the_environment_and_is_shown_nowhere(
    cluster: Cluster, open_proxy: Opener, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    replica = cluster.add()
    for value in ("", "  ", "caf\u00e9"):
        monkeypatch.setenv("REPLICA_KEY", value)
        with pytest.raises(SettingsError, match="REPLICA_KEY"):
            open_proxy(api_key_env="REPLICA_KEY")
    monkeypatch.setenv("REPLICA_KEY", "s3cret-value")
    proxy = open_proxy(api_key_env="REPLICA_KEY")
    check(proxy, ["q"])
    assert replica.keys == {"Bearer s3cret-value"}
    replica.behaviour = (401, b"wrong key")
    with pytest.raises(SearchUnavailableError) as error:
        proxy.search(["q"], 1)
    assert "s3cret" not in caplog.text + str(error.value) + str(proxy.info())


def test_loading_waits_for_the_first_replica_and_gives_up_with_the_reasons(
    cluster: Cluster, open_proxy: Opener
) -> None:
    replica = cluster.add()
    cluster.do(replica.kill())
    with pytest.raises(SettingsError, match=r"no replica is ready after 0\.1 s: http://.*ConnectError"):
        open_proxy(start_timeout_s=0.1)
    timer = threading.Timer(0.3, lambda: cluster.do(replica.start()))
    timer.start()
    check(open_proxy(), ["q"])
    timer.join()


@pytest.mark.parametrize(
    "replicas", [[], ["localhost:8002"], ["ftp://a"], ["http://"], ["http://a:99999"], ["http://a/", "http://a"]]
)
def test_impossible_addresses_are_refused(replicas: list[str]) -> None:
    with pytest.raises(ValidationError):
        ProxySpec(replicas=replicas)


async def test_behind_the_app_failures_are_a_503_and_the_next_request_is_served(cluster: Cluster) -> None:
    replicas: list[FakeReplica] = [cluster.add(), cluster.add()]
    spec = ProxySpec(replicas=[replica.address for replica in replicas], health_interval_s=0.05, start_timeout_s=5)
    app = create_app(load(spec, LoadProgress()), Settings(cache_units=0))
    transport = httpx.ASGITransport(app)
    async with app.router.lifespan_context(app), httpx.AsyncClient(transport=transport, base_url="http://s") as client:
        request = {"queries": ["a", "b"], "topk": 1, "return_scores": True}
        answer = (await client.post("/retrieve", json=request)).json()["result"]
        assert [[hit["document"]["id"] for hit in hits] for hits in answer] == [["a-0"], ["b-0"]]
        info = (await client.get("/info")).json()
        assert (info["retriever"], info["passages"], info["corpus"]["sha256"]) == ("proxy", 50, "abc")
        assert info["manifest"] == {"kind": "bm25"}
        for replica in replicas:
            replica.behaviour = (500, b"oops")
        failed = await client.post("/retrieve", json=request)
        assert (failed.status_code, failed.headers["retry-after"]) == (503, "1")
        assert "HTTP 500: oops" in failed.json()["detail"]
        for replica in replicas:
            replica.behaviour = "good"
        assert (await client.post("/retrieve", json=request)).json()["result"] == answer
