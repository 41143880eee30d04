"""The retrieval benchmark measures what it says: against servers of known speed, errors and cost."""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import reference_server
import retrieval
import synthetic
from load_generator import Job, drive, percentile, repeated
from measured_server import MeasuredServer, family
from starlette.testclient import TestClient


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("made-up") / "corpus.jsonl"
    synthetic.write_corpus(path, 300, n_words=5000)
    return path


def test_the_made_up_corpus_is_the_same_each_time_and_follows_zipf(corpus: Path, tmp_path: Path) -> None:
    again = tmp_path / "again.jsonl"
    synthetic.write_corpus(again, 300, n_words=5000)
    assert again.read_bytes() == corpus.read_bytes()
    rows = [json.loads(line) for line in corpus.read_text().splitlines()]
    assert [row["id"] for row in rows] == [f"p{i}" for i in range(300)]
    words = Counter(word for row in rows for word in row["contents"].replace('"', " ").replace(".", "").split())
    ranks = words.most_common()
    assert ranks[0][0] == synthetic.STOP_WORDS[0]
    assert 5 < ranks[0][1] / ranks[9][1] < 20  # rank 1 against rank 10: about 10 ** 1.05


def test_queries_are_words_of_one_passage_and_do_not_repeat(corpus: Path) -> None:
    texts = synthetic.sample_texts(corpus)
    passages = [set(words) for words in texts]
    found = list(islice(synthetic.queries(texts, seed=1), 2000))
    assert len(set(found)) == 2000
    assert all(any(set(query.split()) <= passage for passage in passages) for query in found[:20])


def test_repetitions_are_close_together() -> None:
    stream = list(islice(repeated(map(str, range(1000)), 5, random.Random(1)), 640))
    places = {name: [i for i, other in enumerate(stream) if other == name] for name in set(stream)}
    assert all(len(where) == 5 and where[-1] - where[0] < 320 for where in places.values())


async def answer_after(seconds: float, fail_every: int = 0) -> tuple[asyncio.Server, str]:
    """Start a server that answers each request after a pause, and every n-th with a 500."""
    asked = 0

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal asked
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                length = int(head.partition(b"content-length:")[2].split()[0])
                queries = json.loads(await reader.readexactly(length))["queries"]
                asked += 1
                await asyncio.sleep(seconds)
                failed = fail_every and asked % fail_every == 0
                hit = {"document": {"contents": "x"}, "score": 1.0}
                body = b"boom" if failed else json.dumps({"result": [[hit] for _ in queries]}).encode()
                status = "500 Oops" if failed else "200 OK"
                writer.write(f"HTTP/1.1 {status}\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body)
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    return server, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/retrieve"


def job(url: str, corpus: Path, **changes: Any) -> Job:
    base = Job(url, str(corpus), clients=4, batch=3, topk=3, seconds=0.6, drain=5.0, warmup=0.1, seed=1)
    return replace(base, **changes)


async def test_rate_and_latency_of_a_server_of_known_speed(corpus: Path) -> None:
    server, url = await answer_after(0.1)
    figures = await drive(job(url, corpus))
    server.close()
    assert 100 <= figures["p50_ms"] < 300
    assert figures["qps"] == pytest.approx(3 * figures["requests"] / figures["elapsed"])
    assert 20 < figures["qps"] <= 4 * 3 / 0.1 * 1.2  # at most what four clients can get, whatever the machine does
    assert figures["all_queries"] >= 3 * figures["requests"] > 0
    assert (figures["errors"], figures["unanswered"]) == (0, 0)


async def test_errors_and_silence_are_reported_and_no_success(corpus: Path) -> None:
    server, url = await answer_after(0.01, fail_every=2)
    figures = await drive(job(url, corpus, clients=1))
    server.close()
    assert figures["errors"] > 0 and "HTTP 500" in figures["first_error"] and figures["requests"] > 0
    server, url = await answer_after(60.0)
    figures = await drive(job(url, corpus, drain=0.2))
    server.close()
    assert (figures["requests"], figures["unanswered"], figures["qps"]) == (0, 4, 0.0)


def test_percentiles_are_nearest_rank() -> None:
    values = [float(v) for v in range(100, 0, -1)]
    assert [percentile(values, q) for q in (50, 95, 99)] == [50.0, 95.0, 99.0]
    assert percentile([3.0], 99) == 3.0 and percentile([], 50) != percentile([], 50)


def test_processor_time_covers_children() -> None:
    burn = "import time\nend = time.process_time() + 0.4\nwhile time.process_time() < end: pass\ntime.sleep(60)"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {burn!r}])"
    process = subprocess.Popen([sys.executable, "-c", parent])
    server = MeasuredServer("s", "http://127.0.0.1:1/retrieve", process.pid, process=process)
    children: list[int] = []
    try:
        deadline = time.monotonic() + 60
        while (server.cpu_seconds() or 0.0) < 0.4 and time.monotonic() < deadline:
            time.sleep(0.05)
        children = family(process.pid)[1:]
        assert len(children) == 1 and 0.4 <= (server.cpu_seconds() or 0.0) < 5
        assert server.memory()["peak"] > 5
    finally:
        for pid in children:
            subprocess.run(["kill", str(pid)], check=False)
        server.stop()


class Fixed:
    """Two documents for every query."""

    def search(self, queries: list[str], k: int) -> list[reference_server.Found]:
        return [[({"id": str(i), "contents": query}, 1.0 - i) for i in range(2)][:k] for query in queries]


def test_the_reference_speaks_the_published_format() -> None:
    with TestClient(reference_server.create_app(Fixed(), topk=1)) as client:
        scored = client.post("/retrieve", json={"queries": ["a", "b"], "topk": 2, "return_scores": True}).json()
        assert scored["result"][1][1] == {"document": {"id": "1", "contents": "b"}, "score": 0.0}
        assert client.post("/retrieve", json={"queries": ["a"]}).json() == {"result": [[{"id": "0", "contents": "a"}]]}


def test_rows_of_the_arrow_corpus_are_those_of_the_file(corpus: Path, tmp_path: Path) -> None:
    import pyarrow as pa

    reference_server.write_arrow(corpus, tmp_path / "corpus.arrow")
    rows = pa.ipc.open_file(pa.memory_map(str(tmp_path / "corpus.arrow"))).read_all()
    assert rows.slice(299, 1).to_pylist() == [json.loads(corpus.read_text().splitlines()[299])]


def figures(qps: float, p50: float, p99: float, **more: Any) -> dict[str, Any]:
    return {"qps": qps, "p50_ms": p50, "p95_ms": p99, "p99_ms": p99, "errors": 0, "unanswered": 0, **more}


def test_table_and_targets() -> None:
    servers = {"ours": figures(1000, 10, 25, cpu_ms_per_query=0.5), "reference": figures(500, 20, 30, errors=2)}
    rows = [{"clients": 64, "batch": 1, "repeat": 1, "servers": servers}]
    text = retrieval.table("bm25", rows, ["ours", "reference"])
    assert "| 64 x 1 | 1,000 | 10 / 25 / 25 | 0.50 | 500 (2 errors) | 20 / 30 / 30 | - | 2.0 | - |" in text
    assert retrieval.targets("bm25", rows) == ["64 x 1: 2.0 times the reference, to reach 2.5 **(missed)**"]
    assert retrieval.targets("dense", rows) == [
        "64 x 1: 2.0 times the reference, to reach 4 **(missed)**",
        "64 x 1: p99 is 2.5 times the median, at most 2 **(missed)**",
    ]


def test_rounds_are_summed_up_by_their_median() -> None:
    rounds = [{**figures(qps, 1.0, 2.0), "errors": 1, "requests": 5, "first_error": ""} for qps in (10.0, 90.0, 20.0)]
    found = retrieval.middle(rounds)
    assert (found["qps"], found["errors"], found["requests"], found["qps_of_rounds"]) == (20.0, 3, 15, [10, 90, 20])


@pytest.mark.parametrize("text", ["http://h/retrieve", "x=h:8000", "=", "x="])
def test_addresses_of_other_servers(text: str) -> None:
    with pytest.raises(SystemExit, match="expected NAME="):
        retrieval.foreign([text])
    (server,) = retrieval.foreign(["theirs=http://h:1/retrieve,12"])
    assert (server.name, server.url, server.pid) == ("theirs", "http://h:1/retrieve", 12)
