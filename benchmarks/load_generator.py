"""Drives a ``/retrieve`` server with concurrent clients, as a process of its own: a job on stdin, figures on stdout.

Closed loop: every client sends its next request when the last one is answered. HTTP is spoken by hand, since a client
library would cost more than the fastest server it measures.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from synthetic import queries, sample_texts

_BLOCK_OF_REPEATED = 64
"""Distinct queries between which repetitions are shuffled, as if from the prompts of one training step. All repetitions
of one fall within a second of a server that answers 320 queries a second and more; a slower one takes longer."""


@dataclass
class Job:
    """One cell of the benchmark."""

    url: str
    corpus: str
    """Queries are made of its passages."""
    clients: int
    batch: int
    topk: int
    seconds: float
    """After this time no new request is sent."""
    drain: float
    """Seconds that requests under way may take then; one that takes longer counts as not answered."""
    warmup: float
    """Seconds before the measurement: what is answered in them does not count."""
    seed: int
    repeat: int = 1
    """How often every query is sent; a server may answer the repetitions from memory."""


@dataclass
class Tally:
    """What came back."""

    seconds: list[float] = field(default_factory=list)
    """Time of each answered request."""
    queries: int = 0
    """Queries answered in all, those of the warm-up too: what the server's processor time was spent on."""
    errors: int = 0
    first_error: str = ""
    last_end: float = 0.0

    def fail(self, reason: str) -> None:
        """Count a request that was not answered as it should be."""
        self.errors += 1
        self.first_error = self.first_error or reason


def bodies(job: Job) -> Iterator[bytes]:
    """Yield request bodies without end."""
    stream = queries(sample_texts(Path(job.corpus)), job.seed)
    if job.repeat > 1:
        stream = repeated(stream, job.repeat, random.Random(job.seed))
    while True:
        batch = list(itertools.islice(stream, job.batch))
        yield json.dumps({"queries": batch, "topk": job.topk, "return_scores": True}).encode()


def repeated(stream: Iterator[str], times: int, chooser: random.Random) -> Iterator[str]:
    """Yield every query ``times`` times, close together but not in a row."""
    while True:
        block = list(itertools.islice(stream, _BLOCK_OF_REPEATED)) * times
        chooser.shuffle(block)
        yield from block


class Connection:
    """One keep-alive connection."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._host, self._port = parts.hostname or "127.0.0.1", parts.port or 80
        self._head = f"POST {parts.path} HTTP/1.1\r\nHost: {parts.netloc}\r\nContent-Type: application/json\r\n"
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def post(self, body: bytes) -> tuple[int, bytes]:
        """Return status and body; raises OSError, asyncio.IncompleteReadError or ValueError."""
        if self._streams is None:
            self._streams = await asyncio.open_connection(self._host, self._port, limit=1 << 20)
        reader, writer = self._streams
        writer.write(f"{self._head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        found = head.find(b"content-length:")
        if found < 0:
            raise ValueError("an answer without Content-Length is not understood here")
        length = int(head[found + 15 : head.index(b"\r\n", found)])
        return int(head[9:12]), await reader.readexactly(length)

    def drop(self) -> None:
        """Close; the next request opens a new one."""
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None


async def client(job: Job, work: Iterator[bytes], start: float, tally: Tally) -> None:
    """Send requests one after the other until the time is over."""
    connection, checked = Connection(job.url), False
    try:
        while (began := time.perf_counter()) < start + job.seconds:
            try:
                status, answer = await connection.post(next(work))
                if status != 200:
                    raise ValueError(f"HTTP {status} {answer[:200]!r}")
                if not checked:
                    check(answer, job)
                    checked = True
            except (OSError, asyncio.IncompleteReadError, ValueError) as error:
                tally.fail(f"{type(error).__name__}: {error}")
                connection.drop()
                await asyncio.sleep(0.05)
                continue
            tally.last_end = time.perf_counter()
            tally.queries += job.batch
            if tally.last_end >= start:
                tally.seconds.append(tally.last_end - began)
    finally:
        connection.drop()


def check(answer: bytes, job: Job) -> None:
    """Raise ValueError when an answer is not one of the published format with passages in it."""
    result = json.loads(answer)["result"]
    if len(result) != job.batch or any(len(hits) > job.topk for hits in result):
        raise ValueError(f"{job.batch} queries, topk {job.topk}, but the lists have {[len(hits) for hits in result]}")
    if not any(hits and hits[0]["document"]["contents"] for hits in result):
        raise ValueError("no query found any passage")


async def drive(job: Job) -> dict[str, Any]:
    """Run the clients and return the figures of the cell."""
    ready = list(itertools.islice(work := bodies(job), max(64, 4096 // job.batch)))
    work = itertools.chain(ready, work)
    tally, cpu = Tally(), time.process_time()
    start = time.perf_counter() + job.warmup
    tasks = [asyncio.create_task(client(job, work, start, tally)) for _ in range(job.clients)]
    _, unfinished = await asyncio.wait(tasks, timeout=job.warmup + job.seconds + job.drain)
    for task in unfinished:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    for task in tasks:
        if not task.cancelled() and (error := task.exception()) is not None:
            tally.fail(repr(error))
    elapsed = (time.perf_counter() if unfinished else tally.last_end) - start
    n = len(tally.seconds) * job.batch
    return {
        "requests": len(tally.seconds),
        "all_queries": tally.queries,
        "unanswered": len(unfinished),
        "errors": tally.errors,
        "first_error": tally.first_error,
        "elapsed": elapsed,
        "qps": n / elapsed if n else 0.0,
        **{f"p{q}_ms": 1000 * percentile(tally.seconds, q) for q in (50, 95, 99)},
        "client_cpu_ms_per_query": 1000 * (time.process_time() - cpu) / tally.queries if n else None,
    }


def percentile(values: Sequence[float], q: int) -> float:
    """Return the nearest-rank percentile; NaN of nothing."""
    ordered = sorted(values)
    return ordered[max(0, -(-q * len(ordered) // 100) - 1)] if ordered else float("nan")


if __name__ == "__main__":
    sys.stdout.write(json.dumps(asyncio.run(drive(Job(**json.load(sys.stdin))))) + "\n")
