"""How fast is the retrieval service? Ours beside a server after the published algorithm, in one run on one machine.

    python benchmarks/retrieval.py --backend bm25 --output runs/retrieval
    python benchmarks/retrieval.py --backend dense --output runs/retrieval
    python benchmarks/retrieval.py --backend none --corpus corpus.jsonl --url theirs=http://127.0.0.1:8000/retrieve,PID
    python benchmarks/retrieval.py ready --passages 1000000 --output runs/retrieval

Everything it needs is made up and kept in ``--output`` (``--corpus``, ``--index`` and ``--model`` use real ones). Every
cell of the table (clients x queries per request) is measured on one server after the other before the next cell, so
that what else the machine does meets all of them alike. A query is never repeated, except in the cells that say so.
Processor time is that of the server's own processes; the load generator is another process. For BM25 the reference
needs Anserini and Java (``pip install 'chatr1[lucene]'`` and ``pip install --no-deps pyserini==1.6.0``).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import reference_server
import synthetic
from load_generator import Job
from measured_server import MeasuredServer, free_port, start

SIMULTANEOUS = (1, 16, 64, 256)
BATCHES = (1, 8, 64)
REPEATS = 5
"""Samples per prompt of a training step: as often is a query asked within a second."""
TARGETS = {
    ("dense", 64, 1, 1): 4.0,
    ("dense", 64, 1, REPEATS): 15.0,
    ("bm25", 64, 64, 1): 8.0,
    ("bm25", 64, 1, 1): 2.5,
}
"""(backend, clients, batch, repetitions) -> multiple of the reference's queries per second that ours has to reach."""


@dataclass(frozen=True)
class Cell:
    """One row of the table."""

    clients: int
    batch: int
    repeat: int = 1

    def __str__(self) -> str:
        again = f", each query {self.repeat} times" if self.repeat > 1 else ""
        return f"{self.clients} x {self.batch}{again}"


def say(text: str) -> None:
    """Report progress."""
    sys.stderr.write(f"retrieval: {text}\n")


# -- what is served ---------------------------------------------------------------------------------------------


def corpus_of(options: argparse.Namespace) -> Path:
    """Return the corpus that was given, or one that is made up (once)."""
    if options.corpus is not None:
        return Path(options.corpus)
    path = Path(options.output) / f"corpus-{options.passages}.jsonl"
    if not path.exists():
        synthetic.write_corpus(path, options.passages)
    return path


def build_bm25(corpus: Path, folder: Path) -> Path:
    """Build an index of ours, unless it is there; return its folder."""
    save_dir = folder / f"index-{corpus.stem}"
    arguments = ["--retrieval_method", "bm25", "--corpus_path", str(corpus), "--save_dir", str(save_dir)]
    subprocess.run([sys.executable, "-m", "retrieval_server.build_index", *arguments], check=True, cwd=ROOT)
    return save_dir


def start_ours(options: argparse.Namespace, corpus: Path, index: Path, flags: Sequence[str]) -> MeasuredServer:
    """Start our server with its defaults."""
    port = free_port()
    command = [sys.executable, "-m", "retrieval_server", "--index_path", str(index), "--corpus_path", str(corpus)]
    arguments = [*flags, "--port", str(port), "--topk", str(options.topk), *options.server_flag]
    return start("ours", [*command, *arguments], port, Path(options.output) / "ours.log", {}, ROOT)


def start_reference(options: argparse.Namespace, arguments: Sequence[str]) -> MeasuredServer:
    """Start the reference with the thread setting that suits it best on few cores."""
    port = free_port()
    command = [sys.executable, str(ROOT / "benchmarks" / "reference_server.py"), *arguments, "--port", str(port)]
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = {"OMP_NUM_THREADS": str(options.reference_threads), "PYTHONPATH": path}
    return start("reference", command, port, Path(options.output) / "reference.log", environment, ROOT)


def bm25_servers(options: argparse.Namespace, corpus: Path) -> list[MeasuredServer]:
    """Start ours over bm25s, and Lucene called once per query where it is installed."""
    folder = Path(options.output)
    index = Path(options.index) if options.index is not None else build_bm25(corpus, folder)
    check_ranking(index, corpus, options.topk)
    servers = [start_ours(options, corpus, index, ())]
    lucene = lucene_index(corpus, folder)
    if lucene is not None:
        servers.append(start_reference(options, ["--kind", "bm25", "--index", str(lucene)]))
    return servers


def lucene_index(corpus: Path, folder: Path) -> Path | None:
    """Return a Lucene index of the corpus with stored texts, or None where Anserini or Java are missing."""
    from retrieval_server.backends.lucene_java import find_setup
    from retrieval_server.errors import SettingsError

    try:
        setup = find_setup(None, None)
    except SettingsError as error:
        say(f"no reference for bm25: {error}")
        return None
    index = folder / f"lucene-{corpus.stem}"
    if not any(index.glob("segments_*")):
        source = folder / f"lucene-input-{corpus.stem}"
        source.mkdir(exist_ok=True)
        link = source / "corpus.jsonl"
        link.unlink(missing_ok=True)
        link.symlink_to(corpus.resolve())
        command = [str(setup.java_home / "bin" / "java"), "-Xmx2g", "-cp", str(setup.jar)]
        builder = ["io.anserini.index.IndexCollection", "-collection", "JsonCollection", "-input", str(source)]
        rest = ["-index", str(index), "-generator", "DefaultLuceneDocumentGenerator", "-threads", "1", "-storeRaw"]
        subprocess.run([*command, *builder, *rest], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return index


def dense_servers(options: argparse.Namespace, corpus: Path) -> list[MeasuredServer]:
    """Start ours and the reference over the same encoder and the same vectors."""
    folder = Path(options.output)
    model = Path(options.model) if options.model is not None else folder / "encoder"
    if options.model is None and not (model / "config.json").exists():
        synthetic.write_encoder(model)
    flags: list[str] = []
    if options.index is not None:
        index = Path(options.index)
    else:  # a bare FAISS file, as the published builder leaves it
        index = folder / f"{corpus.stem}-Flat.index"
        flags = ["--retriever_name", "plain", "--retriever_model", str(model)]
        if not index.exists():
            with corpus.open("rb") as lines:
                synthetic.write_flat_index(index, sum(1 for line in lines if line.strip()))
    arrow = folder / f"{corpus.stem}.arrow"
    if not arrow.exists():
        reference_server.write_arrow(corpus, arrow)
    faiss_file = index if index.is_file() else next(index.rglob("*.index"))
    arguments = ["--kind", "dense", "--index", str(faiss_file), "--corpus", str(arrow), "--model", str(model)]
    return [start_ours(options, corpus, index, flags), start_reference(options, arguments)]


SERVERS = {"bm25": bm25_servers, "dense": dense_servers}


def check_ranking(index: Path, corpus: Path, k: int, n_queries: int = 200) -> None:
    """Exit when our ranking is not that of bm25s called directly on the same index."""
    import bm25s
    import numpy as np

    from retrieval_server.analyzer import Analyzer
    from retrieval_server.backends.bm25 import Bm25Retriever
    from retrieval_server.manifest import read_manifest, resolve_index
    from retrieval_server.specs import Bm25Spec
    from retrieval_server.types import LoadProgress

    folder = resolve_index(index)
    parameters = read_manifest(folder).parameters
    analyzer = Analyzer(parameters["stopwords"], parameters["stemmer"])
    direct = bm25s.BM25.load(str(folder), mmap=True)
    ours = Bm25Retriever.load(Bm25Spec(index_path=index, corpus_path=corpus, verify="sampled"), LoadProgress())
    stream = synthetic.queries(synthetic.sample_texts(corpus), seed=99)
    for query in (next(stream) for _ in range(n_queries)):
        terms = [term for term in analyzer.terms(query) if term in direct.vocab_dict]
        expected = np.sort(direct.get_scores(terms))[::-1][:k] if terms else np.zeros(0)
        found = [hit.score for hit in ours.search([query], k)[0]]
        if not np.allclose(found, expected[expected > 0], rtol=1e-5):
            raise SystemExit(f"ranking differs from bm25s on {query!r}: {found}, expected {expected.tolist()}")
    ours.close()
    say(f"ranking of {n_queries} queries equals bm25s called directly")


# -- measuring --------------------------------------------------------------------------------------------------


def measure(server: MeasuredServer, cell: Cell, corpus: Path, options: argparse.Namespace, seed: int) -> dict[str, Any]:
    """Drive one server through one cell; return the generator's figures with the server's own cost."""
    job = Job(
        server.url, str(corpus), cell.clients, cell.batch, options.topk, options.seconds, options.drain,
        options.warmup, seed, cell.repeat,
    )  # fmt: skip
    before = server.cpu_seconds()
    command = [sys.executable, str(ROOT / "benchmarks" / "load_generator.py")]
    work = json.dumps(asdict(job)).encode()
    done = subprocess.run(command, input=work, stdout=subprocess.PIPE, check=True, start_new_session=True)
    figures: dict[str, Any] = json.loads(done.stdout)
    after = server.cpu_seconds()
    if before is not None and after is not None and figures["all_queries"]:
        figures["cpu_ms_per_query"] = 1000 * (after - before) / figures["all_queries"]
    figures["load"] = os.getloadavg()[0]
    return figures


def middle(rounds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the median of each figure over the rounds; errors add up."""
    result: dict[str, Any] = {}
    for key, first in rounds[0].items():
        values = [r[key] for r in rounds if r.get(key) is not None]
        if key in ("errors", "unanswered", "requests"):
            result[key] = sum(values)
        else:
            result[key] = first if isinstance(first, str) or not values else median(values)
    result["qps_of_rounds"] = [r["qps"] for r in rounds]
    return result


def run_cells(
    servers: Sequence[MeasuredServer], cells: Sequence[Cell], corpus: Path, options: argparse.Namespace
) -> list[dict[str, Any]]:
    """Measure every cell on every server, one after the other, ``--rounds`` times."""
    for server in servers:
        measure(server, Cell(16, 8), corpus, options, seed=-1)  # compilers and caches settle, Java's above all
    rows = []
    for number, cell in enumerate(cells):
        found: dict[str, list[dict[str, Any]]] = {server.name: [] for server in servers}
        for round_number in range(options.rounds):
            for server in servers:
                figures = measure(server, cell, corpus, options, seed=1000 * number + round_number)
                found[server.name].append(figures)
                say(f"{cell}: {server.name} {figures['qps']:.0f} queries/s, p50 {figures['p50_ms']:.0f} ms")
        rows.append({**asdict(cell), "servers": {name: middle(rounds) for name, rounds in found.items()}})
    return rows


# -- reporting --------------------------------------------------------------------------------------------------


def table(backend: str, rows: Sequence[Mapping[str, Any]], names: Sequence[str]) -> str:
    """Return the Markdown table of one backend."""
    heads = ["clients x batch"]
    for name in names:
        heads += [f"{name}: queries/s", "p50 / p95 / p99 ms", "CPU ms/query"]
    ratio = len(names) > 1
    heads += [f"{names[0]} : {names[1]}", "CPU"] if ratio else []
    lines = [f"### {backend}\n", f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for row in rows:
        found = [row["servers"][name] for name in names]
        cells = [str(Cell(row["clients"], row["batch"], row["repeat"]))]
        for figures in found:
            cells += [_qps(figures), " / ".join(_number(figures[f"p{q}_ms"]) for q in (50, 95, 99))]
            cells.append(_number(figures.get("cpu_ms_per_query"), 2))
        if ratio:
            cells += [_ratio(found, "qps"), _ratio(found[::-1], "cpu_ms_per_query")]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _qps(figures: Mapping[str, Any]) -> str:
    shown = f"{figures['qps']:,.0f}" if figures["qps"] >= 100 else f"{figures['qps']:.1f}"
    troubles = [f"{figures[key]} {key}" for key in ("errors", "unanswered") if figures[key]]
    return f"{shown} ({', '.join(troubles)})" if troubles else shown


def _number(value: float | None, digits: int = 0) -> str:
    if value is None or value != value:
        return "-"
    return f"{value:,.{digits}f}" if value >= 10 or digits else f"{value:.1f}"


def _ratio(pair: Sequence[Mapping[str, Any]], key: str) -> str:
    first, second = (figures.get(key) for figures in pair[:2])
    return f"{first / second:.1f}" if first and second else "-"


def targets(backend: str, rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return one line per target: what was to be reached and what was."""
    lines = []
    for row in rows:
        key = (backend, row["clients"], row["batch"], row["repeat"])
        ours, reference = row["servers"].get("ours"), row["servers"].get("reference")
        if ours is None or (row["clients"], row["batch"]) not in ((64, 1), (64, 64)):
            continue
        if key in TARGETS and reference is not None and reference["qps"]:
            got = ours["qps"] / reference["qps"]
            lines.append(
                f"{Cell(*key[1:])}: {got:.1f} times the reference, to reach {TARGETS[key]:g}"
                f"{_verdict(got >= TARGETS[key])}"
            )
        if key == ("dense", 64, 1, 1):
            got = ours["p99_ms"] / ours["p50_ms"]
            lines.append(f"{Cell(*key[1:])}: p99 is {got:.1f} times the median, at most 2{_verdict(got <= 2)}")
    return lines


def _verdict(reached: bool) -> str:
    return "" if reached else " **(missed)**"


def conditions(options: argparse.Namespace) -> dict[str, Any]:
    """Return what a reader needs to judge or repeat the figures."""
    models = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if "model name" in line
    ]
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return {
        "command": " ".join(["python", "benchmarks/retrieval.py", *sys.argv[1:]]),
        "commit": commit.stdout.strip() or "unknown",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpu": f"{len(os.sched_getaffinity(0))} x {models[0] if models else platform.processor()}",
        "python": platform.python_version(),
        "load_at_start": os.getloadavg()[0],
        "seconds_per_cell": options.seconds,
        "rounds": options.rounds,
        "topk": options.topk,
    }


def report(result: Mapping[str, Any]) -> str:
    """Return everything as Markdown."""
    facts = result["conditions"]
    lines = [
        f"`{facts['command']}` at commit {facts['commit']}, {facts['date']}; {facts['cpu']}, load "
        f"{facts['load_at_start']:.1f} before the start; {facts['rounds']} x {facts['seconds_per_cell']:g} s per cell, "
        f"top {facts['topk']}.\n"
    ]
    for backend, part in result["backends"].items():
        lines.append(table(backend, part["rows"], part["names"]))
        for name, figures in part["servers"].items():
            if figures:
                ready = f"ready after {figures['ready_s']:.1f} s, " if figures.get("ready_s") is not None else ""
                lines.append(f"* {name}: {ready}peak memory {figures['peak']:,.0f} MB, of which not mapped files "
                             f"{figures['anonymous']:,.0f} MB at the end")  # fmt: skip
        lines += [f"* {line}" for line in part["targets"]]
        lines.append("")
    return "\n".join(lines)


# -- programs ---------------------------------------------------------------------------------------------------


def foreign(texts: Sequence[str]) -> list[MeasuredServer]:
    """Read ``NAME=URL`` or ``NAME=URL,PID``."""
    servers = []
    for text in texts:
        name, found, rest = text.partition("=")
        url, _, pid = rest.partition(",")
        if not found or not url.startswith("http"):
            raise SystemExit(f"--url {text!r}: expected NAME=http://HOST:PORT/retrieve, or that with ,PID")
        servers.append(MeasuredServer(name, url, int(pid) if pid else None))
    return servers


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Measure what was asked for."""
    result: dict[str, Any] = {"conditions": conditions(options), "backends": {}}
    corpus = corpus_of(options)
    cells = [Cell(clients, batch) for clients in options.clients for batch in options.batches]
    cells.append(Cell(64, 1, REPEATS))
    # What a server has not answered in time it still works on in the next cell: those that may come to that are last.
    cells.sort(key=lambda cell: cell.clients * cell.batch)
    for backend in options.backend:
        own = SERVERS[backend](options, corpus) if backend in SERVERS else []
        servers = [*own, *foreign(options.url)]
        if not servers:
            raise SystemExit("nothing to measure: --backend bm25 or dense, or --url")
        try:
            rows = run_cells(servers, cells, corpus, options)
            memory = {s.name: {**s.memory(), **({"ready_s": s.ready_s} if s.pid else {})} for s in servers}
        finally:
            for server in own:
                server.stop()
        result["backends"][backend] = {
            "corpus": corpus.name,
            "names": [server.name for server in servers],
            "rows": rows,
            "servers": memory,
            "targets": targets(backend, rows),
        }
    return result


def ready(options: argparse.Namespace) -> dict[str, Any]:
    """Start our server on a large BM25 index twice, the second time from a warm disk, and ask it something."""
    corpus = corpus_of(options)
    index = build_bm25(corpus, Path(options.output))
    size = sum(path.stat().st_size for path in index.rglob("*") if path.is_file()) / 1e6
    starts = []
    for _ in range(2):
        server = start_ours(options, corpus, index, ())
        try:
            loaded = server.memory()
            figures = measure(server, Cell(16, 8), corpus, options, seed=7)
            searched = {"loaded": loaded, "searched": server.memory(), **figures}
            starts.append({"ready_s": server.ready_s, "ready_cpu_s": server.ready_cpu_s, **searched})
        finally:
            server.stop()
    return {
        "conditions": conditions(options),
        "index_mb": size,
        "corpus_mb": corpus.stat().st_size / 1e6,
        "starts": starts,
    }


def report_ready(result: Mapping[str, Any]) -> str:
    """Return the start and memory figures as Markdown."""
    facts, last = result["conditions"], result["starts"][-1]
    return (
        f"`{facts['command']}` at commit {facts['commit']}, {facts['date']}; {facts['cpu']}, load "
        f"{facts['load_at_start']:.1f}.\n\n"
        f"* index {result['index_mb']:,.0f} MB, corpus {result['corpus_mb']:,.0f} MB\n"
        f"* ready after {last['ready_s']:.1f} s from a warm disk, of which {last['ready_cpu_s']:.1f} s processor time "
        f"(first start {result['starts'][0]['ready_s']:.1f} s)\n"
        f"* memory when loaded: {last['loaded']['peak']:,.0f} MB, of which not mapped files "
        f"{last['loaded']['anonymous']:,.0f} MB; after {last['all_queries']:,.0f} queries "
        f"{last['searched']['peak']:,.0f} MB, of which {last['searched']['anonymous']:,.0f} MB\n"
        f"* {last['qps']:,.0f} queries/s with 16 clients x 8, {last.get('cpu_ms_per_query', 0):.2f} CPU ms per query\n"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print Markdown, and write it with the raw figures to the output folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=("load", "ready"), default="load")
    parser.add_argument("--backend", action="append", choices=(*SERVERS, "none"), help="default: bm25; may be repeated")
    parser.add_argument("--url", action="append", default=[], metavar="NAME=URL[,PID]", help="another running server")
    parser.add_argument("--output", type=Path, default=Path("runs/retrieval"))
    parser.add_argument("--passages", type=int, default=100_000, help="size of the made-up corpus")
    parser.add_argument("--corpus", type=Path, help="a real one; queries are made of its passages")
    parser.add_argument("--index", type=Path, help="an index of ours over --corpus, instead of building one")
    parser.add_argument("--model", type=Path, help="encoder of the dense index, instead of one with random weights")
    parser.add_argument("--clients", type=int, nargs="+", default=SIMULTANEOUS)
    parser.add_argument("--batches", type=int, nargs="+", default=BATCHES)
    parser.add_argument("--topk", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=5.0, help="per cell, server and round")
    parser.add_argument("--warmup", type=float, default=1.0)
    parser.add_argument("--drain", type=float, default=60.0, help="seconds that requests under way may take at the end")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--reference-threads", type=int, default=1, help="OMP_NUM_THREADS of the reference")
    parser.add_argument("--server-flag", action="append", default=[], help="passed on to our server")
    options = parser.parse_args(arguments)
    options.backend = options.backend or ["bm25"]
    options.output.mkdir(parents=True, exist_ok=True)
    measured, shown = (ready, report_ready) if options.what == "ready" else (run, report)
    result = measured(options)
    name = f"{options.what}-{'-'.join(options.backend)}"
    (options.output / f"{name}.json").write_text(json.dumps(result, indent=1), encoding="utf-8")
    text = shown(result)
    (options.output / f"{name}.md").write_text(text, encoding="utf-8")
    sys.stdout.write(text)


if __name__ == "__main__":
    main()
