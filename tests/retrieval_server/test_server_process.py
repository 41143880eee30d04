"""The server as a process on a real socket: start, failures to start, garbage, and stopping."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

ROOT = Path(__file__).resolve().parents[2]


@contextmanager
def running(command: list[str | Path], ready: bool = True) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Start a server that takes a free port; yield (process, base URL), by default when it is ready."""
    process = subprocess.Popen(
        command, cwd=ROOT, stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHON": sys.executable}
    )
    try:
        assert process.stderr is not None
        for line in process.stderr:  # ends at EOF, so a server that dies cannot hang the test
            if found := re.search(r"listening on (http://\S+)", line):
                break
        else:
            raise AssertionError(f"the server ended with {process.wait()}")
        if ready:
            wait_until_ready(found[1])
        yield process, found[1]
    finally:
        process.kill()
        process.communicate()


def wait_until_ready(url: str) -> None:
    deadline = time.monotonic() + 60
    while httpx.get(f"{url}/readyz", timeout=30).status_code != 200:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def launch(index: Path, corpus: Path, *more: str) -> list[str | Path]:
    flags: list[str | Path] = ["--index_path", index, "--corpus_path", corpus, "--port", "0", *more]
    return ["bash", ROOT / "retrieval_launch.sh", *flags]


def test_the_launcher_serves_and_stops_on_sigterm(built: tuple[Path, Path]) -> None:
    with running(launch(*built, "--topk", "1")) as (process, url):
        answer = httpx.post(f"{url}/retrieve", json={"queries": ["boats"], "return_scores": True}).json()
        assert [hit["document"]["id"] for hit in answer["result"][0]] == ["town:2"]
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{url}/healthz")


def failed_start(*flags: str | Path) -> tuple[int, str]:
    """(exit status, last line of stderr) of a server that cannot start."""
    command = [sys.executable, "-m", "retrieval_server", *flags]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    return done.returncode, done.stderr.splitlines()[-1]


def test_a_taken_port_is_reported_before_anything_is_loaded(built: tuple[Path, Path]) -> None:
    index, corpus = built
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        code, message = failed_start("--index_path", index, "--corpus_path", corpus, "--port", str(port))
    assert code == 2
    assert message.startswith(f"error: port {port} on 127.0.0.1 is taken: choose another with --port")


def test_failures_to_load_end_the_process_with_one_line(built: tuple[Path, Path], tmp_path: Path) -> None:
    index, corpus = built
    truncated = tmp_path / "corpus.jsonl"
    truncated.write_bytes(corpus.read_bytes()[:-7])
    pair = ("--index_path", index, "--corpus_path")
    assert failed_start(*pair, truncated, "--port", "0") == (
        2,
        f"error: corpus {truncated} has 568 bytes, but the index was built from corpus.jsonl with 575 bytes "
        "(6 passages): another corpus, or a truncated copy; give the right one or rebuild the index",
    )
    assert failed_start(*pair, corpus, "--retriever_name", "bm52") == (
        2,
        "error: --retriever_name 'bm52' is unknown (did you mean 'bm25'?); known: bge, bm25, contriever, dense, dpr, "
        "e5, gte, jina, lucene, plain",
    )
    assert failed_start(*pair, corpus, "--port", "99999") == (2, "error: port 99999 is not between 0 and 65535")
    assert failed_start(*pair, corpus, "--topk", "0") == (2, "error: topk is 0; it must be at least 1")


GARBAGE = {
    "noise": os.urandom(5000),
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    "half a request": b"POST /retrieve HTTP/1.1\r\nHost: x\r\nContent-Length: 50\r\n\r\n{",
    "a lying length": b"POST /retrieve HTTP/1.1\r\nHost: x\r\nContent-Length: 999999999999\r\n\r\n{}",
    "a negative length": b"POST /retrieve HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n{}",
    "bad chunks": b"POST /retrieve HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n{}",
    "endless header": b"GET /healthz HTTP/1.1\r\nX: " + b"a" * 200_000,
    "nothing": b"",
}


def test_garbage_on_the_socket_does_not_stop_the_next_request(
    built: tuple[Path, Path], subtests: pytest.Subtests
) -> None:
    with running(launch(*built)) as (_, url):
        host, port = url.removeprefix("http://").split(":")
        for name, data in GARBAGE.items():
            with subtests.test(name), socket.create_connection((host, int(port)), timeout=10) as connection:
                try:
                    connection.sendall(data)
                    connection.shutdown(socket.SHUT_WR)
                    answer = connection.recv(100)
                except OSError:  # closed in our face: fine
                    answer = b""
                assert answer == b"" or re.match(rb"HTTP/1\.1 4\d\d ", answer), answer
            response = httpx.post(f"{url}/retrieve", json={"queries": ["festival"]})
            assert [document["id"] for document in response.json()["result"][0]] == ["town:2"]


HELD_SERVER = """
    import sys, time
    from pathlib import Path
    sys.path.insert(0, "tests/retrieval_server")
    from retrieval_helpers import ScriptedRetriever
    from retrieval_server.server import bind, serve
    from retrieval_server.settings import Settings
    import logging
    logging.basicConfig(level=logging.INFO, format="%(message)s")

    class Held(ScriptedRetriever):
        def search(self, queries, k):
            while not Path(sys.argv[2]).exists():
                time.sleep(0.01)
            return super().search(queries, k)

    def load(progress):
        time.sleep(float(sys.argv[1]))
        return Held({f"q{i}": [f"d{i}"] for i in range(40)})

    sys.exit(serve(load, Settings(max_batch=8), bind("127.0.0.1", 0)))
"""


def test_sigterm_under_load_finishes_every_accepted_request(tmp_path: Path) -> None:
    gate = tmp_path / "open"
    command: list[str | Path] = [sys.executable, "-c", textwrap.dedent(HELD_SERVER), "0", gate]
    with (
        running(command) as (process, url),
        httpx.Client(timeout=30, limits=httpx.Limits(max_connections=40)) as client,
        ThreadPoolExecutor(24) as pool,
    ):

        def ask(i: int) -> list[str]:
            answer = client.post(f"{url}/retrieve", json={"queries": [f"q{i}"]})
            return [document["id"] for document in answer.json()["result"][0]]

        asked = [pool.submit(ask, i) for i in range(24)]
        deadline = time.monotonic() + 30
        while "retrieval_queries_total 24.0" not in client.get(f"{url}/metrics").text:
            assert time.monotonic() < deadline
        process.send_signal(signal.SIGTERM)
        time.sleep(0.3)
        assert process.poll() is None
        gate.touch()
        assert [answer.result() for answer in asked] == [[f"d{i}"] for i in range(24)]
        assert process.wait(10) == 0


def test_sigterm_while_loading_does_not_wait_for_the_index() -> None:
    command: list[str | Path] = [sys.executable, "-c", textwrap.dedent(HELD_SERVER), "60", "unused"]
    with running(command, ready=False) as (process, url):
        assert httpx.get(f"{url}/readyz", timeout=30).status_code == 503
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0
