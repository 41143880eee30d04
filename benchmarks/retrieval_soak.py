"""Does the retrieval service stay as it is? Minutes at a fixed share of the most it can do: no error, flat memory.

    python benchmarks/retrieval_soak.py --minutes 10 --output runs/soak
    python benchmarks/retrieval_soak.py --share 0.5 --config configs/retrieval/hybrid.yaml --corpus corpus.jsonl

First the maximum is measured (clients that ask one after the other for a few seconds), then requests are sent at a
fixed rate, each when it is due and not when the last one is answered, so waiting counts from the time it was due. What
is due for more than a second is skipped and counted: on a machine that does something else meanwhile, the rate is too
much at times. Every query is a new one. Without ``--config``, BM25 over a corpus that is made up. The exit status is 1
when a request failed or memory grew.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import mean
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from load_generator import Connection, Job, bodies, drive, percentile
from measured_server import MeasuredServer, free_port, start
from retrieval import build_bm25, corpus_of

MAX_GROWTH_MB = 8.0
MAX_GROWTH = 0.02
"""Memory is flat when it grows by less than the larger of the two, from the second fifth of the time to the last: in
the first the result cache fills (12,500 queries with the defaults; give it the minutes that takes)."""
MAX_LATE_S = 1.0
"""How late a request may be sent."""


@dataclass
class Window:
    """What happened in one interval."""

    minute: float
    qps: float
    p50_ms: float
    p99_ms: float
    errors: int
    skipped: int
    anonymous_mb: float
    cpu_ms_per_query: float | None


@dataclass
class Tally:
    """What came back since the last window."""

    seconds: list[float] = field(default_factory=list)
    errors: int = 0
    skipped: int = 0
    first_error: str = ""


async def soak(server: MeasuredServer, job: Job, rate: float, seconds: float, every: float) -> tuple[list[Window], str]:
    """Send ``rate`` requests a second; return the windows and the first error."""
    tally, windows = Tally(), []
    begun = time.perf_counter()
    due = (begun + i / rate for i in itertools.count())
    work = bodies(job)
    senders = [asyncio.create_task(_send(job, work, due, begun + seconds, tally)) for _ in range(job.clients)]
    cpu, last, first_error = server.cpu_seconds(), begun, ""
    while time.perf_counter() < begun + seconds:
        await asyncio.sleep(every)
        now, cpu_now = time.perf_counter(), server.cpu_seconds()
        n = len(tally.seconds)
        spent = None if cpu is None or cpu_now is None or n == 0 else 1000 * (cpu_now - cpu) / n
        p50, p99 = (1000 * percentile(tally.seconds, q) for q in (50, 99))
        memory = server.memory().get("anonymous", float("nan"))
        windows.append(
            Window((now - begun) / 60, n / (now - last), p50, p99, tally.errors, tally.skipped, memory, spent)
        )
        say(_line(windows[-1]))
        cpu, last, first_error = cpu_now, now, first_error or tally.first_error
        tally.seconds, tally.errors, tally.skipped = [], 0, 0
    await asyncio.gather(*senders)
    return windows, first_error or tally.first_error


async def _send(job: Job, work: Iterator[bytes], due: Iterator[float], end: float, tally: Tally) -> None:
    """Take the next request that is due, wait for its time, send it; until the time is over."""
    connection = Connection(job.url)
    for when in due:
        if when >= end:
            break
        if (ahead := when - time.perf_counter()) < -MAX_LATE_S:
            tally.skipped += 1
            continue
        await asyncio.sleep(ahead)
        try:
            status, answer = await connection.post(next(work))
            if status != 200:
                raise ValueError(f"HTTP {status} {answer[:200]!r}")
            if len(json.loads(answer)["result"]) != job.batch:
                raise ValueError(f"not {job.batch} lists: {answer[:200]!r}")
        except (OSError, asyncio.IncompleteReadError, ValueError) as error:
            tally.errors += 1
            tally.first_error = tally.first_error or f"{type(error).__name__}: {error}"
            connection.drop()
            continue
        tally.seconds.append(time.perf_counter() - when)
    connection.drop()


def growth(windows: list[Window]) -> tuple[float, float]:
    """Return MB of anonymous memory in the second fifth of the time and in the last."""
    fifth = max(1, len(windows) // 5)
    early = windows[fifth : 2 * fifth] or windows[:1]
    return mean(w.anonymous_mb for w in early), mean(w.anonymous_mb for w in windows[-fifth:])


def is_flat(before: float, after: float) -> bool:
    """Return whether memory has grown by no more than noise."""
    return after - before <= max(MAX_GROWTH_MB, MAX_GROWTH * before)


def say(text: str) -> None:
    """Report progress."""
    sys.stderr.write(f"soak: {text}\n")


def _line(window: Window) -> str:
    cpu = "" if window.cpu_ms_per_query is None else f", {window.cpu_ms_per_query:.2f} CPU ms a query"
    return (
        f"{window.minute:5.1f} min: {window.qps:6.0f} queries/s, p50 {window.p50_ms:.1f} ms, "
        f"p99 {window.p99_ms:.1f} ms, {window.errors} errors, {window.skipped} skipped, "
        f"{window.anonymous_mb:.0f} MB{cpu}"
    )


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Start the server, measure its maximum, soak it; return the figures."""
    folder = Path(options.output)
    folder.mkdir(parents=True, exist_ok=True)
    corpus = corpus_of(options)
    port = free_port()
    if options.config is not None:
        what = ["--config", str(options.config)]
    else:
        what = ["--index_path", str(build_bm25(corpus, folder)), "--corpus_path", str(corpus)]
    command = [sys.executable, "-m", "retrieval_server", *what, "--port", str(port), *options.server_flag]
    server = start("ours", command, port, folder / "soak.log", {}, ROOT)
    job = Job(server.url, str(corpus), options.clients, 1, 3, options.calibrate, 10.0, 2.0, seed=1)
    try:
        most = asyncio.run(drive(job))
        rate = options.share * most["qps"]
        say(
            f"maximum {most['qps']:.0f} queries/s with {options.clients} clients; {options.minutes:g} min at {rate:.0f}"
        )
        job.seed = 2
        windows, first_error = asyncio.run(soak(server, job, rate, 60 * options.minutes, options.every))
        peak = server.memory().get("peak")
    finally:
        server.stop()
    before, after = growth(windows)
    errors = most["errors"] + sum(window.errors for window in windows)
    return {
        "minutes": options.minutes,
        "clients": options.clients,
        "maximum_qps": most["qps"],
        "asked_qps": rate,
        "reached_qps": mean(window.qps for window in windows),
        "queries": sum(window.qps for window in windows) * options.every,
        "errors": errors,
        "skipped": sum(window.skipped for window in windows),
        "first_error": first_error or most["first_error"],
        "anonymous_mb": {"second_fifth": before, "last_fifth": after},
        "peak_mb": peak,
        "stayed": errors == 0 and is_flat(before, after),
        "windows": [asdict(window) for window in windows],
    }


def main(arguments: list[str] | None = None) -> int:
    """Soak what the command line asks for; return 0 when it stayed as it was."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", default="runs/soak", help="folder for corpus, index, log and soak.json")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--share", type=float, default=0.8, help="of the maximum")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--calibrate", type=float, default=10.0, help="seconds for which the maximum is measured")
    parser.add_argument("--every", type=float, default=10.0, help="seconds of one line")
    parser.add_argument("--passages", type=int, default=100_000, help="of the corpus that is made up")
    parser.add_argument("--corpus", type=Path, help="queries are made of its passages (default: made up)")
    parser.add_argument("--config", type=Path, help="what to serve (default: bm25 over the corpus)")
    parser.add_argument("--server_flag", action="append", default=[], help="passed on to the server; may be repeated")
    options = parser.parse_args(arguments)
    result = run(options)
    (Path(options.output) / "soak.json").write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    memory = result["anonymous_mb"]
    sys.stdout.write(
        f"{result['queries']:,.0f} queries in {options.minutes:g} min at {result['reached_qps']:.0f}/s "
        f"(maximum {result['maximum_qps']:.0f}/s), {result['errors']} errors {result['first_error']}, "
        f"{result['skipped']} skipped\n"
        f"anonymous memory {memory['second_fifth']:.0f} -> {memory['last_fifth']:.0f} MB, peak {result['peak_mb']:.0f} "
        f"MB: {'stayed as it was' if result['stayed'] else 'NOT as it was'}\n"
    )
    return 0 if result["stayed"] else 1


if __name__ == "__main__":
    sys.exit(main())
