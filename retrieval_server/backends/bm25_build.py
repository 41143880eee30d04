"""Builds a BM25 index: one pass over the corpus, bm25s for the scores.

Simplified: term ids of the whole corpus are held in memory (about 10 GB for 10 million passages of 100 words).
"""

from __future__ import annotations

import logging
import time
from pathlib import Path

import numpy as np

from retrieval_server.analyzer import Analyzer
from retrieval_server.backends.bm25 import KIND, STARTS, Bm25Retriever
from retrieval_server.building import BuildPlan, Written, build_index
from retrieval_server.corpus import CorpusReader
from retrieval_server.errors import CorpusError, SettingsError
from retrieval_server.manifest import PASSAGES_NAME, Manifest, identify
from retrieval_server.progress import Progress
from retrieval_server.types import LoadProgress

logger = logging.getLogger(__name__)


def build(plan: BuildPlan) -> Manifest:
    """Build ``<save_dir>/bm25`` and return its manifest; see ``building.build_index``.

    Raises CorpusError (naming file and line), SettingsError or IndexFolderError.
    """
    if plan.k1 < 0 or not 0 <= plan.b <= 1:
        raise SettingsError(f"k1 {plan.k1}, b {plan.b}: k1 must be at least 0 and b between 0 and 1")
    analyzer = Analyzer(plan.stopwords, plan.stemmer)
    parameters = {
        "method": "lucene",
        "k1": plan.k1,
        "b": plan.b,
        "stopwords": plan.stopwords,
        "stemmer": plan.stemmer,
        "analyzer_fingerprint": analyzer.fingerprint(),
    }

    def check(folder: Path) -> None:
        # Also fills the kernel's compile cache.
        Bm25Retriever.load(folder, plan.corpus_path, LoadProgress(), "full").close()

    return build_index(plan, KIND, parameters, lambda folder: _write(plan, folder, analyzer), check)


def _write(plan: BuildPlan, folder: Path, analyzer: Analyzer) -> Written:
    import bm25s

    logging.getLogger("bm25s").setLevel(logging.WARNING)
    started = time.monotonic()
    reader = CorpusReader(plan.corpus_path, folder / PASSAGES_NAME)
    vocabulary, term_ids, starts = _analyze(reader, analyzer)
    index = bm25s.BM25(k1=plan.k1, b=plan.b, method="lucene", backend="numpy")
    index.index((term_ids, vocabulary), create_empty_token=False, show_progress=False)
    index.save(folder, show_progress=False)
    np.save(folder / STARTS, np.asarray(starts, np.int64))
    logger.info("indexed %s passages in %.1f s", f"{len(starts):,}", time.monotonic() - started)
    return Written(
        corpus=identify(reader),
        statistics={
            "terms": len(vocabulary),
            "postings": int(index.scores["indptr"][-1]),
            "mean_passage_terms": round(sum(map(len, term_ids)) / len(term_ids), 3),
        },
        libraries=("numpy", "bm25s", "PyStemmer"),
    )


def _analyze(reader: CorpusReader, analyzer: Analyzer) -> tuple[dict[str, int], list[list[int]], list[int]]:
    """Return (term -> id in order of first occurrence, term ids [N][terms], offsets in bytes [N])."""
    vocabulary: dict[str, int] = {}
    term_ids: list[list[int]] = []
    starts: list[int] = []
    progress = Progress("reading the corpus")
    for line in reader:
        starts.append(line.start)
        terms = analyzer.terms(line.document.contents)
        term_ids.append([vocabulary.setdefault(term, len(vocabulary)) for term in terms])
        progress.update(reader.fraction, f"{len(starts):,} passages")
    if not starts:
        raise CorpusError(f"corpus {reader.path} has no passage")
    if not vocabulary:
        raise CorpusError(f"corpus {reader.path}: no passage has a term left after analysis (words of 2+ characters)")
    return vocabulary, term_ids, starts
