"""What backends made of other backends have in common: loading the parts, and seeing that they serve one corpus."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from retrieval_server.backends import load
from retrieval_server.errors import CorpusError
from retrieval_server.specs import Spec
from retrieval_server.types import LoadProgress, Retriever


class PartProgress(LoadProgress):
    """The progress of one part, reported as its stretch of the whole."""

    def __init__(self, whole: LoadProgress, start: float, end: float) -> None:
        """The part's 0 to 1 becomes ``start`` to ``end`` of ``whole``."""
        super().__init__()
        self._whole, self._start, self._end = whole, start, end

    def update(self, phase: str, fraction: float) -> None:
        """Report ``fraction`` of this part as a fraction of the whole."""
        self._whole.update(phase, self._start + min(1.0, max(0.0, fraction)) * (self._end - self._start))


def load_parts(specs: Sequence[Spec], progress: LoadProgress, share: float = 1.0) -> list[Retriever]:
    """Load the parts one after the other, which takes ``share`` of the whole loading.

    A part that cannot be loaded, or that serves another corpus than the first (CorpusError with both), closes the
    ones before it.
    """
    parts: list[Retriever] = []
    try:
        for number, spec in enumerate(specs):
            stretch = PartProgress(progress, share * number / len(specs), share * (number + 1) / len(specs))
            parts.append(load(spec, stretch))
        check_same_corpus(parts)
    except BaseException:
        close_all(parts)
        raise
    return parts


def check_same_corpus(parts: Sequence[Retriever]) -> None:
    """Raise CorpusError when two parts say that they serve different corpora; one that says nothing fits any."""
    infos: list[tuple[str, dict[str, Any]]] = [(part.name, part.info().get("corpus") or {}) for part in parts]
    known = [(name, corpus) for name, corpus in infos if corpus.get("sha256")]
    for name, corpus in known[1:]:
        first_name, first = known[0]
        if corpus["sha256"] != first["sha256"]:
            raise CorpusError(
                f"{first_name} serves {_described(first)}, {name} serves {_described(corpus)}: "
                "give both the same corpus, or rebuild the index of one"
            )


def _described(corpus: dict[str, Any]) -> str:
    return f"{corpus.get('file', 'a corpus')} with {corpus.get('passages')} passages, sha256 {corpus['sha256'][:16]}"


def common_size(parts: Sequence[Retriever]) -> int | None:
    """Return how many documents the parts can return together, or None when one of them does not know."""
    sizes = [part.size for part in parts]
    known = [size for size in sizes if size is not None]
    return max(known) if len(known) == len(sizes) else None


def merged_info(parts: Sequence[Retriever], own: dict[str, Any]) -> dict[str, Any]:
    """Return what ``/info`` shows of a composite: the corpus of the first part that knows it, and every part."""
    infos = [part.info() for part in parts]
    corpus: dict[str, Any] = next((info["corpus"] for info in infos if info.get("corpus")), {})
    return {
        "corpus": corpus,
        **own,
        "parts": [{"retriever": part.name, **info} for part, info in zip(parts, infos, strict=True)],
    }


def add_stages(stages: dict[str, float], part: Retriever, seconds: float) -> None:
    """Add what the last search of ``part`` spent to ``stages``: its own stages if it measures them, else "search"."""
    timings = getattr(part, "timings", None)
    for stage, spent in (timings() if timings else {"search": seconds}).items():
        stages[stage] = stages.get(stage, 0.0) + spent


def close_all(parts: Sequence[Retriever]) -> None:
    """Close every part, the last one first."""
    for part in reversed(parts):
        part.close()
