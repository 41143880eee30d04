"""Search with a FAISS index that is not plain vectors: HNSW, IVF, scalar-quantised, on the CPU or on GPUs.

FAISS computes every query on its own here (see ``one_by_one``), so a ranking does not depend on the batch. It does
depend on k in two ways that are mended: hits of equal score at the end of the list are settled by row, and HNSW, which
looks further for a larger k, is searched with fixed depths (``ef``, then its doublings), each adding below the last.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from retrieval_server.backends.exact_search import Floats, Rows, best, settle
from retrieval_server.errors import SettingsError

_DEFAULT_EF = 128
_ALWAYS = 1 << 30
GPU_MAX_CANDIDATES = 2048
"""FAISS returns no more per query on a GPU."""


def one_by_one() -> None:
    """Make FAISS compute inner products query by query, not by a matrix product from 20 queries on.

    A product's last bits depend on the number of queries, which decided which IVF lists were visited. FAISS has this
    as a global variable only; its own loop is as fast for the sizes that are searched here.
    """
    import faiss

    faiss.cvar.distance_compute_blas_threshold = _ALWAYS


def gpu_count() -> int:
    """Return how many GPUs the installed FAISS can use; 0 for a CPU build."""
    import faiss

    return int(faiss.get_num_gpus()) if hasattr(faiss, "StandardGpuResources") else 0


def to_gpus(index: Any) -> Any:
    """Return the index on all GPUs, split over them, vectors in float16 (as the published server does)."""
    import faiss

    options = faiss.GpuMultipleClonerOptions()
    options.useFloat16 = True
    options.shard = True
    try:
        return faiss.index_cpu_to_all_gpus(index, co=options)
    except RuntimeError as error:
        raise SettingsError(
            f"faiss_gpu: FAISS cannot search a {type(index).__name__} on these GPUs "
            f"({str(error).strip().splitlines()[-1]}); leave faiss_gpu out"
        ) from None


class FaissSearch:
    """Inner-product search by FAISS, approximate or quantised."""

    def __init__(self, index: Any, nprobe: int | None = None, ef_search: int | None = None, gpus: bool = False) -> None:
        """Set how far to look (null: the index's own value where it is above our default) and where."""
        import faiss

        one_by_one()
        inner: Any = faiss.downcast_index(index.index) if isinstance(index, faiss.IndexPreTransform) else index
        is_ivf, is_hnsw = isinstance(inner, faiss.IndexIVF), isinstance(inner, faiss.IndexHNSW)
        kind = type(inner).__name__
        if nprobe is not None and not is_ivf:
            raise SettingsError(f"nprobe {nprobe} has no meaning for this index, a {kind}; leave it out")
        if ef_search is not None and not is_hnsw:
            raise SettingsError(f"ef_search {ef_search} has no meaning for this index, a {kind}; leave it out")
        self.parameters: dict[str, int] = {}
        """What was set: nprobe or ef_search."""
        self._depth = 0
        if is_ivf:
            wanted = nprobe or max(inner.nprobe, min(inner.nlist, 2 * math.isqrt(inner.nlist)))
            if wanted > inner.nlist:
                raise SettingsError(f"nprobe {wanted} is more than the {inner.nlist} lists of this index")
            inner.nprobe = self.parameters["nprobe"] = wanted
        if is_hnsw:
            self._depth = self.parameters["ef_search"] = ef_search or max(inner.hnsw.efSearch, _DEFAULT_EF)
        self._inner = inner
        self._cpu_index = index  # owns ``inner``
        self._index = to_gpus(index) if gpus else index
        self._rotates = inner is not index
        self._limit = GPU_MAX_CANDIDATES if gpus else self._index.ntotal

    def search(self, queries: Floats, k: int) -> list[tuple[Floats, Rows]]:
        """Return per query (scores, rows) of at most k, fewer where the lists visited hold fewer."""
        n = self._index.ntotal
        k = min(k, n, self._limit)
        if self._depth:
            depth = min(self._depth, n)
            first = self._at_depth(queries, depth)
            return [self._deepen(query, hits, depth, k) for query, hits in zip(queries, first, strict=True)]
        settled = settle(self._candidates, queries, k, min(n, self._limit), np.zeros(len(queries)))
        return [best(scores, rows, k) for scores, rows in settled]

    def _candidates(self, queries: Floats, m: int) -> tuple[Floats, Rows]:
        if not self._rotates:
            found: tuple[Floats, Rows] = self._index.search(queries, m)
            return found
        # A linear map before the index is a matrix product over the whole batch.
        singly = [self._index.search(query[np.newaxis], m) for query in queries]
        return np.concatenate([scores for scores, _ in singly]), np.concatenate([rows for _, rows in singly])

    def _deepen(self, query: Floats, hits: tuple[Floats, Rows], depth: int, k: int) -> tuple[Floats, Rows]:
        """HNSW: add to the hits of the first depth what each doubled depth has below them, until there are k."""
        scores, rows = hits
        n = self._index.ntotal
        while len(rows) < k and depth < n:
            depth = min(2 * depth, n)
            ((more_scores, more_rows),) = self._at_depth(query[np.newaxis], depth)
            if len(rows):
                after = (more_scores < scores[-1]) | ((more_scores == scores[-1]) & (more_rows > rows[-1]))
                more_scores, more_rows = more_scores[after], more_rows[after]
            scores, rows = np.concatenate([scores, more_scores]), np.concatenate([rows, more_rows])
        return scores[:k], rows[:k]

    def _at_depth(self, queries: Floats, depth: int) -> list[tuple[Floats, Rows]]:
        self._inner.hnsw.efSearch = depth
        scores, rows = self._candidates(queries, depth)
        return [best(scores[i][rows[i] >= 0], rows[i][rows[i] >= 0], depth) for i in range(len(queries))]
