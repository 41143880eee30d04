"""The inner loop of BM25 search, compiled by numba over the memory-mapped arrays that bm25s builds.

bm25s has a compiled search of its own. This one reads the same arrays and gives the same scores, and differs where a
server needs it: it is compiled once per machine and then loaded from numba's cache (bm25s compiles for seconds in
every process), has a defined order among equal scores, returns nothing for passages that do not match, and accepts a
query without terms anywhere in a batch. And it leaves out work that cannot change the answer, after the MaxScore rule
(Turtle and Flood 1995, "Query evaluation: strategies and optimizations"): terms are taken from the rarest to the most
frequent, and as soon as all terms that are left could not lift a new passage into the best k, only passages that
are among the candidates already are looked up in their postings.
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


def _best(rows: Array, scores: Array, totals: Array, touched: Array, n_touched: int) -> int:
    """Fill ``rows`` and ``scores`` [k] with a heap (worst first) of the best candidates; return its length."""
    k, length = len(rows), 0
    for i in range(n_touched):
        row = touched[i]
        score = totals[row]
        if length < k:
            push(rows, scores, length, row, score)
            length += 1
        elif before(score, row, scores[0], rows[0]):
            sift_down(rows, scores, length, row, score)
    return length


best = _jit(_best)


def _sort_rarest_first(terms: Array, indptr: Array) -> None:
    """Sort the terms of a query by the number of their postings, then by their ids: the order of the additions."""
    for i in range(1, len(terms)):
        term = terms[i]
        size = indptr[term + 1] - indptr[term]
        j = i - 1
        while j >= 0:
            other = terms[j]
            other_size = indptr[other + 1] - indptr[other]
            if other_size < size or (other_size == size and other <= term):
                break
            terms[j + 1] = other
            j -= 1
        terms[j + 1] = term


sort_rarest_first = _jit(_sort_rarest_first)


def _add_all(term: int, values: Array, postings: Array, indptr: Array, totals: Array, touched: Array, n: int) -> int:
    """Add a term's values to all its passages; return how many passages are touched, ``n`` of them before."""
    for j in range(indptr[term], indptr[term + 1]):
        value = values[j]
        if value > 0:  # a zero would list the passage twice in ``touched``
            row = np.uint32(postings[j])  # unsigned: no check for an index from the end
            total = totals[row]
            if total == 0:
                touched[n] = row
                n += 1
            totals[row] = total + value
    return n


add_all = _jit(_add_all)


def _look_up(term: int, values: Array, postings: Array, indptr: Array, totals: Array, touched: Array, n: int) -> None:
    """Add a term's values to those of ``n`` passages that have it, by binary search in its postings."""
    start, end = indptr[term], indptr[term + 1]
    for i in range(n):
        row = touched[i]
        low, high = start, end
        while low < high:
            middle = (low + high) >> 1
            if postings[middle] < row:
                low = middle + 1
            else:
                high = middle
        if low < end and postings[low] == row:
            totals[row] += values[low]


look_up = _jit(_look_up)


def _add_to_candidates(
    term: int, values: Array, postings: Array, indptr: Array, totals: Array, touched: Array, n: int
) -> None:
    """Add a term's values to those of the ``n`` touched passages that have it, in the cheaper of two ways."""
    start, end = indptr[term], indptr[term + 1]
    steps, width = 1, end - start
    while width > 1:
        steps, width = steps + 1, width >> 1
    if n * steps * _STEP_COST < end - start:
        look_up(term, values, postings, indptr, totals, touched, n)
        return
    for j in range(start, end):
        if totals[postings[j]] > 0:
            totals[postings[j]] += values[j]


_STEP_COST = 4
"""Of a step of a binary search, in postings that are read in order."""
add_to_candidates = _jit(_add_to_candidates)


def _drop_hopeless(totals: Array, touched: Array, n: int, needed: float) -> int:
    """Keep the touched passages whose total is at least ``needed``; return how many."""
    kept = 0
    for i in range(n):
        row = touched[i]
        if totals[row] >= needed:
            touched[kept] = row
            kept += 1
        else:
            totals[row] = 0
    return kept


drop_hopeless = _jit(_drop_hopeless)


_ROUNDING = 1 - 1e-4
"""Above the error of a sum of a thousand float32 values: a passage that ties with the k-th is never left out."""


def _candidates(
    terms: Array,
    values: Array,
    postings: Array,
    indptr: Array,
    largest: Array,
    totals: Array,
    touched: Array,
    rows: Array,
    scores: Array,
) -> int:
    """Fill ``touched`` with passages among which the best k of one query are, and their ``totals``; return how many."""
    order = terms.copy()
    sort_rarest_first(order, indptr)
    rest = 0.0  # what the terms that are left can add to a passage at most
    for term in order:
        rest += largest[term]
    n, threshold, open_to_all = 0, 0.0, True
    for term in order:
        if open_to_all and len(rows) <= n < indptr[term + 1] - indptr[term]:
            best(rows, scores, totals, touched, n)
            threshold = scores[0] * _ROUNDING  # totals only grow: a lower bound of the k-th best
            open_to_all = rest >= threshold
        if open_to_all:
            n = add_all(term, values, postings, indptr, totals, touched, n)
        else:
            n = drop_hopeless(totals, touched, n, threshold - rest)
            add_to_candidates(term, values, postings, indptr, totals, touched, n)
        rest -= largest[term]
    return n


candidates = _jit(_candidates)


def _search_batch(
    terms: Array,
    pointers: Array,
    values: Array,
    postings: Array,
    indptr: Array,
    largest: Array,
    totals: Array,
    touched: Array,
    out_rows: Array,
    out_scores: Array,
    out_counts: Array,
) -> None:
    """Fill the best hits of Q queries, best first.

    Query q has the term ids ``terms[pointers[q]:pointers[q + 1]]``; term t is in the passages
    ``postings[indptr[t]:indptr[t + 1]]`` (ascending) with the BM25 values at the same places, ``largest[t]`` at most.
    ``totals`` [N] float32 is scratch, all zero before and after; ``touched`` [N] int32 is scratch. ``out_rows`` and
    ``out_scores`` are [Q, k], ``out_counts`` [Q] says how many of each row are hits.
    """
    for q in range(len(pointers) - 1):
        own = terms[pointers[q] : pointers[q + 1]]
        rows, scores = out_rows[q], out_scores[q]
        n = candidates(own, values, postings, indptr, largest, totals, touched, rows, scores)
        length = best(rows, scores, totals, touched, n)
        if len(own) > 2:  # of three values and more, the sum depends on their order: that of the query counts
            n = drop_hopeless(totals, touched, n, scores[0] * _ROUNDING if length == len(rows) else 0.0)
            for i in range(n):
                totals[touched[i]] = 0
            for term in own:
                look_up(term, values, postings, indptr, totals, touched, n)
            length = best(rows, scores, totals, touched, n)
        for i in range(n):
            totals[touched[i]] = 0
        out_counts[q] = length
        for last in range(length - 1, 0, -1):  # heap sort in place: the worst of those left goes to the end
            row, score = rows[last], scores[last]
            worst_row, worst_score = rows[0], scores[0]
            sift_down(rows, scores, last, row, score)
            rows[last], scores[last] = worst_row, worst_score


search_batch = _jit(_search_batch)


def warm_up(values: Array, postings: Array, indptr: Array, largest: Array) -> None:
    """Compile (or load from the cache) the kernel for arrays of these types, so that no request pays for it."""
    search_batch(
        np.zeros(0, np.int64),
        np.zeros(2, np.int64),
        values,
        postings,
        indptr,
        largest,
        np.zeros(1, np.float32),
        np.zeros(1, np.int32),
        np.zeros((1, 1), np.int32),
        np.zeros((1, 1), np.float32),
        np.zeros(1, np.int64),
    )
