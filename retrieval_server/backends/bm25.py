"""BM25 search over arrays in bm25s's format: memory-mapped, JVM-free, deterministic."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from retrieval_server.analyzer import Analyzer, stemmer_version
from retrieval_server.backends.bm25_vocabulary import Vocabulary
from retrieval_server.corpus import PassageStore
from retrieval_server.errors import IndexFolderError
from retrieval_server.manifest import Manifest, check_files, read_manifest, resolve_index, served_corpus
from retrieval_server.specs import Bm25Spec
from retrieval_server.types import Hit, LoadProgress

KIND = "bm25"
MAX_QUERY_TERMS = 1024
"""Only the last terms of a longer query count. The last: in a pasted conversation the question stands at the end."""

# bm25s's own file names, so that the folder also opens with bm25s.BM25.load.
VALUES, POSTINGS, INDPTR = "data.csc.index.npy", "indices.csc.index.npy", "indptr.csc.index.npy"
VOCABULARY, PARAMS = "vocab.index.json", "params.index.json"
# Ours: where in the corpus each passage begins, where in the vocabulary each term; the largest value of each term.
STARTS, TERM_STARTS, LARGEST = "starts.npy", "vocab.starts.npy", "largest.npy"
_CHECKED_AT_ONCE = 1 << 20
_MOST_PARALLEL = 4
"""Searches at a time: each has two arrays of four bytes per passage."""


class Bm25Retriever:
    """Implements ``types.Retriever``. Among equal scores the passage that comes first in the corpus ranks first."""

    name = KIND

    def __init__(
        self,
        values: npt.NDArray[np.float32],
        postings: npt.NDArray[np.int32],
        indptr: npt.NDArray[Any],
        largest: npt.NDArray[np.float32],
        vocabulary: Vocabulary,
        analyzer: Analyzer,
        passages: PassageStore,
        manifest: Manifest,
    ) -> None:
        """``values`` and ``postings`` [postings], ``indptr`` [V + 1], ``largest`` [V]; see ``load``."""
        from retrieval_server.backends import bm25_kernel  # numba takes half a second: not at import

        self._kernel = bm25_kernel
        self._values, self._postings, self._indptr, self._largest = values, postings, indptr, largest
        self._vocabulary, self._analyzer, self._passages = vocabulary, analyzer, passages
        self._manifest = manifest
        # Queries repeat a few thousand words.
        self._number = lru_cache(maxsize=1 << 16)(self._number_of)
        # Two even on one core: while one search waits for the interpreter the other one is in the kernel.
        self.parallel = max(2, min(_MOST_PARALLEL, len(os.sched_getaffinity(0))))
        self._scratch = threading.local()
        self._lock = threading.Lock()  # the stemmer serves one search at a time
        bm25_kernel.warm_up(values, postings, indptr, largest)

    @classmethod
    def load(cls, spec: Bm25Spec, progress: LoadProgress) -> Bm25Retriever:
        """Open an index and its corpus, checking both against the manifest; see ``manifest.served_corpus``.

        Raises IndexFolderError or CorpusError, with both values, for an index or a corpus that is truncated, damaged,
        foreign or of another pair.
        """
        folder = resolve_index(spec.index_path)
        manifest = read_manifest(folder)
        if manifest.kind != KIND:
            raise IndexFolderError(f"{folder} is an index of kind {manifest.kind!r}, the retriever is {KIND!r}")
        total = manifest.corpus.bytes + sum(identity.bytes for identity in manifest.files.values())
        hashed = 0

        def count(n_bytes: int) -> None:
            nonlocal hashed
            hashed += n_bytes
            progress.update("checking index and corpus", 0.7 * hashed / total)

        progress.update("checking index and corpus", 0.0)
        check_files(folder, manifest, spec.verify, count)
        passages_path = served_corpus(folder, manifest, spec.corpus_path, spec.verify, count)
        progress.update("checking that the arrays fit each other", 0.7)
        values, postings, indptr, starts, term_starts, largest = (
            np.asarray(_load_array(folder / name)) for name in (VALUES, POSTINGS, INDPTR, STARTS, TERM_STARTS, LARGEST)
        )
        _check_arrays(folder, manifest, values, postings, indptr, starts, term_starts, largest)
        vocabulary = Vocabulary(folder / VOCABULARY, term_starts)
        analyzer = _matching_analyzer(folder, manifest)
        progress.update("compiling the search kernel", 0.8)
        passages = PassageStore(passages_path, starts)
        retriever = cls(values, postings, indptr, largest, vocabulary, analyzer, passages, manifest)
        progress.update("ready", 1.0)
        return retriever

    @property
    def size(self) -> int:
        """Number of passages."""
        return len(self._passages)

    def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        """Return the passages that share a term with each query, best first, at most k; see the protocol."""
        if not queries:
            return []
        k = min(k, self.size)
        with self._lock:
            ids = [self._term_ids(query) for query in queries]
        rows = np.empty((len(ids), k), np.int32)
        scores = np.empty((len(ids), k), np.float32)
        counts = np.empty(len(ids), np.int64)
        pointers = np.cumsum([0, *map(len, ids)], dtype=np.int64)
        terms = np.fromiter(chain.from_iterable(ids), np.int64, int(pointers[-1]))
        totals, touched = self._scratch_arrays()
        self._kernel.search_batch(
            terms, pointers, self._values, self._postings, self._indptr, self._largest, totals, touched,
            rows, scores, counts,
        )  # fmt: skip
        return [
            [Hit(self._passages[row], score) for row, score in zip(row_list[:n], score_list[:n], strict=True)]
            for row_list, score_list, n in zip(rows.tolist(), scores.tolist(), counts.tolist(), strict=True)
        ]

    def _scratch_arrays(self) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int32]]:
        """Return this thread's two arrays [N] for the kernel."""
        if not hasattr(self._scratch, "arrays"):
            self._scratch.arrays = np.zeros(self.size, np.float32), np.zeros(self.size, np.int32)
        arrays: tuple[npt.NDArray[np.float32], npt.NDArray[np.int32]] = self._scratch.arrays
        return arrays

    def _term_ids(self, query: str) -> list[int]:
        number_of = self._number
        known = [number for word in self._analyzer.words(query) if (number := number_of(word)) is not None]
        return known[-MAX_QUERY_TERMS:]

    def _number_of(self, word: str) -> int | None:
        """Return the number of a word's term; None for a stop word, or a term of no passage."""
        term = self._analyzer.term(word)
        return None if term is None else self._vocabulary.number(term)

    def info(self) -> dict[str, Any]:
        """Return the manifest and, again at the top, the identity of the corpus."""
        manifest = self._manifest.model_dump(mode="json")
        return {"corpus": manifest["corpus"], "manifest": manifest}

    def close(self) -> None:
        """Unmap the corpus and the vocabulary."""
        self._number.cache_clear()
        self._passages.close()
        self._vocabulary.close()


def _load_array(path: Path) -> npt.NDArray[Any]:
    try:
        array: npt.NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError) as error:
        raise IndexFolderError(f"{path} cannot be read as an array ({error}); rebuild the index") from None
    return array


def _check_arrays(
    folder: Path,
    manifest: Manifest,
    values: npt.NDArray[Any],
    postings: npt.NDArray[Any],
    indptr: npt.NDArray[Any],
    starts: npt.NDArray[Any],
    term_starts: npt.NDArray[Any],
    largest: npt.NDArray[Any],
) -> None:
    """Refuse arrays that do not fit each other: the compiled kernel trusts them and would read outside of them."""
    n_passages = manifest.corpus.passages
    facts = [
        ("dtype of the values", str(values.dtype), "float32"),
        ("dtype of the postings", str(postings.dtype), "int32"),
        ("dtype of the largest values", str(largest.dtype), "float32"),
        ("largest values", len(largest), len(term_starts)),
        ("passages", len(starts), n_passages),
        ("postings", len(postings), len(values)),
        ("terms", len(indptr) - 1, len(term_starts)),
        ("end of the last term", int(indptr[-1]) if len(indptr) else 0, len(values)),
        ("start of the first term", int(indptr[0]) if len(indptr) else 0, 0),
        ("terms that end before they start", int((np.diff(indptr) < 0).sum()), 0),
        ("postings outside of the corpus", _count_outside(postings, n_passages), 0),
    ]
    for what, found, expected in facts:
        if found != expected:
            raise IndexFolderError(f"{folder} is inconsistent: {what} {found}, expected {expected}; rebuild the index")


def _count_outside(postings: npt.NDArray[Any], n_passages: int) -> int:
    """Return how many entries are not in [0, N), a piece at a time: a mask of all would be memory for nothing."""
    pieces = (postings[start : start + _CHECKED_AT_ONCE] for start in range(0, len(postings), _CHECKED_AT_ONCE))
    # As unsigned numbers the negative ones are the largest.
    return sum(int(np.count_nonzero(piece.view(np.uint32) >= n_passages)) for piece in pieces)


def _matching_analyzer(folder: Path, manifest: Manifest) -> Analyzer:
    parameters = manifest.parameters
    try:
        analyzer = Analyzer(parameters["stopwords"], parameters["stemmer"])
        expected = parameters["analyzer_fingerprint"]
    except KeyError as error:
        raise IndexFolderError(f"{folder}: the manifest's parameters have no {error}; rebuild the index") from None
    found = analyzer.fingerprint()
    if found != expected:
        raise IndexFolderError(
            f"{folder} was built with an analyzer that behaves differently: fingerprint {expected} (PyStemmer "
            f"{manifest.versions.get('PyStemmer')}), here {found} (PyStemmer {stemmer_version()}); rebuild the index"
        )
    return analyzer
