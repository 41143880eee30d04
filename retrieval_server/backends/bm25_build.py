"""Builds a BM25 index: one pass over the corpus, bm25s for the scores, a manifest, and one rename at the end.

Simplified: term ids of the whole corpus are held in memory (about 10 GB for 10 million passages of 100 words).
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import platform
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from retrieval_server.analyzer import Analyzer, stemmer_version
from retrieval_server.backends import BuildPlan
from retrieval_server.backends.bm25 import KIND, STARTS, Bm25Retriever
from retrieval_server.corpus import CorpusReader, file_sha256, open_corpus, sampled_sha256
from retrieval_server.errors import CorpusError, IndexFolderError, RetrievalServerError, SettingsError
from retrieval_server.manifest import (
    FORMAT,
    FORMAT_VERSION,
    MANIFEST_NAME,
    CorpusIdentity,
    FileIdentity,
    Manifest,
    check_corpus,
    check_files,
    read_manifest,
    write_manifest,
)
from retrieval_server.types import LoadProgress

logger = logging.getLogger(__name__)

_REPORT_EVERY_S = 5.0


def build(plan: BuildPlan) -> Manifest:
    """Build ``<save_dir>/bm25`` and return its manifest.

    The folder appears complete or not at all; an older index there is replaced only then. When it already holds this
    corpus with these parameters, nothing is done. Raises CorpusError (naming file and line), SettingsError or
    IndexFolderError.
    """
    if plan.k1 < 0 or not 0 <= plan.b <= 1:
        raise SettingsError(f"k1 {plan.k1}, b {plan.b}: k1 must be at least 0 and b between 0 and 1")
    analyzer = Analyzer(plan.stopwords, plan.stemmer)
    open_corpus(plan.corpus_path).close()  # a wrong path should not leave an empty folder behind
    parameters = {
        "method": "lucene",
        "k1": plan.k1,
        "b": plan.b,
        "stopwords": plan.stopwords,
        "stemmer": plan.stemmer,
        "analyzer_fingerprint": analyzer.fingerprint(),
    }
    target = plan.save_dir / KIND
    try:
        plan.save_dir.mkdir(parents=True, exist_ok=True)
        with _exclusive(plan.save_dir):
            if not plan.force and (existing := _same_index(target, plan.corpus_path, parameters)) is not None:
                logger.info("%s already holds this index; --force builds it again", target)
                return existing
            return _build_and_swap(plan, target, analyzer, parameters)
    except OSError as error:
        raise IndexFolderError(f"{target} cannot be written: {_reason(error, target)}") from error


def _reason(error: OSError, folder: Path) -> str:
    """Return the error in words, with the free space when that may be the reason (numpy's own has no errno)."""
    if error.errno not in (None, errno.ENOSPC, errno.EDQUOT):
        return f"{error.strerror} ({error.filename})"
    existing = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    return f"{error.strerror or error} ({shutil.disk_usage(existing).free / 1e6:.1f} MB free on that disk)"


@contextmanager
def _exclusive(folder: Path) -> Iterator[None]:
    """Hold the folder's lock, which the kernel drops with the process, however it ends."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise IndexFolderError(f"another process is building an index in {folder}; wait for it") from None
        yield
    finally:
        os.close(descriptor)


def _same_index(target: Path, corpus_path: Path, parameters: dict[str, Any]) -> Manifest | None:
    """Return the manifest of an intact index of this corpus with these parameters, or None."""
    if not (target / MANIFEST_NAME).is_file():
        return None
    try:
        manifest = read_manifest(target)
        if manifest.kind != KIND or manifest.parameters != parameters:
            return None
        check_corpus(corpus_path, manifest.corpus, "full", lambda _: None)
        check_files(target, manifest, "full", lambda _: None)
    except RetrievalServerError as error:
        logger.info("building again: %s", error)
        return None
    return manifest


def _build_and_swap(plan: BuildPlan, target: Path, analyzer: Analyzer, parameters: dict[str, Any]) -> Manifest:
    partial = plan.save_dir / f".{KIND}.partial"
    replaced = plan.save_dir / f".{KIND}.replaced"
    if target.exists() and not target.is_dir():
        raise IndexFolderError(f"{target} is a file; move it away")
    for leftover in (partial, replaced):  # of a build that was killed: we hold the lock, so nobody uses them
        shutil.rmtree(leftover, ignore_errors=True)
    partial.mkdir()
    try:
        manifest = _write_index(plan, partial, analyzer, parameters)
        # Through the server's own checks before anybody sees it; also fills the kernel's compile cache.
        Bm25Retriever.load(partial, plan.corpus_path, LoadProgress(), "full").close()
        if target.exists():
            target.rename(replaced)
        partial.rename(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        shutil.rmtree(replaced, ignore_errors=True)
    return manifest


def _write_index(plan: BuildPlan, folder: Path, analyzer: Analyzer, parameters: dict[str, Any]) -> Manifest:
    import bm25s

    logging.getLogger("bm25s").setLevel(logging.WARNING)
    started = time.monotonic()
    reader = CorpusReader(plan.corpus_path)
    vocabulary, term_ids, starts = _analyze(reader, analyzer)
    index = bm25s.BM25(k1=plan.k1, b=plan.b, method="lucene", backend="numpy")
    index.index((term_ids, vocabulary), create_empty_token=False, show_progress=False)
    index.save(folder, show_progress=False)
    np.save(folder / STARTS, np.asarray(starts, np.int64))
    sampled = sampled_sha256(plan.corpus_path)
    if plan.corpus_path.stat().st_size != reader.size:
        raise CorpusError(f"corpus {plan.corpus_path} changed while it was read; build again")
    manifest = Manifest(
        format=FORMAT,
        format_version=FORMAT_VERSION,
        kind=KIND,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        corpus=CorpusIdentity(
            file=plan.corpus_path.name,
            passages=len(starts),
            bytes=reader.size,
            sha256=reader.sha256,
            sampled_sha256=sampled,
        ),
        parameters=parameters,
        statistics={
            "terms": len(vocabulary),
            "postings": int(index.scores["indptr"][-1]),
            "mean_passage_terms": round(sum(map(len, term_ids)) / len(term_ids), 3),
        },
        files={
            path.name: FileIdentity(bytes=path.stat().st_size, sha256=file_sha256(path))
            for path in sorted(folder.iterdir())
        },
        versions={
            "python": platform.python_version(),
            "numpy": np.__version__,
            "bm25s": metadata.version("bm25s"),
            "PyStemmer": stemmer_version(),
        },
    )
    write_manifest(folder, manifest)
    logger.info("indexed %s passages in %.1f s", f"{len(starts):,}", time.monotonic() - started)
    return manifest


def _analyze(reader: CorpusReader, analyzer: Analyzer) -> tuple[dict[str, int], list[list[int]], list[int]]:
    """Return (term -> id in order of first occurrence, term ids [N][terms], offsets in bytes [N])."""
    total = reader.path.stat().st_size
    vocabulary: dict[str, int] = {}
    term_ids: list[list[int]] = []
    starts: list[int] = []
    started = reported = time.monotonic()
    for line in reader:
        starts.append(line.start)
        terms = analyzer.terms(line.document.contents)
        term_ids.append([vocabulary.setdefault(term, len(vocabulary)) for term in terms])
        now = time.monotonic()
        if now - reported >= _REPORT_EVERY_S:
            reported = now
            left = (now - started) * (total - reader.size) / reader.size
            logger.info("%s passages, %.0f %%, about %.0f s left", f"{len(starts):,}", 100 * reader.size / total, left)
    if not starts:
        raise CorpusError(f"corpus {reader.path} has no passage")
    if not vocabulary:
        raise CorpusError(f"corpus {reader.path}: no passage has a term left after analysis (words of 2+ characters)")
    return vocabulary, term_ids, starts
