"""Fusion of two rankings into one: by ranks (RRF) or by scores (weighted sum).

RRF (Cormack, Clarke and Buettcher, SIGIR 2009): a document's score is the sum of ``1 / (rrf_k + rank)`` over the lists
that hold it, ranks from 1. Weighted: a convex combination of min-max normalised scores (Lee, SIGIR 1997; compared with
RRF by Bruch, Gai and Ingber, TOIS 2023). Per query and list the best score becomes 1 and the worst 0; a document that
a list does not hold has 0 there; a list whose scores are all equal counts 1 for each of its documents.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from retrieval_server.backends.composite import add_stages, close_all, common_size, load_parts, merged_info
from retrieval_server.specs import HybridSpec
from retrieval_server.types import Document, Hit, LoadProgress, Retriever

Shares = Callable[[Sequence[Hit]], list[float]]
"""What each hit [n] of one list, best first, adds to the fused score of its document."""


def reciprocal_ranks(hits: Sequence[Hit], rrf_k: int) -> list[float]:
    """Return ``1 / (rrf_k + rank)`` per hit."""
    return [1.0 / (rrf_k + rank) for rank in range(1, len(hits) + 1)]


def weighted_scores(hits: Sequence[Hit], weight: float) -> list[float]:
    """Return ``weight`` times the min-max normalised score per hit."""
    if not hits:
        return []
    scores = [hit.score for hit in hits]
    low, high = min(scores), max(scores)
    if high == low:
        return [weight] * len(hits)
    return [weight * (score - low) / (high - low) for score in scores]


def fuse(lists: Sequence[Sequence[Hit]], shares: Sequence[Shares]) -> list[Hit]:
    """Return every document of the lists once, by the sum of its shares, largest first.

    Documents are the same when their ids are; of a repeated one in a list the best counts. Among equal sums the order
    is that of the first list, then that of the second: the sort is stable and ``totals`` was filled in that order.
    """
    totals: dict[str, float] = {}
    documents: dict[str, Document] = {}
    for hits, share in zip(lists, shares, strict=True):
        unique: dict[str, Hit] = {}
        for hit in hits:
            unique.setdefault(hit.document.id, hit)
        for (identifier, hit), value in zip(unique.items(), share(list(unique.values())), strict=True):
            totals[identifier] = totals.get(identifier, 0.0) + value
            documents.setdefault(identifier, hit.document)
    order = sorted(totals, key=totals.__getitem__, reverse=True)
    return [Hit(documents[identifier], totals[identifier]) for identifier in order]


class HybridRetriever:
    """Implements ``types.Retriever``.

    The fused list is always made from the first ``depth`` documents of each part, whatever k is: a deeper list would
    be another list, and the one for a smaller k would not be its beginning. So it ends after 2 * depth documents.
    """

    name = "hybrid"
    parallel = 1

    def __init__(self, parts: Sequence[Retriever], shares: Sequence[Shares], depth: int, settings: dict[str, Any]):
        """``settings`` is what ``/info`` shows of the fusion."""
        self._parts, self._shares, self._depth, self._settings = parts, shares, depth, settings
        self._stages: dict[str, float] = {}

    @classmethod
    def load(cls, spec: HybridSpec, progress: LoadProgress) -> HybridRetriever:
        """Load both parts; raises what they raise, and CorpusError when they serve different corpora."""
        parts = load_parts((spec.first, spec.second), progress)
        shares: list[Shares]
        if spec.method == "rrf":
            shares = [partial(reciprocal_ranks, rrf_k=spec.rrf_k)] * 2
        else:
            shares = [partial(weighted_scores, weight=weight) for weight in (spec.weight, 1.0 - spec.weight)]
        return cls(parts, shares, spec.depth, spec.model_dump(include={"method", "rrf_k", "weight", "depth"}))

    @property
    def size(self) -> int | None:
        """Number of passages, where both parts know it."""
        return common_size(self._parts)

    def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        """Return the best k of each query's fused list; see the protocol."""
        self._stages = {}
        per_part = []
        for part in self._parts:
            started = time.perf_counter()
            per_part.append(part.search(queries, self._depth))
            add_stages(self._stages, part, time.perf_counter() - started)
        started = time.perf_counter()
        fused = [fuse(lists, self._shares)[:k] for lists in zip(*per_part, strict=True)]
        self._stages["fuse"] = time.perf_counter() - started
        return fused

    def timings(self) -> dict[str, float]:
        """Return the seconds per stage of the last search; stages of the same name in both parts are added up."""
        return dict(self._stages)

    def info(self) -> dict[str, Any]:
        """Return the corpus, how the lists are fused, and both parts."""
        return merged_info(self._parts, {"fusion": self._settings})

    def close(self) -> None:
        """Close both parts."""
        close_all(self._parts)
