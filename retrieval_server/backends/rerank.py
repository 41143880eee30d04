"""A cross-encoder over a first stage: the documents it found, in the order of how well each answers the query."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from retrieval_server.backends.composite import PartProgress, add_stages, close_all, load_parts, merged_info
from retrieval_server.specs import RerankSpec
from retrieval_server.types import Hit, LoadProgress, Retriever

Ranked = tuple[int, float]
"""(position in the list that was given, score)"""


class PairScorer(Protocol):
    """What scores pairs; ``cross_encoder.CrossEncoder`` does."""

    def logits(self, pairs: Sequence[tuple[str, str]]) -> list[float]:
        """Return one number per (query, passage), larger for a better passage."""
        ...


def passage_text(contents: str) -> str:
    """Return a passage as the published servers show it to a cross-encoder: its first line named as the title.

    Example: the contents ``"Rome"``, newline, ``Rome is a city.`` become ``(Title: "Rome") Rome is a city.``
    """
    title, _, text = contents.partition("\n")
    return f"(Title: {title}) {text}"


class RerankRetriever:
    """Implements ``types.Retriever``; without a first stage it only orders documents that are given to it.

    The list is always made from the first ``depth`` documents of the first stage, whatever k is: with more of them it
    would be another list, and the one for a smaller k would not be its beginning. So it ends after ``depth`` documents.

    ``search`` and the other ways in may be called from several threads; they take turns.
    """

    name = "rerank"
    parallel = 1

    def __init__(
        self,
        first: Retriever | None,
        scorer: PairScorer,
        depth: int,
        activation: Callable[[float], float] = float,
        settings: dict[str, Any] | None = None,
    ) -> None:
        """``activation`` turns a logit into the score that is shown; ``settings`` is what ``/info`` shows of it all."""
        self.first, self.depth = first, depth
        self._scorer, self._activation, self._settings = scorer, activation, settings or {}
        self._turn = threading.Lock()
        self._stages: dict[str, float] = {}

    @classmethod
    def load(cls, spec: RerankSpec, progress: LoadProgress) -> RerankRetriever:
        """Load the first stage and the cross-encoder; raises what the first stage raises, and SettingsError."""
        from retrieval_server.backends.cross_encoder import load_cross_encoder  # torch takes seconds: not at import

        parts = [] if spec.first is None else load_parts([spec.first], progress, share=0.7)
        try:
            PartProgress(progress, 0.7, 1.0).update("loading the cross-encoder", 0.0)
            scorer, activation = load_cross_encoder(spec)
        except BaseException:
            close_all(parts)
            raise
        progress.update("ready", 1.0)
        shown = spec.model_dump(include={"model_path", "depth", "max_length"})
        return cls(parts[0] if parts else None, scorer, spec.depth, activation, shown)

    @property
    def size(self) -> int | None:
        """Number of passages of the first stage, where it knows it."""
        return None if self.first is None else self.first.size

    def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        """Return the best k of the first ``depth`` documents of each query; see the protocol."""
        return [hits[:k] for hits in self.rank(queries, self.depth)]

    def rank(self, queries: Sequence[str], depth: int) -> list[list[Hit]]:
        """Return all of the first ``depth`` documents of each query [Q], in the cross-encoder's order."""
        if self.first is None:
            raise RuntimeError("this server has no first stage: it only orders given documents")
        with self._turn:
            stages: dict[str, float] = {}
            started = time.perf_counter()
            found = self.first.search(queries, depth)
            add_stages(stages, self.first, time.perf_counter() - started)
            started = time.perf_counter()
            ranked = self._order(queries, [[passage_text(hit.document.contents) for hit in hits] for hits in found])
            stages["rerank"] = time.perf_counter() - started
            self._stages = stages
        return [
            [Hit(hits[position].document, score) for position, score in order]
            for hits, order in zip(found, ranked, strict=True)
        ]

    def order(self, queries: Sequence[str], passages: Sequence[Sequence[str]]) -> list[list[Ranked]]:
        """Return the order of each query's own passages [Q], best first; equal ones stay as they were given."""
        with self._turn:
            return self._order(queries, passages)

    def _order(self, queries: Sequence[str], passages: Sequence[Sequence[str]]) -> list[list[Ranked]]:
        pairs = [(query, text) for query, texts in zip(queries, passages, strict=True) for text in texts]
        logits = iter(self._scorer.logits(pairs) if pairs else [])
        orders = []
        for texts in passages:
            own = [next(logits) for _ in texts]
            best_first = sorted(range(len(own)), key=own.__getitem__, reverse=True)  # stable: ties as given
            orders.append([(position, self._activation(own[position])) for position in best_first])
        return orders

    def timings(self) -> dict[str, float]:
        """Return the seconds per stage of the last search."""
        return dict(self._stages)

    def info(self) -> dict[str, Any]:
        """Return the first stage's corpus and what reranks."""
        return merged_info([] if self.first is None else [self.first], {"reranker": self._settings})

    def close(self) -> None:
        """Close the first stage."""
        if self.first is not None:
            self.first.close()
