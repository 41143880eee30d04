"""Turns a corpus into blocks on disk, in one process or several, and goes on where an earlier run was interrupted."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from pathlib import Path

from retrieval_server.analyzer import Analyzer
from retrieval_server.backends.bm25_blocks import Block, write_block
from retrieval_server.building import write_durably
from retrieval_server.corpus import CorpusReader, RawLine, refuse_repeated_ids
from retrieval_server.errors import SettingsError
from retrieval_server.progress import Progress
from retrieval_server.unique_ids import IdRegister

logger = logging.getLogger(__name__)

BLOCK_BYTES = 16 << 20
"""Of JSON lines that are indexed together, in some 150 MB of memory."""
_AUTO_WORKERS = 8
_WORTH_WORKERS_BYTES = 256 << 20
"""Of a corpus as stored: below, several processes take longer to start than they save."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What is on record about a complete block: how far into the corpus it reaches."""

    passages: int
    size: int
    """Bytes of JSON lines from the beginning."""
    sha256: str
    """Of those bytes."""


@dataclass(frozen=True, slots=True)
class _Job:
    block: Block
    checkpoint: Checkpoint
    fraction: float


def analyze(
    reader_of: Callable[[int], CorpusReader], make_analyzer: Callable[[], Analyzer], work: Path, workers: int
) -> tuple[CorpusReader, list[Block]]:
    """Turn a corpus into blocks under ``work``; return its reader, at the end, and the blocks in order.

    ``reader_of(n)`` opens the corpus, keeping n bytes of the copy. Blocks of an interrupted run are taken over after
    the bytes that they were made from were compared with those of now. ``workers``: processes, 0 chooses.
    Raises CorpusError naming file and line, and SettingsError when a process was killed.
    """
    done = _completed(work)
    reader = reader_of(done[-1].size if done else 0)
    chunks = _chunks(reader)
    compared = Progress("comparing with the interrupted building")
    for checkpoint in done:
        next(chunks, None)
        if (reader.size, reader.sha256) != (checkpoint.size, checkpoint.sha256):
            logger.info("the corpus is not what the interrupted building had read: starting over")
            _record(work, 0).unlink()
            return analyze(reader_of, make_analyzer, work, workers)
        compared.update(reader.fraction, f"{reader.passages:,} passages")
    blocks = [_block(work, number) for number in range(len(done))]
    progress = Progress("reading the corpus", reader.fraction)
    ids = IdRegister()
    workers = choose_workers(workers, sum(file.bytes for file in reader.files))
    for job in _processed(_jobs(chunks, reader, work, len(done)), make_analyzer, workers):
        reader.flush()
        write_durably(_record(work, len(blocks)), json.dumps(asdict(job.checkpoint)).encode())
        blocks.append(job.block)
        progress.update(job.fraction, f"{job.checkpoint.passages:,} passages")
        if ids.due(job.checkpoint.passages):
            refuse_repeated_ids(reader.path, [block.array("hashes") for block in blocks])
    refuse_repeated_ids(reader.path, [block.array("hashes") for block in blocks])
    progress.done(f"{reader.passages:,} passages")
    return reader, blocks


def choose_workers(asked: int, corpus_bytes: float) -> int:
    """Return how many processes to use: as many as asked for, or for 0 what the processors and the corpus are worth."""
    if asked:
        return asked
    return min(_AUTO_WORKERS, len(os.sched_getaffinity(0))) if corpus_bytes >= _WORTH_WORKERS_BYTES else 1


def _block(work: Path, number: int) -> Block:
    return Block(work / f"{number:06d}")


def _record(work: Path, number: int) -> Path:
    return _block(work, number).path("json")


def _completed(work: Path) -> list[Checkpoint]:
    """Return the records of the complete blocks, from the first to the last that has no gap before it."""
    found: list[Checkpoint] = []
    while (record := _record(work, len(found))).exists():
        found.append(Checkpoint(**json.loads(record.read_text())))
    return found


def _chunks(reader: CorpusReader) -> Iterator[list[RawLine]]:
    """Yield the lines of one block after the other; where a block ends depends on the corpus alone.

    When a chunk is yielded, the reader has read to its end and no further.
    """
    chunk: list[RawLine] = []
    n_bytes = 0
    for line in reader.raw_lines():
        chunk.append(line)
        n_bytes += len(line.data)
        if n_bytes >= BLOCK_BYTES:
            yield chunk
            chunk, n_bytes = [], 0
    if chunk:
        yield chunk


def _jobs(
    chunks: Iterator[list[RawLine]], reader: CorpusReader, work: Path, number: int
) -> Iterator[tuple[_Job, list[RawLine]]]:
    for lines in chunks:
        checkpoint = Checkpoint(reader.passages, reader.size, reader.sha256)
        yield _Job(_block(work, number), checkpoint, reader.fraction), lines
        number += 1


def _processed(
    jobs: Iterator[tuple[_Job, list[RawLine]]], make_analyzer: Callable[[], Analyzer], workers: int
) -> Iterator[_Job]:
    """Do the jobs and yield each when it and all before it are done."""
    if workers == 1:
        analyzer = make_analyzer()
        for job, lines in jobs:
            write_block(lines, analyzer, job.block)
            yield job
        return
    context = multiprocessing.get_context("spawn")  # a fork would copy whatever threads the caller has
    with ProcessPoolExecutor(workers, context, _start_worker, (make_analyzer,)) as pool:
        waiting: deque[tuple[_Job, Future[None]]] = deque()
        try:
            for job, lines in jobs:
                waiting.append((job, pool.submit(_work, lines, job.block)))
                if len(waiting) > workers + 1:
                    yield _finished(*waiting.popleft())
            while waiting:
                yield _finished(*waiting.popleft())
        finally:
            for _, future in waiting:
                future.cancel()


def _finished(job: _Job, future: Future[None]) -> _Job:
    try:
        future.result()
    except BrokenProcessPool:
        raise SettingsError(
            "a worker process was killed, probably for want of memory: run again with fewer --workers; it goes on from "
            "here"
        ) from None
    return job


_analyzer: Analyzer


def _start_worker(make_analyzer: Callable[[], Analyzer]) -> None:
    global _analyzer
    _analyzer = make_analyzer()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent stops us
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """End when the parent does: a worker of a parent that was killed would wait for its next job for ever."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _work(lines: Sequence[RawLine], block: Block) -> None:
    write_block(lines, _analyzer, block)
