"""The proxy as a process in front of server processes: one is killed under load, and comes back."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
import yaml
from fake_replicas import wait_for
from retrieval_helpers import PASSAGES, make_plan, open_index, write_corpus
from test_server_process import launch, running

from retrieval_server.backends.bm25_build import build

QUERIES = ["boats", "lake orvel", "ada", "zürich", "river sea", "festival fishing", "quantum", "mirel boats lake"]


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def ready_replicas(url: str) -> list[bool]:
    return [replica["ready"] for replica in httpx.get(f"{url}/info").json()["replicas"]]


@pytest.mark.slow
def test_kill_9_of_a_replica_under_load_loses_no_accepted_request(
    stack: ExitStack, built: tuple[Path, Path], tmp_path: Path
) -> None:
    servers = [stack.enter_context(running(launch(*built, "--cache_units", "0"))) for _ in range(2)]
    config = tmp_path / "proxy.yaml"
    backend = {"name": "proxy", "replicas": [url for _, url in servers], "health_interval_s": 0.2}
    config.write_text(yaml.safe_dump({"backend": backend, "server": {"port": 0, "cache_units": 0}}))
    _, proxy = stack.enter_context(running([sys.executable, "-m", "retrieval_server", "--config", config]))
    oracle = open_index(*built)
    expected = [[hit.document.id for hit in hits] for hits in oracle.search(QUERIES, 3)]
    stop, answered = threading.Event(), []

    def client(number: int) -> None:
        with httpx.Client(timeout=30) as session:
            while not stop.is_set():
                answer = session.post(f"{proxy}/retrieve", json={"queries": QUERIES * 4, "topk": 3})
                assert answer.status_code == 200, answer.text
                assert [[hit["id"] for hit in hits] for hits in answer.json()["result"]] == expected * 4
                answered.append(number)

    with ThreadPoolExecutor(8) as pool:
        clients = [pool.submit(client, number) for number in range(8)]
        wait_for(lambda: len(answered) > 50, 60)
        victim, address = servers[0]
        victim.send_signal(signal.SIGKILL)
        at_kill = len(answered)
        wait_for(lambda: len(answered) > at_kill + 50, 60)
        assert ready_replicas(proxy) == [False, True]
        command = [*launch(*built, "--cache_units", "0")]
        command[command.index("--port") + 1] = str(urlsplit(address).port)
        stack.enter_context(running(command))
        wait_for(lambda: ready_replicas(proxy) == [True, True], 30)
        at_return = len(answered)
        wait_for(lambda: len(answered) > at_return + 50, 60)
        stop.set()
        for future in clients:
            future.result()


@pytest.mark.slow
def test_replicas_of_two_corpora_end_the_proxy_with_one_line(
    stack: ExitStack, built: tuple[Path, Path], tmp_path: Path
) -> None:
    other = write_corpus(tmp_path / "other.jsonl", PASSAGES[:3])
    build(make_plan(other, tmp_path / "index"))
    urls = [stack.enter_context(running(launch(*pair)))[1] for pair in (built, (tmp_path / "index", other))]
    config = tmp_path / "proxy.yaml"
    config.write_text(yaml.safe_dump({"backend": {"name": "proxy", "replicas": urls}, "server": {"port": 0}}))
    command = [sys.executable, "-m", "retrieval_server", "--config", str(config)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    last = done.stderr.splitlines()[-1]
    assert last.startswith("error: replicas serve different corpora: ")
    assert "6 passages" in last
    assert "3 passages" in last
