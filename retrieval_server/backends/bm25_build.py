"""Builds a BM25 index: passages to blocks on disk (``bm25_analysis``), blocks to bm25s's arrays (``bm25_merge``).

Memory does not grow with the corpus, but for about 30 bytes per distinct term and 8 per passage.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from retrieval_server.analyzer import Analyzer
from retrieval_server.backends.bm25 import (
    INDPTR,
    KIND,
    LARGEST,
    PARAMS,
    POSTINGS,
    STARTS,
    TERM_STARTS,
    VALUES,
    VOCABULARY,
    Bm25Retriever,
)
from retrieval_server.backends.bm25_analysis import analyze
from retrieval_server.backends.bm25_blocks import Block
from retrieval_server.backends.bm25_merge import (
    ArrayWriter,
    PostingFiles,
    Scoring,
    document_frequencies,
    merge_vocabularies,
    write_postings,
)
from retrieval_server.building import WORK, BuildPlan, Written, build_index
from retrieval_server.corpus import CorpusReader
from retrieval_server.errors import CorpusError, SettingsError
from retrieval_server.manifest import PASSAGES_NAME, Manifest, identify
from retrieval_server.progress import Progress
from retrieval_server.specs import Bm25Spec
from retrieval_server.types import LoadProgress

LAYOUT = 3
"""Of the files in the folder: an index with another layout is built again."""
POSTINGS_AT_ONCE = 1 << 23
"""Scored together, in some 200 MB of memory."""
_MAX_PASSAGES = 2**31 - 1


def build(plan: BuildPlan) -> Manifest:
    """Build ``<save_dir>/bm25`` and return its manifest; see ``building.build_index``.

    Raises CorpusError (naming file and line), SettingsError or IndexFolderError.
    """
    if plan.k1 < 0 or not 0 <= plan.b <= 1:
        raise SettingsError(f"k1 {plan.k1}, b {plan.b}: k1 must be at least 0 and b between 0 and 1")
    parameters = {
        "method": "lucene",
        "k1": plan.k1,
        "b": plan.b,
        "stopwords": plan.stopwords,
        "stemmer": plan.stemmer,
        "analyzer_fingerprint": Analyzer(plan.stopwords, plan.stemmer).fingerprint(),
        "layout": LAYOUT,
    }

    def check(folder: Path) -> None:
        # Also fills the kernel's compile cache.
        spec = Bm25Spec(index_path=folder, corpus_path=plan.corpus_path, verify="full")
        Bm25Retriever.load(spec, LoadProgress()).close()

    return build_index(plan, KIND, parameters, partial(_write, plan), check)


def _write(plan: BuildPlan, folder: Path) -> Written:
    reader, blocks = analyze(
        partial(CorpusReader, plan.corpus_path, folder / PASSAGES_NAME),
        partial(Analyzer, plan.stopwords, plan.stemmer),
        folder / WORK,
        plan.workers,
    )
    if not blocks:
        raise CorpusError(f"corpus {reader.path} has no passage")
    if reader.passages > _MAX_PASSAGES:
        raise CorpusError(f"corpus {reader.path} has {reader.passages} passages; one index holds {_MAX_PASSAGES}")
    statistics = write_index(plan, folder, blocks)
    return Written(corpus=identify(reader), statistics=statistics, libraries=("numpy", "bm25s", "PyStemmer"))


def write_index(plan: BuildPlan, folder: Path, blocks: Sequence[Block]) -> dict[str, Any]:
    """Write the files of the index from all blocks of its corpus; return its statistics. Raises CorpusError."""
    progress = Progress("merging the vocabulary")
    n_terms = merge_vocabularies(blocks, folder / VOCABULARY, folder / TERM_STARTS)
    if not n_terms:
        raise CorpusError(
            f"corpus {plan.corpus_path}: no passage has a term left after analysis (words of 2+ characters)"
        )
    progress.done(f"{n_terms:,} terms")
    progress = Progress("scoring")
    indptr = np.concatenate([np.zeros(1, np.int64), np.cumsum(document_frequencies(blocks, n_terms))])
    np.save(folder / INDPTR, indptr)
    with ArrayWriter(folder / STARTS, np.int64) as starts:
        for block in blocks:
            starts.append(block.array("starts"))
    n_passages, occurrences = starts.length, sum(int(block.array("lengths").sum(dtype=np.int64)) for block in blocks)
    scoring = Scoring(plan.k1, plan.b, n_passages, occurrences / n_passages)
    files = PostingFiles(folder / VALUES, folder / POSTINGS, folder / LARGEST)
    write_postings(blocks, indptr, scoring, files, POSTINGS_AT_ONCE, progress.update)
    (folder / PARAMS).write_text(json.dumps(_params(plan, n_passages), indent=4), encoding="utf-8")
    progress.done(f"{int(indptr[-1]):,} postings")
    return {
        "terms": n_terms,
        "postings": int(indptr[-1]),
        "mean_passage_terms": round(occurrences / n_passages, 3),
    }


def _params(plan: BuildPlan, n_passages: int) -> dict[str, Any]:
    """Return what bm25s keeps beside the arrays, so that it opens the folder too."""
    return {
        "k1": plan.k1,
        "b": plan.b,
        "delta": 0.5,
        "method": "lucene",
        "idf_method": "lucene",
        "dtype": "float32",
        "int_dtype": "int32",
        "num_docs": n_passages,
        "version": metadata.version("bm25s"),
        "backend": "numpy",
    }
