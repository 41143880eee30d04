"""Estimates what a BM25 index will take, by indexing the beginning of the corpus in a temporary folder."""

from __future__ import annotations

import math
import tempfile
import time
from pathlib import Path

from retrieval_server.analyzer import Analyzer
from retrieval_server.backends.bm25 import INDPTR, LARGEST, TERM_STARTS, VOCABULARY
from retrieval_server.backends.bm25_analysis import BLOCK_BYTES, choose_workers
from retrieval_server.backends.bm25_blocks import Block, write_block
from retrieval_server.backends.bm25_build import POSTINGS_AT_ONCE, write_index
from retrieval_server.building import BuildPlan
from retrieval_server.planning import Estimate, Sample, sample

_SAMPLED = 20_000
_RECALL = "exact: every passage that shares a term with the query is scored"

# Measured in building a million passages (docs/retrieval.md): what a process holds at the least, per byte of corpus in
# a block, per posting scored together, per term; and a server's own.
_PROCESS = 80 << 20
_PER_BLOCK_BYTE = 14
_PER_POSTING = 40
_PER_TERM = 32
_SERVER = 200 << 20


def estimate(plan: BuildPlan, passages: int | None) -> Estimate:
    """Return what building this index would take; raises CorpusError or SettingsError."""
    found = sample(plan.corpus_path, _SAMPLED)
    n = passages or found.passages
    with tempfile.TemporaryDirectory(prefix="bm25-plan-") as folder:
        return _extrapolate(plan, found, n, Path(folder))


def _extrapolate(plan: BuildPlan, found: Sample, n: int, folder: Path) -> Estimate:
    analyzer = Analyzer(plan.stopwords, plan.stemmer)
    lines, half = found.lines, len(found.lines) // 2
    blocks = [Block(folder / "0"), Block(folder / "1")]
    started = time.process_time()
    write_block(lines[:half], analyzer, blocks[0])
    write_block(lines[half:], analyzer, blocks[1])
    analysis = (time.process_time() - started) / len(lines)
    work_bytes = sum(path.stat().st_size for path in folder.iterdir()) / len(lines)
    index = folder / "index"
    index.mkdir()
    started = time.process_time()
    statistics = write_index(plan, index, blocks)
    writing = (time.process_time() - started) / len(lines)
    terms = _grown(len(blocks[0].array("pointers")) - 1, statistics["terms"], len(lines), n)
    postings = n * statistics["postings"] / len(lines)
    vocabulary_bytes = sum((index / name).stat().st_size for name in (VOCABULARY, TERM_STARTS, INDPTR, LARGEST))
    index_bytes = round(8 * postings + 8 * n + terms * vocabulary_bytes / statistics["terms"])
    workers = choose_workers(plan.workers, found.passages * found.line_bytes)
    reading = _PROCESS + BLOCK_BYTES * _PER_BLOCK_BYTE * workers + (_PROCESS * workers if workers > 1 else 0)
    scoring = _PROCESS + _PER_POSTING * min(POSTINGS_AT_ONCE, postings) + _PER_TERM * terms
    return Estimate(
        passages=n,
        measured_on=found.described(),
        index_bytes=index_bytes,
        copy_bytes=round(found.line_bytes * n) if found.needs_copy else 0,
        work_bytes=round(work_bytes * n),
        build_memory=round(max(reading, scoring)),
        serve_memory=index_bytes + _SERVER,
        seconds=n * (analysis / workers + writing),
        recall=_RECALL,
    )


def _grown(terms_of_half: int, terms: int, sampled: int, n: int) -> float:
    """Return the number of distinct terms of n passages: it grows with a power of n (Heaps' law)."""
    exponent = math.log2(max(terms, 1) / max(terms_of_half, 1)) if sampled > 1 else 0.0
    return float(terms * (n / sampled) ** min(1.0, exponent))
