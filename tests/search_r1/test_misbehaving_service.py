"""The client against a server that misbehaves on the socket itself (T35): nothing hangs, nothing wrong gets through."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from search_r1 import search_client as module
from search_r1.config import RetrieverConfig
from search_r1.search_client import SearchClient, Trouble
from verl.errors import RetrievalError

Behaviour = Callable[[asyncio.StreamWriter, list[str]], Awaitable[None]]


def hits(query: str, score: Any = 1.0) -> list[dict[str, Any]]:
    return [{"document": {"id": query, "contents": f'"T"\n{query}'}, "score": score}]


async def send(writer: asyncio.StreamWriter, body: bytes, status: str = "200 OK", headers: str = "") -> None:
    length = f"Content-Length: {len(body)}\r\n"
    writer.write(f"HTTP/1.1 {status}\r\n{length}{headers}\r\n".encode() + body)
    await writer.drain()


async def good(writer: asyncio.StreamWriter, queries: list[str]) -> None:
    await send(writer, json.dumps({"result": [hits(query) for query in queries]}).encode())


def says(body: Any, status: str = "200 OK", headers: str = "") -> Behaviour:
    encoded = body if isinstance(body, bytes) else json.dumps(body).encode()

    async def behave(writer: asyncio.StreamWriter, queries: list[str]) -> None:
        await send(writer, encoded, status, headers)

    return behave


async def reset_half_way(writer: asyncio.StreamWriter, queries: list[str]) -> None:
    writer.write(b'HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n{"result": [[')
    await writer.drain()
    writer.transport.abort()


async def close_half_way(writer: asyncio.StreamWriter, queries: list[str]) -> None:
    writer.write(b'HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n{"res\r\n')
    await writer.drain()


async def hang(writer: asyncio.StreamWriter, queries: list[str]) -> None:
    await asyncio.sleep(60)


async def drip(writer: asyncio.StreamWriter, queries: list[str]) -> None:
    """A byte at a time, for ever: no read ever times out."""
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n")
    while not writer.is_closing():
        writer.write(b" ")
        await writer.drain()
        await asyncio.sleep(0.01)


async def flood(writer: asyncio.StreamWriter, queries: list[str]) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100000000000\r\n\r\n")
    while not writer.is_closing():
        writer.write(b"x" * 65536)
        await writer.drain()


async def no_http(writer: asyncio.StreamWriter, queries: list[str]) -> None:
    writer.write(b"220 mail.example ESMTP\r\n")
    await writer.drain()


class Service:
    """A socket that answers the n-th request with the n-th behaviour, the last one for ever."""

    def __init__(self, *script: Behaviour) -> None:
        self.script = script
        self.asked: list[list[str]] = []
        self.url = ""

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
            length = int(head.partition("content-length:")[2].split()[0])
            self.asked.append(json.loads(await reader.readexactly(length))["queries"])
            await self.script[min(len(self.asked), len(self.script)) - 1](writer, self.asked[-1])
        except (ConnectionError, asyncio.CancelledError):
            pass
        finally:
            writer.close()


@asynccontextmanager
async def client_of(service: Service, **config: Any) -> AsyncIterator[SearchClient]:
    server = await asyncio.start_server(service.handle, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    values = {"url": f"http://127.0.0.1:{port}/retrieve", "backoff_s": 0.001, "retries": 1, "timeout_s": 5.0, **config}
    client = SearchClient(RetrieverConfig(**values))
    try:
        yield client
    finally:
        await client.close()
        server.close()


CASES: dict[str, tuple[Behaviour, Trouble]] = {
    "reset half-way": (reset_half_way, Trouble.CONNECTION),
    "closed half-way": (close_half_way, Trouble.CONNECTION),
    "not HTTP": (no_http, Trouble.CONNECTION),
    "hang": (hang, Trouble.TIMEOUT),
    "slow drip": (drip, Trouble.TIMEOUT),
    "truncated JSON": (says(b'{"result": [[{"docu'), Trouble.BAD_ANSWER),
    "not UTF-8": (says(b'{"result": [["\xff"]]}'), Trouble.BAD_ANSWER),
    "wrong compression": (says(b"{}", headers="Content-Encoding: gzip\r\n"), Trouble.BAD_ANSWER),
    "nested too deeply": (says(b"[" * 200_000), Trouble.BAD_ANSWER),
    "200 with an error body": (says({"error": "CUDA out of memory"}), Trouble.BAD_ANSWER),
    "200 with error and result": (says({"error": "x", "result": None}), Trouble.BAD_ANSWER),
    "too few results": (says({"result": []}), Trouble.BAD_ANSWER),
    "too many results": (says({"result": [[], []]}), Trouble.BAD_ANSWER),
    "results that are no lists": (says({"result": [{"id": "1", "contents": "x"}]}), Trouble.BAD_ANSWER),
    "result that is a string": (says({"result": "x"}), Trouble.BAD_ANSWER),
    "NaN score": (says({"result": [hits("q", float("nan"))]}), Trouble.BAD_ANSWER),
    "infinite score": (says({"result": [hits("q", float("inf"))]}), Trouble.BAD_ANSWER),
    "score that is a list": (says({"result": [hits("q", [1.0])]}), Trouble.BAD_ANSWER),
    "score that is true": (says({"result": [hits("q", True)]}), Trouble.BAD_ANSWER),
    "document that is null": (says({"result": [[{"document": None, "score": 1.0}]]}), Trouble.BAD_ANSWER),
    "half a surrogate pair in the text": (says({"result": [["caf\ud800"]]}), Trouble.BAD_ANSWER),
    "half a surrogate pair in the id": (says({"result": [[{"id": "\udc00", "contents": "x"}]]}), Trouble.BAD_ANSWER),
    "document without text": (says({"result": [[{"document": {"id": 3}}]]}), Trouble.BAD_ANSWER),
    "500": (says("boom", "500 Internal Server Error"), Trouble.SERVER_ERROR),
    "502": (says(b"<html>", "502 Bad Gateway"), Trouble.SERVER_ERROR),
    "408": (says("slow", "408 Request Timeout"), Trouble.SERVER_ERROR),
    "429": (says("busy", "429 Too Many Requests", "Retry-After: 0\r\n"), Trouble.BUSY),
    "503": (says("loading", "503 Service Unavailable", "Retry-After: soon\r\n"), Trouble.BUSY),
}


@pytest.mark.parametrize("name", CASES)
async def test_trouble_that_passes_costs_a_retry_and_trouble_that_lasts_ends_in_its_name(name: str) -> None:
    behaviour, trouble = CASES[name]
    timing = {"timeout_s": 0.15} if trouble is Trouble.TIMEOUT else {}
    service = Service(behaviour, good)
    async with client_of(service, **timing) as client:
        assert [d.id for d in await client.search("q")] == ["q"]
        assert (client.counts.retries, client.counts.troubles) == (1, {trouble: 1})
        assert client.counts.failures == 0
    lasting = Service(behaviour)
    async with client_of(lasting, **timing) as client:
        with pytest.raises(RetrievalError, match="2 attempts"):
            await client.search("q")
        assert client.counts.failed == {trouble: 1} and client.counts.requests == 2


@pytest.mark.parametrize("status", ["301 Moved Permanently", "401 Unauthorized", "404 Not Found", "405 Not Allowed"])
async def test_what_a_repetition_cannot_mend_is_asked_once(status: str) -> None:
    service = Service(says("no", status, "Location: http://127.0.0.1:1/\r\n"))
    async with client_of(service) as client:
        found = await asyncio.gather(*map(client.search, "abc"), return_exceptions=True)
        assert all(isinstance(error, RetrievalError) and status[:3] in str(error) for error in found)
        assert len(service.asked) == 1 and client.counts.failed == {Trouble.REFUSED: 3}
    assert ("api_key_env" in str(found[0])) == status.startswith("401")


async def test_an_answer_without_end_does_not_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MAX_ANSWER_BYTES", 300_000)
    async with client_of(Service(flood), retries=0) as client:
        with pytest.raises(RetrievalError, match="longer than 300000 bytes"):
            await client.search("q")


async def test_all_attempts_together_end_at_the_deadline() -> None:
    started = time.monotonic()
    async with client_of(Service(hang), retries=50, timeout_s=0.1, deadline_s=0.35, backoff_s=0.01) as client:
        with pytest.raises(RetrievalError, match="attempts in 0"):
            await client.search("q")
        assert 1 <= client.counts.requests <= 4
    async with client_of(Service(hang), retries=5, timeout_s=30, deadline_s=0.2) as client:
        with pytest.raises(RetrievalError, match=r"1 attempts .*no complete answer within 0\.1"):
            await client.search("q")
    assert time.monotonic() - started < 15


async def test_a_pause_that_the_service_asks_for_does_not_outlast_the_deadline() -> None:
    busy = says("busy", "429 Too Many Requests", "Retry-After: 30\r\n")
    started = time.monotonic()
    async with client_of(Service(busy), deadline_s=2.0) as client:
        with pytest.raises(RetrievalError, match=r"1 attempts .*429"):
            await client.search("q")
    assert time.monotonic() - started < 2


async def test_one_query_that_breaks_the_server_leaves_the_others_their_passages() -> None:
    """The published servers answer 500 to a whole batch when one query has too many clauses."""

    async def fragile(writer: asyncio.StreamWriter, queries: list[str]) -> None:
        if "poison" in queries:
            await send(writer, b"Internal Server Error", "500 Internal Server Error")
        else:
            await good(writer, queries)

    service = Service(fragile)
    names = [f"q{i}" for i in range(20)]
    async with client_of(service) as client:
        found = await asyncio.gather(*map(client.search, [*names, "poison"]), return_exceptions=True)
        assert [documents[0].id for documents in found[:-1]] == names
        assert isinstance(found[-1], RetrievalError) and "HTTP 500" in str(found[-1])
        assert client.counts.failed == {Trouble.SERVER_ERROR: 1}
        assert len(service.asked) < 20


async def test_a_broken_server_is_not_asked_query_by_query() -> None:
    service = Service(says("boom", "500 Internal Server Error"))
    async with client_of(service, retries=2) as client:
        found = await asyncio.gather(*(client.search(f"q{i}") for i in range(50)), return_exceptions=True)
        assert all(isinstance(error, RetrievalError) for error in found)
        assert len(service.asked) == 4  # three attempts and one harmless query
        assert client.counts.failures == 50


async def test_closing_ends_the_searches_under_way() -> None:
    async with client_of(Service(hang), timeout_s=60) as client:
        searching = asyncio.ensure_future(client.search("q"))
        await asyncio.sleep(0.05)
        await client.close()
        with pytest.raises(RetrievalError, match="client was closed"):
            await asyncio.wait_for(searching, 5)


async def test_a_fault_of_the_client_itself_reaches_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: Any) -> Any:
        raise KeyError("planted")

    monkeypatch.setattr(module, "parse_answer", broken)
    async with client_of(Service(good)) as client:
        with pytest.raises(RetrievalError, match="KeyError: 'planted'"):
            await asyncio.wait_for(client.search("q"), 5)


async def test_half_a_surrogate_pair_is_replaced_and_a_whole_one_kept() -> None:
    service = Service(good)
    async with client_of(service) as client:
        await asyncio.gather(*map(client.search, ("a\ud83d", "b\ud83d\ude00", "ü")))
    assert service.asked == [["a\ufffd", "b\U0001f600", "ü"]]


async def test_everything_is_counted() -> None:
    service = Service(says({"error": "x"}), good)
    async with client_of(service) as client:
        await asyncio.gather(*map(client.search, ("a", "b", "a")))
        totals = client.counts.totals()
    seconds = totals.pop("request_s")
    assert 0 < seconds < 5
    assert totals == {
        "requests": 2, "searches": 3, "queries": 2, "retries": 1, "failures": 0, "trouble_bad_answer": 1,
    }  # fmt: skip


def test_clients_that_failed_together_do_not_come_back_together() -> None:
    pauses = {SearchClient(RetrieverConfig())._pause(1, 0.0) for _ in range(20)}
    assert len(pauses) == 20 and all(0.25 <= pause <= 0.75 for pause in pauses)
    assert SearchClient(RetrieverConfig())._pause(1, 1e9) == 8.0
