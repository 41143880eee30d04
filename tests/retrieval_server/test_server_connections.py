"""Bad clients, many clients, leaving clients; and stopping without losing anybody's request."""

from __future__ import annotations

import json
import resource
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

import httpx
import pytest
from live_server import is_closed, live, read_answer, request
from retrieval_helpers import ScriptedRetriever, document

from retrieval_server import connection as connection_module
from retrieval_server.errors import IndexFolderError
from retrieval_server.server import allow_open_files
from retrieval_server.types import Hit, LoadProgress, Retriever

ASK = json.dumps({"queries": ["a"]}).encode()
ANSWERS = {"a": ["1"], "b": ["2"]}


def ids(body: bytes) -> list[str]:
    return [found["id"] for found in json.loads(body)["result"][0]]


@contextmanager
def held() -> Iterator[ScriptedRetriever]:
    """A retriever whose searches wait until ``gate.set()``."""
    retriever = ScriptedRetriever(ANSWERS)
    retriever.gate.clear()
    try:
        yield retriever
    finally:
        retriever.gate.set()


def test_an_answer_is_one_piece_and_the_connection_stays() -> None:
    with live(ScriptedRetriever(ANSWERS)) as server, server.connect() as connection:
        for _ in range(3):
            connection.sendall(request(ASK))
            piece = connection.recv(65_536)
            assert piece.startswith(b"HTTP/1.1 200 OK") and piece.endswith(b"}]]}")


def test_slow_headers_are_given_up_and_hold_no_place() -> None:
    with live(ScriptedRetriever(ANSWERS), header_timeout_s=0.3) as server, ExitStack() as stack:
        silent, begun, dripping, idle = (stack.enter_context(server.connect()) for _ in range(4))
        begun.sendall(b"POST /retrieve HTTP/1.1\r\nHost: x\r\nX-Slow: ")
        idle.sendall(request(ASK))
        assert read_answer(idle)[0] == 200
        for _ in range(6):  # a byte now and then doesn't buy time
            dripping.sendall(b"G")
            time.sleep(0.03)
        for connection in (begun, dripping):
            status, headers, body = read_answer(connection)
            assert (status, headers["connection"]) == (408, "close")
            assert json.loads(body) == {"detail": "the headers did not arrive within 0.3 s"}
            assert is_closed(connection)
        assert is_closed(silent)
        idle.sendall(request(ASK))  # between two requests there is no hurry
        assert read_answer(idle)[0] == 200
        idle.sendall(b"POST /retr")  # but within the next one there is
        assert read_answer(idle)[0] == 408


def test_a_client_that_is_refused_early_can_read_why_and_cannot_go_on() -> None:
    with live(ScriptedRetriever(ANSWERS), max_body_bytes=1000) as server, server.connect() as connection:
        connection.sendall(b"POST /retrieve HTTP/1.1\r\nHost: x\r\nContent-Length: 3000000\r\n\r\n")
        for _ in range(30):
            connection.sendall(b"x" * 100_000)
            time.sleep(0.002)
        status, headers, body = read_answer(connection)
        assert (status, headers["connection"]) == (413, "close")
        assert "larger than 1000 bytes" in json.loads(body)["detail"]
        assert is_closed(connection)


def test_an_endless_body_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_module, "_LINGER_S", 0.2)
    with live(ScriptedRetriever(ANSWERS), max_body_bytes=1000) as server, server.connect() as connection:
        connection.sendall(b"POST /retrieve HTTP/1.1\r\nHost: x\r\nContent-Length: 9999999999\r\n\r\n")
        deadline = time.monotonic() + 20
        with pytest.raises(ConnectionError):
            while time.monotonic() < deadline:
                connection.sendall(b"x" * 10_000)
                time.sleep(0.01)
        server.wait_for("connections", 0)


def test_a_client_that_does_not_read_its_answer_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_module, "_STALL_S", 0.2)

    class Wordy(ScriptedRetriever):
        def search(self, queries: Any, k: int) -> list[list[Hit]]:
            return [[Hit(document("x" * 1_000_000), 1.0)] for _ in queries]

    many = request(json.dumps({"queries": [str(i) for i in range(16)]}).encode())
    with live(Wordy({})) as server, server.connect() as slow, server.connect() as deaf:
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        deaf.sendall(many)
        slow.sendall(many)
        got, length = b"", 16_000_000
        while len(got) < length:  # slow, but it moves
            piece = slow.recv(1 << 20)
            assert piece
            got += piece
            time.sleep(0.01)
        server.wait_for("connections", 1)
        assert httpx.get(f"{server.url}/healthz").status_code == 200


def test_beyond_the_limit_of_connections_a_client_is_told() -> None:
    with live(ScriptedRetriever(ANSWERS), max_connections=3) as server, ExitStack() as stack:
        connections = [stack.enter_context(server.connect()) for _ in range(3)]
        for connection in connections:
            connection.sendall(request(ASK))
            assert read_answer(connection)[0] == 200
        with server.connect() as refused:
            status, headers, body = read_answer(refused)
            assert (status, headers["retry-after"]) == (503, "1")
            assert json.loads(body) == {"detail": "3 connections are open, which is the limit"}
            refused.close()
        server.wait_for("connections", 3)
        connections[0].close()
        server.wait_for("connections", 2)
        with server.connect() as welcome:
            welcome.sendall(request(ASK))
            assert read_answer(welcome)[0] == 200


def test_the_limit_on_open_files_is_raised_as_far_as_it_goes(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    limits = {"now": (256, 1000)}
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits["now"])
    monkeypatch.setattr(resource, "setrlimit", lambda _, pair: limits.update(now=pair))
    assert allow_open_files(500) == 500
    assert limits["now"] == (628, 1000)
    assert allow_open_files(4096) == 872
    assert limits["now"] == (1000, 1000)
    assert "only 872 of max_connections 4096 fit" in caplog.text
    limits["now"] = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    assert allow_open_files(4096) == 4096


def test_a_client_that_leaves_takes_its_queries_with_it() -> None:
    with held() as retriever, live(retriever, max_batch=1) as server, server.connect() as stays:
        with server.connect() as first, server.connect() as leaves:
            first.sendall(request(b'{"queries": ["first"]}'))
            server.wait_for("running_searches", 1)
            leaves.sendall(request(b'{"queries": ["only mine", "a"]}'))
            server.wait_for("queue_length", 2)
            stays.sendall(request(ASK))
            server.wait_for("shared_queries_total", 1)
        server.wait_for("requests_total", 2, path="/retrieve", status="499")
        retriever.gate.set()
        assert ids(read_answer(stays)[2]) == ["1"]
        server.wait_for("abandoned_queries_total", 1)
    assert [queries for queries, _ in retriever.calls] == [["first"], ["a"]]


def test_a_client_that_leaves_within_its_body_is_counted_and_forgotten() -> None:
    with live(ScriptedRetriever(ANSWERS)) as server:
        with server.connect() as connection:
            connection.sendall(request(ASK)[:-5])
            server.wait_for("connections", 1)
            time.sleep(0.05)
        server.wait_for("requests_total", 1, path="/retrieve", status="499")
        assert httpx.post(f"{server.url}/retrieve", content=ASK).status_code == 200


def test_stopping_answers_whoever_has_come_in() -> None:
    """Connections in every state at the moment of the signal."""
    with held() as retriever, live(retriever) as server, ExitStack() as stack:
        names = ("searched", "queued", "begun", "late", "idle", "pooled")
        at = {name: stack.enter_context(server.connect()) for name in names}
        at["pooled"].sendall(request(b'{"queries": []}'))
        assert read_answer(at["pooled"])[0] == 200
        at["searched"].sendall(request(ASK))
        server.wait_for("running_searches", 1)
        at["queued"].sendall(request(b'{"queries": ["b"]}'))
        server.wait_for("queue_length", 1)
        at["begun"].sendall(request(ASK)[:-4])  # the end of its body comes later
        server.wait_for("connections", 6)
        server.block(0.3)
        server.stop()
        arriving = stack.enter_context(server.connect())  # in the kernel's queue: the server hasn't looked yet
        arriving.sendall(request(ASK))
        server.wait_until_draining()
        for connection in (at["late"], at["pooled"]):
            connection.sendall(request(ASK))
        time.sleep(0.1)
        retriever.gate.set()
        for name, expected in (("searched", "1"), ("queued", "2"), ("late", "1"), ("pooled", "1")):
            status, headers, body = read_answer(at[name])
            assert (status, ids(body), headers["connection"]) == (200, [expected], "close"), name
            assert is_closed(at[name])
        assert ids(read_answer(arriving)[2]) == ["1"]
        assert is_closed(at["idle"])
        at["begun"].sendall(request(ASK)[-4:])
        assert ids(read_answer(at["begun"])[2]) == ["1"]
        server.thread.join(10)
        assert not server.thread.is_alive()
        with pytest.raises(ConnectionRefusedError):
            server.connect()
    assert retriever.closed


def test_stopping_takes_those_who_wait_in_the_kernels_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    with live(ScriptedRetriever(ANSWERS)) as server, server.connect():
        server.wait_for("connections", 1)
        monkeypatch.setattr(connection_module.Connection, "finish", lambda _: time.sleep(0.3))
        server.stop()
        server.wait_until_draining()  # it is in finish() now and looks at nothing
        with server.connect() as arriving:
            arriving.sendall(request(ASK))
            assert ids(read_answer(arriving)[2]) == ["1"]


def test_stopping_under_load_loses_no_request() -> None:
    """Clients that ask one after the other: each gets an answer to all it sent, until it is told to close."""
    with live(ScriptedRetriever({str(i): [str(i)] for i in range(32)}), cache_units=0) as server:

        def ask_until_told(i: int) -> tuple[int, int]:
            sent = answered = 0
            with server.connect() as connection:
                while True:
                    connection.sendall(request(json.dumps({"queries": [str(i)]}).encode()))
                    sent += 1
                    status, headers, body = read_answer(connection)
                    assert (status, ids(body)) == (200, [str(i)])
                    answered += 1
                    if headers.get("connection") == "close":
                        return sent, answered

        with ThreadPoolExecutor(32) as pool:
            running = [pool.submit(ask_until_told, i) for i in range(32)]
            while server.metric("queries_total") < 500:
                time.sleep(0.01)
            server.stop()
            counts = [future.result(20) for future in running]
    assert all(sent == answered > 0 for sent, answered in counts)
    assert sum(sent for sent, _ in counts) >= 500


def test_a_load_that_fails_while_clients_wait_answers_them_all() -> None:
    fail = threading.Event()

    def load(progress: LoadProgress) -> Retriever:
        progress.update("reading", 0.5)
        assert fail.wait(20)
        raise IndexFolderError("the index is damaged")

    with live(load) as server, ExitStack() as stack:
        early, within_body = (stack.enter_context(server.connect()) for _ in range(2))
        early.sendall(request(ASK))
        status, headers, body = read_answer(early)
        assert (status, headers["retry-after"]) == (503, "1")
        assert json.loads(body) == {"detail": "loading 50% (reading)"}
        within_body.sendall(request(ASK)[:-4])
        fail.set()
        deadline = time.monotonic() + 20
        while httpx.get(f"{server.url}/readyz").json()["status"] != "failed":
            assert time.monotonic() < deadline
        server.stop()  # what serve() does then
        within_body.sendall(request(ASK)[-4:])
        status, _, body = read_answer(within_body)
        assert status == 503
        assert json.loads(body) == {"detail": "the index could not be loaded: the index is damaged"}


def test_a_thousand_connections_at_once() -> None:
    answers = {f"q{i}": [f"d{i}"] for i in range(1000)}
    with live(ScriptedRetriever(answers)) as server, ExitStack() as stack:
        connections = [stack.enter_context(server.connect(60)) for _ in range(1000)]
        server.wait_for("connections", 1000)
        for i, connection in enumerate(connections):
            connection.sendall(request(json.dumps({"queries": [f"q{i}"]}).encode()))
        for i, connection in enumerate(connections):
            status, _, body = read_answer(connection)
            assert (status, ids(body)) == (200, [f"d{i}"])
        assert server.metric("requests_total", path="/retrieve", status="200") == 1000
