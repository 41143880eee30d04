"""Exact search: every query against every vector, the same answer by whatever product computes it.

Two steps. Candidates come from the fastest float32 product at hand (FAISS's loop for few queries, a matrix product
for many, an accelerator); its last bits depend on the shapes, so on who else asks. Then the candidates' scores are
computed again in float64, pair by pair, and ordered by score and row. Candidates are taken until none that was left
out can belong to the answer, given the rounding error that a float32 product of d terms can have. So rankings do not
depend on batch, k, product or device, equal scores are in the order of the corpus, and a smaller k gives a prefix.

Legend: Q queries, N vectors, d dimensions, k wanted, m candidates.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

Floats = npt.NDArray[np.float32]
Rows = npt.NDArray[np.int64]
Candidates = Callable[[Floats, int], tuple[Floats, Rows]]
"""(queries [Q, d], m) -> scores [Q, m] and rows [Q, m], best first; row -1 where there are no more."""

NEVER = 1 << 62
"""As ``many_from``: no matrix product, however many queries."""
_SPARE = 16
_GROWTH = 4
_UNIT = 2.0**-24
_UNIT_HALF = 2.0**-10  # of two factors in float16
# Scores of one block of rows: 64 MiB, and no more rows than their copy in float32 fits in as much.
_BLOCK_SCORES = 1 << 24
# Vectors gathered at a time for the second step.
_BLOCK_EXACT = 1 << 22


def settle(
    candidates: Candidates, queries: Floats, k: int, n: int, slack: npt.NDArray[np.float64]
) -> list[tuple[Floats, Rows]]:
    """Return per query enough candidates to contain the best k, whatever order ties come in.

    Enough: the worst candidate's score is below the k-th one's by more than twice ``slack`` [Q], the largest error
    that a candidate's score can have; or there are all ``n`` that can be had.
    """
    found: list[tuple[Floats, Rows]] = [(np.empty(0, np.float32), np.empty(0, np.int64))] * len(queries)
    pending = np.arange(len(queries))
    m = min(n, k + _SPARE)
    while len(pending):
        scores, rows = candidates(queries[pending], m)
        complete = (rows[:, -1] < 0) | (scores[:, -1] < scores[:, k - 1] - 2 * slack[pending])
        if m == n:
            complete[:] = True
        for i in np.flatnonzero(complete):
            valid = rows[i] >= 0
            found[pending[i]] = scores[i][valid], rows[i][valid]
        pending = pending[~complete]
        m = min(n, m * _GROWTH)
    return found


def best(scores: Floats, rows: Rows, k: int) -> tuple[Floats, Rows]:
    """Return the k best hits: larger scores first, the earlier row among equal ones."""
    order = np.lexsort((rows, -scores))[:k]
    return scores[order], rows[order]


class ExactSearch:
    """Exact inner-product search over vectors in memory."""

    def __init__(
        self,
        vectors: npt.NDArray[Any],
        few: Candidates | None,
        many_from: int,
        device: torch.device,
        half: bool = False,
        max_candidates: int | None = None,
    ) -> None:
        """``vectors`` [N, d] float32 or float16, finite.

        ``few`` finds candidates (at most ``max_candidates``) for fewer than ``many_from`` queries, the matrix product
        on ``device`` for more. ``half``: candidates come from a float16 copy; the second step still reads ``vectors``.
        """
        self._vectors = vectors
        self._few = few
        self._many_from = many_from if few is not None else 0
        self._max_candidates = max_candidates or len(vectors)
        self._matrix = torch.from_numpy(vectors) if few is None or many_from < NEVER else None
        if self._matrix is not None:
            self._matrix = self._matrix.to(device, torch.float16 if half else self._matrix.dtype)
        self._largest = _largest_norm(vectors)
        if not np.isfinite(self._largest):
            raise ValueError("a coordinate of a vector is not finite")
        lossy = half and vectors.dtype != np.float16
        self._error = (vectors.shape[1] + 2) * _UNIT + (_UNIT_HALF if lossy else 0.0)

    def search(self, queries: Floats, k: int) -> list[tuple[Floats, Rows]]:
        """Return per query (scores, rows) of the best min(k, N)."""
        norms = np.linalg.norm(queries.astype(np.float64), axis=1)
        slack = norms * self._largest * self._error
        candidates: Candidates = self._product
        n = len(self._vectors)
        if self._few is not None and len(queries) < self._many_from:
            candidates, n = self._few, self._max_candidates
        k = min(k, n)
        settled = settle(candidates, queries, k, n, slack)
        return [best(self._exact(query, rows), rows, k) for query, (_, rows) in zip(queries, settled, strict=True)]

    def _exact(self, query: Floats, rows: Rows) -> Floats:
        """Return the scores [m], each the float64 inner product of its own pair, rounded once."""
        scores = np.empty(len(rows), np.float32)
        step = max(1, _BLOCK_EXACT // len(query))
        for start in range(0, len(rows), step):
            chosen = self._vectors[rows[start : start + step]].astype(np.float64)
            # Not a matrix product: its order of summation depends on the row's place, so equal vectors may differ.
            scores[start : start + step] = (chosen * query).sum(axis=1)
        return scores

    def _product(self, queries: Floats, m: int) -> tuple[Floats, Rows]:
        """Candidates by matrix product, block of rows by block of rows."""
        matrix = self._matrix
        assert matrix is not None
        n, dim = matrix.shape
        with torch.inference_mode():
            wanted = torch.from_numpy(queries).to(matrix.device)
            converted = n if matrix.dtype == torch.float32 else _BLOCK_SCORES // dim
            step = max(1, min(_BLOCK_SCORES // len(queries), converted))
            parts = [self._best_of_block(wanted, matrix[start : start + step], start, m) for start in range(0, n, step)]
            scores, rows = (torch.cat(part, dim=1) for part in zip(*parts, strict=True))
            if len(parts) > 1:
                scores, order = scores.topk(min(m, scores.shape[1]), dim=1)
                rows = rows.gather(1, order)
            return scores.cpu().numpy(), rows.cpu().numpy()

    @staticmethod
    def _best_of_block(
        queries: torch.Tensor, block: torch.Tensor, start: int, m: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        scores, rows = (queries @ block.to(torch.float32).T).topk(min(m, len(block)), dim=1)
        return scores, rows + start


def _largest_norm(vectors: npt.NDArray[Any]) -> float:
    largest = 0.0
    step = max(1, _BLOCK_SCORES // vectors.shape[1])
    for start in range(0, len(vectors), step):
        block = vectors[start : start + step].astype(np.float32, copy=False)
        squares = np.einsum("nd,nd->n", block, block)
        largest = max(largest, float(squares.max())) if np.isfinite(squares).all() else float("nan")
        if largest != largest:
            break
    return float(np.sqrt(largest)) * 1.0001
