"""Exact search against brute force in float64: scores, order, ties, k, and independence of batch and method."""

from __future__ import annotations

import faiss
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from retrieval_server.backends import exact_search
from retrieval_server.backends.exact_search import NEVER, ExactSearch, settle

CPU = torch.device("cpu")


def brute_force(vectors: np.ndarray, query: np.ndarray, k: int) -> tuple[list[int], list[float]]:
    """The best k rows and their scores, pair by pair; larger first, the earlier row among equals."""
    scores = [float(np.float32(sum(a * b for a, b in zip(v, query.tolist(), strict=True)))) for v in vectors.tolist()]
    rows = sorted(range(len(scores)), key=lambda row: (-scores[row], row))[:k]
    return rows, [scores[row] for row in rows]


def by_loop(vectors: np.ndarray) -> ExactSearch:
    def few(queries: np.ndarray, m: int) -> tuple[np.ndarray, np.ndarray]:
        return faiss.knn(queries, vectors.astype(np.float32), m, metric=faiss.METRIC_INNER_PRODUCT)

    return ExactSearch(vectors, few, NEVER, CPU)


def by_product(vectors: np.ndarray, half: bool = False) -> ExactSearch:
    return ExactSearch(vectors, None, 0, CPU, half)


def clustered(n: int, dim: int, seed: int = 0) -> np.ndarray:
    """Unit vectors of which many are equal and many nearly so."""
    rng = np.random.default_rng(seed)
    centres = rng.normal(size=(max(1, n // 6), dim))
    vectors = centres[rng.integers(len(centres), size=n)] + rng.choice([0, 0, 1e-6, 0.3], size=(n, 1)) * rng.normal(
        size=(n, dim)
    )
    return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)


@settings(max_examples=40, deadline=None)
@given(
    n=st.integers(1, 60), dim=st.integers(1, 24), k=st.integers(1, 70), seed=st.integers(0, 10**6),
    method=st.sampled_from(["loop", "product", "half"]), stored=st.sampled_from([np.float32, np.float16]),
)  # fmt: skip
def test_it_is_brute_force(n: int, dim: int, k: int, seed: int, method: str, stored: type) -> None:
    vectors = clustered(n, dim, seed).astype(stored)
    queries = clustered(5, dim, seed + 1)
    search = by_loop(vectors) if method == "loop" else by_product(vectors, method == "half")
    for query, (scores, rows) in zip(queries, search.search(queries, k), strict=True):
        expected_rows, expected_scores = brute_force(vectors, query, min(k, n))
        assert rows.tolist() == expected_rows
        np.testing.assert_allclose(scores, expected_scores, rtol=2e-7, atol=1e-12)


def test_the_list_is_the_same_alone_in_any_batch_by_any_method_and_for_any_k() -> None:
    vectors, queries = clustered(3000, 48), clustered(70, 48, 1)
    loop, product, half = by_loop(vectors), by_product(vectors), by_product(vectors, half=True)
    mixed = ExactSearch(vectors, lambda q, m: faiss.knn(q, vectors, m, metric=faiss.METRIC_INNER_PRODUCT), 8, CPU)
    whole = product.search(queries, 40)
    for search in (loop, product, half, mixed):
        for size in (1, 3, 7, 32, 70):
            for start in range(0, 70, size):
                for i, (scores, rows) in enumerate(search.search(queries[start : start + size], 10), start):
                    assert rows.tolist() == whole[i][1][:10].tolist()
                    assert scores.tolist() == whole[i][0][:10].tolist()


def test_blocks_of_rows_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    vectors, queries = clustered(500, 16), clustered(9, 16, 1)
    whole = by_product(vectors).search(queries, 20)
    monkeypatch.setattr(exact_search, "_BLOCK_SCORES", 300)
    monkeypatch.setattr(exact_search, "_BLOCK_EXACT", 50)
    for half in (False, True):
        for (scores, rows), (found_scores, found_rows) in zip(
            whole, by_product(vectors, half).search(queries, 20), strict=True
        ):
            assert found_rows.tolist() == rows.tolist() and found_scores.tolist() == scores.tolist()


def test_a_thousand_copies_of_a_passage_come_in_the_order_of_the_corpus() -> None:
    vectors = clustered(2000, 8)
    vectors[500:1500] = vectors[3]
    for search in (by_loop(vectors), by_product(vectors)):
        ((_, rows),) = search.search(vectors[3:4], 30)
        expected, _ = brute_force(vectors, vectors[3], 30)
        assert rows.tolist() == expected


def test_a_query_of_zeros_and_unnormalised_vectors() -> None:
    vectors = clustered(100, 8) * np.float32(300)
    ((scores, rows),) = by_product(vectors).search(np.zeros((1, 8), np.float32), 4)
    assert rows.tolist() == [0, 1, 2, 3] and scores.tolist() == [0, 0, 0, 0]
    query = clustered(1, 8, 5) * np.float32(0.01)
    ((_, rows),) = by_loop(vectors).search(query, 9)
    assert rows.tolist() == brute_force(vectors, query[0], 9)[0]


def test_rounding_of_the_candidates_hides_none() -> None:
    """Vectors so close that float16 mixes up their order: the best ten are far down among the candidates."""
    rng = np.random.default_rng(0)
    close = rng.normal(size=64) + 2e-3 * rng.normal(size=(400, 64))
    vectors = (close / np.linalg.norm(close, axis=1, keepdims=True)).astype(np.float32)
    rough = vectors.astype(np.float16).astype(np.float32) @ vectors[0]
    expected, _ = brute_force(vectors, vectors[0], 10)
    assert not set(expected) <= set(np.argsort(-rough)[:26].tolist())
    ((_, rows),) = by_product(vectors, half=True).search(vectors[:1], 10)
    assert rows.tolist() == expected


def test_candidates_are_taken_until_none_left_out_can_belong() -> None:
    asked: list[int] = []

    def candidates(queries: np.ndarray, m: int) -> tuple[np.ndarray, np.ndarray]:
        asked.append(m)
        scores = np.where(np.arange(m) < 90, 0.5, 0.4).astype(np.float32)  # rows 0 to 89 are within the error
        return np.tile(scores, (len(queries), 1)), np.tile(np.arange(m), (len(queries), 1))

    ((_, rows),) = settle(candidates, np.ones((1, 4), np.float32), 3, 1000, np.array([0.01]))
    assert asked == [19, 76, 304] and len(rows) == 304 and set(range(90)) <= set(rows.tolist())


def test_vectors_that_are_not_finite_are_refused() -> None:
    vectors = clustered(10, 4)
    vectors[7, 1] = np.nan
    with pytest.raises(ValueError, match="not finite"):
        by_product(vectors)
