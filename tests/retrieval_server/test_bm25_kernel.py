"""The compiled search against a plain sum over all passages: same passages, same order, the same floats."""

from __future__ import annotations

import numpy as np
import pytest

from retrieval_server.backends import bm25_kernel

N_PASSAGES, N_TERMS = 4000, 60


@pytest.fixture(scope="module")
def index() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Terms from rare to one in nearly every passage, rarer ones worth more, values rounded so that many tie."""
    draw = np.random.default_rng(3)
    columns, values = [], []
    for term in range(N_TERMS):
        share = min(0.97, 0.0005 * 1.16**term)
        rows = np.flatnonzero(draw.random(N_PASSAGES) < share).astype(np.int32)
        columns.append(rows)
        weight = np.log(1 + (N_PASSAGES - len(rows) + 0.5) / (len(rows) + 0.5))
        values.append((weight * np.round(draw.uniform(0.3, 0.9, len(rows)), 1)).astype(np.float32))
    indptr = np.concatenate([[0], np.cumsum([len(rows) for rows in columns])])
    largest = np.array([piece.max(initial=0) for piece in values], np.float32)
    return np.concatenate(values), np.concatenate(columns), indptr, largest


def plain_search(terms: list[int], k: int, index: tuple[np.ndarray, ...]) -> list[tuple[int, float]]:
    """Add the values in the order of the query, in float32, and sort all passages."""
    values, postings, indptr, _ = index
    totals = np.zeros(N_PASSAGES, np.float32)
    for term in terms:
        span = slice(indptr[term], indptr[term + 1])
        totals[postings[span]] += values[span]
    rows = sorted(np.flatnonzero(totals > 0).tolist(), key=lambda row: (-totals[row], row))
    return [(row, float(totals[row])) for row in rows[:k]]


@pytest.mark.parametrize("k", [1, 3, 10, 200, N_PASSAGES])
def test_equals_a_plain_sum_to_the_last_bit(k: int, index: tuple[np.ndarray, ...]) -> None:
    draw = np.random.default_rng(k)
    queries = [draw.integers(0, N_TERMS, draw.integers(0, 12)).tolist() for _ in range(120)]
    # A rare and dear term before frequent and cheap ones, and the same term again and again.
    queries += [[5, 59, 58, 57, 56], [59, 58, 57, 5], [40] * 20, [59, 59, 59], [10, 10, 59, 30]]
    pointers = np.cumsum([0, *map(len, queries)])
    rows, scores = np.empty((len(queries), k), np.int32), np.empty((len(queries), k), np.float32)
    counts, totals = np.empty(len(queries), np.int64), np.zeros(N_PASSAGES, np.float32)
    terms = np.array([term for query in queries for term in query], np.int64)
    bm25_kernel.search_batch(terms, pointers, *index, totals, np.zeros(N_PASSAGES, np.int32), rows, scores, counts)
    for query, own_rows, own_scores, n in zip(queries, rows, scores, counts, strict=True):
        found = list(zip(own_rows[:n].tolist(), own_scores[:n].tolist(), strict=True))
        assert found == plain_search(query, k, index), query
    assert not totals.any()


def test_frequent_terms_are_only_looked_up(index: tuple[np.ndarray, ...]) -> None:
    """What the rule is for: passages that only have the cheap terms are never touched."""
    values, postings, indptr, largest = index
    totals, touched = np.zeros(N_PASSAGES, np.float32), np.zeros(N_PASSAGES, np.int32)
    terms = np.array([59, 20, 58], np.int64)
    n = bm25_kernel.candidates(
        terms, values, postings, indptr, largest, totals, touched, np.empty(3, np.int32), np.empty(3, np.float32)
    )
    assert 3 <= n <= indptr[21] - indptr[20] < 100
    assert np.count_nonzero(totals) == n
