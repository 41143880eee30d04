"""The inner loop of BM25 search, compiled by numba over the memory-mapped arrays that bm25s builds.

bm25s has a compiled search of its own. This one reads the same arrays and gives the same scores, and differs where a
server needs it: it is compiled once per machine and then loaded from numba's cache (bm25s compiles for seconds in
every process), visits the postings of the query instead of a score for all N passages, has a defined order among
equal scores, returns nothing for passages that do not match, and accepts a query without terms anywhere in a batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


def _jit(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile with the GIL released and cached on disk; without a cache where no folder can be written."""
    try:
        compiled: Callable[..., Any] = numba.njit(function, nogil=True, cache=True)
    except RuntimeError:
        compiled = numba.njit(function, nogil=True)
    return compiled


def _before(score_a: float, row_a: int, score_b: float, row_b: int) -> bool:
    """True when hit a ranks before hit b: larger score, and the earlier passage among equal scores."""
    return score_a > score_b or (score_a == score_b and row_a < row_b)


before = _jit(_before)


def _sift_down(rows: Array, scores: Array, length: int, row: int, score: float) -> None:
    """Put a hit at the root of a heap (worst hit first) of ``length`` slots, replacing the root, and restore order."""
    slot = 0
    while True:
        child = 2 * slot + 1
        if child >= length:
            break
        if child + 1 < length and before(scores[child], rows[child], scores[child + 1], rows[child + 1]):
            child += 1
        if not before(score, row, scores[child], rows[child]):
            break
        rows[slot], scores[slot] = rows[child], scores[child]
        slot = child
    rows[slot], scores[slot] = row, score


sift_down = _jit(_sift_down)


def _push(rows: Array, scores: Array, length: int, row: int, score: float) -> None:
    """Add a hit to a heap of ``length`` slots (worst first); slot ``length`` must exist."""
    slot = length
    while slot > 0:
        parent = (slot - 1) // 2
        if not before(scores[parent], rows[parent], score, row):
            break
        rows[slot], scores[slot] = rows[parent], scores[parent]
        slot = parent
    rows[slot], scores[slot] = row, score


push = _jit(_push)


def _search_batch(
    terms: Array,
    pointers: Array,
    values: Array,
    postings: Array,
    indptr: Array,
    totals: Array,
    touched: Array,
    out_rows: Array,
    out_scores: Array,
    out_counts: Array,
) -> None:
    """Fill the best hits of Q queries, best first.

    Query q has the term ids ``terms[pointers[q]:pointers[q + 1]]``; term t is in the passages
    ``postings[indptr[t]:indptr[t + 1]]`` with the BM25 values at the same places. ``totals`` [N] float32 is scratch,
    all zero before and after; ``touched`` [N] int32 is scratch. ``out_rows`` and ``out_scores`` are [Q, k],
    ``out_counts`` [Q] says how many of each row are hits.
    """
    k = out_rows.shape[1]
    for q in range(len(pointers) - 1):
        n_touched = 0
        for i in range(pointers[q], pointers[q + 1]):
            term = terms[i]
            for j in range(indptr[term], indptr[term + 1]):
                value = values[j]
                if value > 0:  # a zero would list the passage twice in ``touched``
                    row = postings[j]
                    if totals[row] == 0:
                        touched[n_touched] = row
                        n_touched += 1
                    totals[row] += value
        rows, scores = out_rows[q], out_scores[q]
        length = 0
        for i in range(n_touched):
            row = touched[i]
            score = totals[row]
            totals[row] = 0
            if length < k:
                push(rows, scores, length, row, score)
                length += 1
            elif before(score, row, scores[0], rows[0]):
                sift_down(rows, scores, length, row, score)
        out_counts[q] = length
        for last in range(length - 1, 0, -1):  # heap sort in place: the worst of those left goes to the end
            row, score = rows[last], scores[last]
            worst_row, worst_score = rows[0], scores[0]
            sift_down(rows, scores, last, row, score)
            rows[last], scores[last] = worst_row, worst_score


search_batch = _jit(_search_batch)


def warm_up(values: Array, postings: Array, indptr: Array) -> None:
    """Compile (or load from the cache) the kernel for arrays of these types, so that no request pays for it."""
    search_batch(
        np.zeros(0, np.int64),
        np.zeros(2, np.int64),
        values,
        postings,
        indptr,
        np.zeros(1, np.float32),
        np.zeros(1, np.int32),
        np.zeros((1, 1), np.int32),
        np.zeros((1, 1), np.float32),
        np.zeros(1, np.int64),
    )
