"""The Lucene process seen from outside: killed, silent, noisy, left behind. A fake without a JVM stands in for it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from retrieval_server.backends import lucene_process
from retrieval_server.backends.lucene_client import LuceneClient, LuceneProcessError

FAKE = (sys.executable, "-P", str(Path(__file__).with_name("fake_lucene_process.py")))


def make_index(folder: Path, rows: list[tuple[str, str | None]]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "segments_1").touch()
    (folder / "fake.json").write_text(json.dumps(rows), encoding="utf-8")
    return folder


@pytest.fixture
def client(tmp_path: Path) -> Iterator[LuceneClient]:
    made = new_client(make_index(tmp_path / "index", [("a", "lake boat"), ("b", "boat")]))
    made.start()
    yield made
    made.close()


def new_client(index: Path, command: tuple[str, ...] = FAKE, **limits: float) -> LuceneClient:
    limits = {"timeout_s": 20.0, "start_timeout_s": 20.0, **limits}
    return LuceneClient({"index": str(index), "texts": True}, environment={}, command=command, **limits)


def ids(answer: dict[str, Any]) -> list[list[str]]:
    return [[hit[0] for hit in hits] for hits in answer["hits"]]


def ask(client: LuceneClient, *queries: str, k: int = 5) -> list[list[str]]:
    return ids(client.ask({"queries": queries, "k": k}))


def process_id(client: LuceneClient) -> int:
    assert client._child is not None and client._child._process is not None
    return client._child._process.pid


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def wait_until_gone(pid: int, seconds: float = 10) -> None:
    deadline = time.monotonic() + seconds
    while is_alive(pid):
        assert time.monotonic() < deadline, f"process {pid} is still there"
        time.sleep(0.02)


def test_answers_come_in_order_and_a_failing_request_fails_alone(client: LuceneClient) -> None:
    assert ask(client, "boat", "nothing", "lake boat") == [["a", "b"], [], ["a", "b"]]
    with pytest.raises(LuceneProcessError, match=r"^lucene: ValueError: scripted failure$"):
        ask(client, "boat", "fail")
    assert ask(client, "lake") == [["a"]]
    assert client.restarts == 0


def test_killed_while_idle_is_started_again_by_the_next_request(client: LuceneClient) -> None:
    os.kill(process_id(client), signal.SIGKILL)
    wait_until_gone(process_id(client))
    assert ask(client, "lake") == [["a"]]
    assert client.restarts == 1


def test_killed_in_flight_is_asked_once_more(client: LuceneClient) -> None:
    assert ask(client, "boat", "die once") == [["a", "b"], []]
    assert client.restarts == 1


def test_a_batch_that_kills_twice_fails_with_the_reason_and_the_next_is_served(client: LuceneClient) -> None:
    message = r"^the lucene process was killed by SIGKILL, twice on the same 2 queries$"
    with pytest.raises(LuceneProcessError, match=message):
        ask(client, "boat", "die always")
    assert ask(client, "lake") == [["a"]]


def test_a_full_heap_says_so_and_names_the_option(client: LuceneClient) -> None:
    with pytest.raises(LuceneProcessError, match=r"status 3 because its heap was full; raise heap_mb.*last words"):
        ask(client, "heap")


def test_a_silent_process_is_killed_and_replaced(tmp_path: Path) -> None:
    client = new_client(make_index(tmp_path / "index", [("a", "lake")]), timeout_s=0.5)
    client.start()
    silent = process_id(client)
    with pytest.raises(LuceneProcessError, match=r"did not answer 1 queries within 0\.5 s and was killed"):
        ask(client, "hang")
    assert not is_alive(silent)
    client._timeout_s = 20  # the new one has to start within it on a busy machine
    assert ask(client, "lake") == [["a"]]
    client.close()


def test_noise_on_stderr_neither_blocks_nor_grows(client: LuceneClient) -> None:
    assert ask(client, "noise boat") == [["a", "b"]]
    os.kill(process_id(client), signal.SIGKILL)
    with pytest.raises(LuceneProcessError, match=r"its last words: noise 19997 / noise 19998 / noise 19999"):
        ask(client, "noise die always")


def test_two_threads_get_their_own_answers(client: LuceneClient) -> None:
    wrong = []

    def work(word: str, expected: list[list[str]]) -> None:
        wrong.extend(answer for _ in range(50) if (answer := ask(client, word)) != expected)

    threads = [threading.Thread(target=work, args=case) for case in (("lake", [["a"]]), ("boat", [["a", "b"]]))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_close_ends_the_process_and_says_so_afterwards(client: LuceneClient) -> None:
    pid = process_id(client)
    client.close()
    assert not is_alive(pid)
    with pytest.raises(LuceneProcessError, match="closed"):
        ask(client, "lake")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("fail", r"^lucene cannot open \S+/fail: ValueError: scripted failure$"),
        ("die always", r"^the lucene process was killed by SIGKILL while starting$"),
        ("Could not load codec fail", r"IllegalArgumentException.*codec 'Lucene99'\?; a newer Lucene wrote it than"),
        ("IndexFormatTooOld fail", r"IndexFormatTooOldException: .*; the Lucene in the jar is too new for it"),
        ("hang", r"^the lucene process did not open the index within 1 s$"),
    ],
)
def test_a_start_that_fails_says_how(tmp_path: Path, name: str, message: str) -> None:
    client = new_client(make_index(tmp_path / name, [("a", "lake")]), start_timeout_s=1 if name == "hang" else 20)
    with pytest.raises(LuceneProcessError, match=message):
        client.start()


def test_a_program_that_is_not_there_says_so(tmp_path: Path) -> None:
    client = new_client(make_index(tmp_path / "index", []), command=(str(tmp_path / "none"),))
    with pytest.raises(LuceneProcessError, match=r"cannot be started: .*none"):
        client.start()


PARENT = """
import os, sys, threading, time
sys.path[:0] = sys.argv[1:3]
from test_lucene_client import new_client, process_id
from pathlib import Path
client = new_client(Path(sys.argv[3]))
loader = threading.Thread(target=client.start)   # a server loads in a thread that ends when all is loaded
loader.start()
loader.join()
print(process_id(client), flush=True)
if sys.argv[4] == "hang":
    client.ask({"queries": ["hang"], "k": 1})
time.sleep(600)
"""


@pytest.mark.parametrize("busy", ["idle", "hang"])
def test_the_process_does_not_outlive_its_parent(tmp_path: Path, busy: str) -> None:
    index = make_index(tmp_path / "index", [("a", "lake")])
    here = Path(__file__).parent
    command = [sys.executable, "-c", PARENT, str(here), str(here.parents[1]), str(index), busy]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        time.sleep(0.3)
        assert is_alive(child)
        parent.kill()
    wait_until_gone(child)


def test_a_stopped_process_goes_with_its_parent_too(tmp_path: Path) -> None:
    """The kernel's signal reaches a child that cannot read the end of its connection."""
    index = make_index(tmp_path / "index", [("a", "lake")])
    here = Path(__file__).parent
    command = [sys.executable, "-c", PARENT, str(here), str(here.parents[1]), str(index), "idle"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        os.kill(child, signal.SIGSTOP)
        parent.kill()
    wait_until_gone(child)


@given(st.text(), st.integers(0, 10**6))
def test_messages_survive_the_way(text: str, number: int) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        lucene_process.send(ours, {"queries": [text, "\ud800"], "k": number})
        assert lucene_process.receive(theirs) == {"queries": [text, "\ud800"], "k": number}


def test_what_is_not_a_message_is_refused() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(b"\xff\xff\xff\xff")
        with pytest.raises(ValueError, match="4294967295 bytes"):
            lucene_process.receive(theirs)
        ours.sendall(b"\0\0\0\2[]")
        with pytest.raises(ValueError, match="JSON list"):
            lucene_process.receive(theirs)
        ours.sendall(b"\0\0\0\7{}")
        ours.close()
        with pytest.raises(EOFError, match="5 of 7 bytes"):
            lucene_process.receive(theirs)


@pytest.mark.parametrize(
    ("query", "cleaned"),
    [
        ("plain", "plain"),
        ("a\ud800b", "a b"),
        ("\ud83d\ude00", "\U0001f600"),
        ("a\0b", "a b"),
        ("é\0\udfff", "é  "),
    ],
)
def test_queries_become_java_strings(query: str, cleaned: str) -> None:
    assert lucene_process.clean(query) == cleaned
    cleaned.encode("utf-16")


@given(st.lists(st.sampled_from("abcdef")), st.integers(1, 6))
def test_the_last_distinct_terms_are_kept_with_their_counts(terms: list[str], limit: int) -> None:
    tails = [terms[start:] for start in range(len(terms) + 1)]
    longest = next(tail for tail in tails if len(set(tail)) <= limit)
    assert lucene_process.last_terms(terms, limit) == Counter(longest)
