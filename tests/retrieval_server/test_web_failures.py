"""A search API that misbehaves: what is tried again, what is not, what is counted as paid, and what the caller sees."""

from __future__ import annotations

import gzip
import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from typing import Any

import pytest
from fake_search_api import (
    PAGED,
    Behaviour,
    FakeApi,
    cut_short,
    drip,
    entry,
    hang,
    ids,
    open_web,
    raw,
    reset,
    running_api,
    status,
    wait_until,
)

from retrieval_server.backends.web import api as api_module
from retrieval_server.backends.web import pacing
from retrieval_server.backends.web.pacing import Pacer, SingleFlight, backoff_s, retry_after_s
from retrieval_server.backends.web.transport import proxy_for
from retrieval_server.errors import PartialSearchError, SearchUnavailableError, SettingsError


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeApi]:
    monkeypatch.setattr(pacing, "_BACKOFF_S", 0.001)
    with running_api() as api:
        yield api


def bomb(size: int) -> Behaviour:
    """A small compressed answer that expands to ``size`` bytes."""
    body = gzip.compress(b'{"organic": "' + b"a" * size + b'"}')
    return status(200, body, Content_Encoding="gzip")


HTML = raw(b"<html><body>Service temporarily unavailable</body></html>", "text/html")
# name: (behaviour, requests sent with 2 retries, paid requests counted, what the error says)
LASTING: dict[str, tuple[Behaviour, int, int, str]] = {
    "401": (status(401, {"message": "no"}), 1, 0, r"serper answers 401: no \(key refused\)"),
    "403 of a key": (status(403, {"message": "Unauthorized."}), 1, 0, r"answers 403: Unauthorized. \(key refused\)"),
    "403 of a quota": (
        status(403, {"error": {"code": 403, "message": "Quota exceeded for quota metric 'Queries per day'"}}),
        1, 0, r"answers 403: Quota exceeded .* \(quota spent\)",
    ),
    "403 of a rate": (status(403, {"error": {"message": "User Rate Limit Exceeded"}}), 3, 0, "answers 403: User Rate"),
    "400 without credits": (status(400, {"message": "Not enough credits"}), 1, 0, r"credits \(quota spent\)"),
    "400 of a key": (status(400, {"error": {"message": "API key not valid."}}), 1, 0, r"valid\. \(key refused\)"),
    "400": (status(400, {"message": "Bad query"}), 1, 0, r"answers 400: Bad query$"),
    "402": (status(402), 1, 0, r"answers 402 \(quota spent\)"),
    "404": (status(404, b"<html>", Content_Type="text/html"), 1, 0, "answers 404$"),
    "432": (status(432, {"detail": {"error": "This exceeds your plan's set usage limit."}}), 1, 0, "answers 432"),
    "429": (status(429, {"error": "Too many requests"}), 3, 0, r"answers 429: Too many requests \(3 tries\)"),
    "429 out of searches": (
        status(429, {"error": "Your account has run out of searches."}), 1, 0, r"run out of searches. \(quota spent\)"
    ),
    "429 for long": (status(429, Retry_After="3600"), 1, 0, r"answers 429$"),
    "500": (status(500, {"message": "oops"}), 3, 3, r"answers 500: oops \(3 tries\)"),
    "503": (status(503, b"down", Content_Type="text/plain"), 3, 3, "answers 503 "),
    "hang": (hang, 3, 3, r"gives no answer: no complete answer within 0\.3 s \(3 tries\)"),
    "slow drip": (drip, 3, 3, r"no complete answer within 0\.3 s"),
    "truncated JSON": (raw(b'{"organic": [{"title": "a"'), 3, 3, "answers 200 with 26 bytes that are no JSON object"),
    "cut short": (cut_short, 3, 3, "RemoteProtocolError"),
    "reset": (reset, 3, 3, "gives no answer: ReadError"),
    "HTML": (HTML, 3, 3, "answers 200 with 57 bytes that are no JSON object"),
    "empty body": (raw(b""), 3, 3, "answers 200 with 0 bytes"),
    "enormous": (raw(b'{"organic": "' + b"a" * 2_000_000 + b'"}'), 1, 1, "larger than 1000000 bytes"),
    "bomb": (bomb(50_000_000), 1, 1, "larger than 1000000 bytes"),
    "damaged compression": (status(200, b"not gzip", Content_Encoding="gzip"), 3, 3, "cannot be decompressed"),
    "half of a compressed body": (
        status(200, gzip.compress(b"{}" + b" " * 99)[:-12], Content_Encoding="gzip"), 3, 3, "compressed body has no end"
    ),
    "unknown compression": (status(200, b"x", Content_Encoding="br"), 1, 1, "unknown encoding 'br'"),
    "an error in a 200": (status(200, {"message": "Engine is down"}), 3, 3, "reports: Engine is down"),
    "redirect": (status(302, b"", Location="/search"), 1, 0, "answers 302, a redirect: correct base_url http"),
}  # fmt: skip


@pytest.mark.parametrize("name", LASTING)
def test_lasting_failures(api: FakeApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(api_module, "_MAX_ANSWER_BYTES", 1_000_000)
    behaviour, n_sent, n_paid, message = LASTING[name]
    api.always = behaviour
    retriever = open_web(api, tmp_path, retries=2, timeout_s=0.3, budget=100)
    with pytest.raises(SearchUnavailableError, match=message) as caught:
        retriever.search(["what is it"], 3)
    assert str(caught.value).startswith("1 of 1 queries: query 'what is it': serper ")
    info = retriever.info()
    assert (len(api.received), info["spent"]) == (n_sent, n_paid)
    assert info["requests"] == {"sent": n_sent, "failed": n_sent}
    # A failure is never kept, nor taken for an empty result.
    api.always = None
    retriever._api._closed_until = 0.0  # as when the pause after a refused key is over
    assert ids(retriever.search(["what is it"], 1)) == [[entry("what is it", 0)[1]]]
    retriever.close()


@pytest.mark.parametrize("name", [name for name, (_, n_sent, _, _) in LASTING.items() if n_sent > 1])
def test_passing_failures_are_retried(api: FakeApi, tmp_path: Path, name: str) -> None:
    behaviour, _, n_paid, _ = LASTING[name]
    api.script.append(behaviour)
    retriever = open_web(api, tmp_path, retries=1, timeout_s=0.3)
    assert ids(retriever.search(["q"], 1)) == [[entry("q", 0)[1]]]
    assert retriever.info()["spent"] == (2 if n_paid else 1)
    retriever.close()


@pytest.mark.parametrize(
    ("provider", "billed"), [("serper", 1), ("google", 1), ("tavily", 1), ("brave", 0), ("serpapi", 0)]
)
def test_who_bills_a_search_that_failed(api: FakeApi, tmp_path: Path, provider: str, billed: int) -> None:
    api.always = status(500)
    retriever = open_web(api, tmp_path, provider, retries=0)
    with pytest.raises(SearchUnavailableError):
        retriever.search(["q"], 1)
    assert retriever.info()["spent"] == billed
    retriever.close()


def test_nobody_there_costs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pacing, "_BACKOFF_S", 0.001)
    with running_api() as api:
        pass
    retriever = open_web(api, tmp_path, retries=1)
    with pytest.raises(SearchUnavailableError, match=r"gives no answer: ConnectError.* \(2 tries\)"):
        retriever.search(["q"], 1)
    retriever._api._base_url = "http://no-such-host.invalid"
    with pytest.raises(SearchUnavailableError, match=r"cannot resolve no-such-host.invalid"):
        retriever.search(["q"], 1)
    assert retriever.info()["spent"] == 0
    retriever.close()


def test_the_proxy_of_the_environment_is_used(api: FakeApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", api.url.replace("://", "://user:p%40ss@"))
    monkeypatch.setenv("no_proxy", "direct.example")
    assert proxy_for("http://direct.example") is proxy_for(api.url) is None
    retriever = open_web(api, tmp_path, base_url="http://api.example")
    assert ids(retriever.search(["q"], 1)) == [[entry("q", 0)[1]]]
    [request] = api.received
    assert request.headers["host"] == "api.example"
    assert request.headers["proxy-authorization"].startswith("Basic ")
    retriever.close()
    monkeypatch.setenv("http_proxy", "socks5://user:secret@127.0.0.1:1")
    with pytest.raises(SettingsError, match="a proxy for http that is none of http") as caught:
        open_web(api, tmp_path, base_url="http://api.example")
    assert "secret" not in str(caught.value)


def test_a_wrong_content_type_does_not_matter(api: FakeApi, tmp_path: Path) -> None:
    answer = {"organic": [{"title": "T", "link": "https://a.example/", "snippet": "S"}]}
    api.always = raw(json.dumps(answer).encode(), "text/html; charset=latin-1")
    retriever = open_web(api, tmp_path)
    assert ids(retriever.search(["q"], 1)) == [["https://a.example/"]]
    retriever.close()


def test_compressed_answers_are_read(api: FakeApi, tmp_path: Path) -> None:
    answer = {"organic": [{"title": "T", "link": "https://a.example/", "snippet": "S"}]}
    api.always = status(200, gzip.compress(json.dumps(answer).encode()), Content_Encoding="gzip")
    retriever = open_web(api, tmp_path)
    assert ids(retriever.search(["q"], 1)) == [["https://a.example/"]]
    retriever.close()


# ---------------------------------------------------------------------------------------------------------------------
# Pauses


def test_retry_after_is_waited_for_by_everybody(api: FakeApi, tmp_path: Path) -> None:
    api.script.append(status(429, Retry_After="1"))
    retriever = open_web(api, tmp_path, retries=1, parallel=4)
    started = time.monotonic()
    retriever.search(["first"], 1)
    assert time.monotonic() - started >= 1
    api.script.append(status(429, Retry_After="1"))
    with ThreadPoolExecutor(1) as pool:
        held = pool.submit(retriever.search, ["second"], 1)
        wait_until(lambda: len(api.received) == 3)
        wait_until(lambda: retriever._api._pacer.reserve() > 0.5)
        started = time.monotonic()
        retriever.search(["third"], 1)
        assert time.monotonic() - started >= 0.3
        held.result()
    retriever.close()


def test_the_caller_learns_when_to_come_back(api: FakeApi, tmp_path: Path) -> None:
    api.always = status(429, Retry_After="120")
    retriever = open_web(api, tmp_path)
    with pytest.raises(PartialSearchError) as caught:
        retriever.search(["q"], 1)
    assert caught.value.retry_after_s == 120
    with pytest.raises(SearchUnavailableError, match="nothing is sent for") as caught:
        retriever.search(["another"], 1)
    assert len(api.received) == 1
    retriever.close()


def test_brave_says_which_window_is_used_up(api: FakeApi, tmp_path: Path) -> None:
    api.always = status(429, X_RateLimit_Remaining="0, 0", X_RateLimit_Reset="1, 1419704")
    retriever = open_web(api, tmp_path, "brave", retries=2)
    with pytest.raises(SearchUnavailableError) as caught:
        retriever.search(["q"], 1)
    assert (len(api.received), caught.value.retry_after_s) == (1, 1_419_704)
    retriever._api._closed_until = 0.0
    api.script.append(status(429, X_RateLimit_Remaining="0, 900", X_RateLimit_Reset="1, 1419704"))
    api.always = None
    assert len(retriever.search(["q"], 1)[0]) == 1
    retriever.close()


@pytest.mark.parametrize("name", ["401", "403 of a quota", "402"])
def test_a_refused_key_is_not_tried_again_for_every_query(api: FakeApi, tmp_path: Path, name: str) -> None:
    retriever = open_web(api, tmp_path, parallel=1)
    retriever.search(["kept"], 2)
    api.always = LASTING[name][0]
    for _ in range(3):
        with pytest.raises(PartialSearchError) as caught:
            retriever.search(["a", "kept", "b", "c"], 2)
        assert [isinstance(outcome, list) for outcome in caught.value.outcomes] == [False, True, False, False]
        assert (caught.value.retry_after_s or 0) > 50
    assert len(api.received) == 2
    retriever.close()


def test_requests_are_spaced_evenly_over_all_threads(api: FakeApi, tmp_path: Path) -> None:
    retriever = open_web(api, tmp_path, requests_per_second=20, parallel=8)
    started = time.monotonic()
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda n: retriever.search([f"{n} {i}" for i in range(4)], 1), range(3)))
    assert time.monotonic() - started >= 11 / 20
    retriever.close()


def test_the_pacer() -> None:
    now = 100.0
    pacer = Pacer(4, lambda: now)
    assert [pacer.reserve() for _ in range(3)] == [0, 0.25, 0.5]
    now = 110.0
    assert [pacer.reserve() for _ in range(2)] == [0, 0.25]  # idle time is not saved up
    pacer.hold(3)
    assert pacer.reserve() == 3
    pacer.hold(1)
    assert pacer.reserve() == 3.25  # a shorter pause does not shorten a longer one


def test_backoff_doubles_up_to_a_limit() -> None:
    assert [backoff_s(attempt, lambda low, high: high) for attempt in range(6)] == [0.5, 1, 2, 4, 8, 8]
    draws = [backoff_s(2) for _ in range(200)]
    assert min(draws) < 0.5 < 1.5 < max(draws) <= 2


NOW = datetime(2026, 11, 30, 12, tzinfo=UTC)


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        ("0", 0),
        (" 17 ", 17),
        (format_datetime(NOW + timedelta(seconds=90), usegmt=True), 90),
        (format_datetime(NOW - timedelta(seconds=90), usegmt=True), 0),
        ("Mon, 30 Nov 2026 12:00:05 -0000", 5),
        ("9" * 400, 999_999_999),
        ("-5", None), ("1.5", None), ("soon", None), ("", None), ("²", None), ("Mon, 99 Nov 2026", None),
    ],
)  # fmt: skip
def test_retry_after(value: str, seconds: float | None) -> None:
    assert retry_after_s(value, lambda: NOW) == seconds


# ---------------------------------------------------------------------------------------------------------------------
# Several threads


def test_the_same_query_in_flight_is_asked_once(api: FakeApi, tmp_path: Path) -> None:
    api.delay_s = 0.2
    retriever = open_web(api, tmp_path, parallel=8, cache_days=0)  # nothing kept: only the flight is shared
    with ThreadPoolExecutor(6) as pool:
        found = list(pool.map(lambda k: retriever.search(["same", "same"], k), range(1, 7)))
    assert [[len(hits) for hits in both] for both in found] == [[k, k] for k in range(1, 7)]
    assert len(api.received) == 1
    assert retriever.info()["spent"] == 1
    retriever.search(["same"], 1)
    assert len(api.received) == 2
    retriever.close()


def test_a_failure_in_flight_is_shared_too(api: FakeApi, tmp_path: Path) -> None:
    api.delay_s, api.always = 0.2, status(400)
    retriever = open_web(api, tmp_path, parallel=8)

    def failed(_: int) -> bool:
        with pytest.raises(SearchUnavailableError, match="answers 400"):
            retriever.search(["same"], 1)
        return True

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(failed, range(4)))
    assert len(api.received) == 1
    retriever.close()


def test_single_flight_passes_on_what_happens() -> None:
    flights = SingleFlight()
    assert flights.do("a", lambda: flights.do("b", lambda: 2)) == 2
    with pytest.raises(KeyError):
        flights.do("a", lambda: {}["x"])
    assert flights.do("a", lambda: 1) == 1


def test_as_many_queries_as_allowed_run_at_the_same_time(api: FakeApi, tmp_path: Path) -> None:
    api.delay_s = 0.25
    retriever = open_web(api, tmp_path, parallel=10)
    started = time.monotonic()
    retriever.search([f"q{i}" for i in range(20)], 1)
    assert 0.5 <= time.monotonic() - started < 3
    assert retriever.parallel == 10
    retriever.close()


def test_closing_wakes_who_waits(api: FakeApi, tmp_path: Path) -> None:
    api.always = status(429, Retry_After="25")
    retriever = open_web(api, tmp_path, parallel=1)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(retriever.search, ["a"], 1)
        wait_until(lambda: len(api.received) == 1)
        started = time.monotonic()
        retriever.close()
        with pytest.raises(SearchUnavailableError, match="the server is stopping"):
            waiting.result(5)
        assert time.monotonic() - started < 5
    with pytest.raises(SearchUnavailableError, match="the server is stopping"):
        retriever.search(["b"], 1)


def test_blank_queries_are_not_sent(api: FakeApi, tmp_path: Path) -> None:
    retriever = open_web(api, tmp_path)
    assert retriever.search(["", " \n\t", "\u2003"], 3) == [[], [], []]
    assert retriever.search([], 3) == []
    assert api.received == []
    retriever.close()


@pytest.mark.parametrize("provider", PAGED)
@pytest.mark.parametrize("query", ["a&api_key=x&q=b", 'quo"te \\ <b> %00 #', "日本語 🙂", "x" * 5000, "\x00\x1b31m"])
def test_odd_queries_arrive_as_they_are(api: FakeApi, tmp_path: Path, provider: str, query: str) -> None:
    retriever = open_web(api, tmp_path, provider)
    retriever.search([query], 1)
    [request] = api.received
    sent: Any = (request.body or request.params).get("query") or (request.body or request.params)["q"]
    assert query.endswith(sent)
    assert len(sent) >= min(len(query.strip("\0\x1b")), 400)
    retriever.close()
