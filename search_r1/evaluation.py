"""Figures over a finished split: answers, queries, retrieval, structure, with intervals and breakdowns.

Every episode counts; a failed one (retrieval, engine, deadline) scores zero and is counted. Figures that need
supervision are over the rows that have it, and their ``n_...`` says how many that were.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from search_r1.rewards.text import best, exact_match, f1
from search_r1.rewards.view import EpisodeView
from verl.types import StopReason, Trajectory

_TOP = 3
_RESAMPLES = 2000
_DEEPEST = 10
"""Turns from here on share one bucket of the breakdown by depth."""


@dataclass(frozen=True, slots=True)
class EpisodeScores:
    """The figures of one episode; None where the row has no supervision for it."""

    em: float
    f1: float
    """Multiset F1, best reference."""
    rewrite_f1: float | None
    """Best executed query against the gold rewrite; 0 without a query."""
    hit: float | None
    """1 when a gold passage was among the first three of one of the searches."""
    searches: float
    format_valid: float
    failed: float
    depth: int | None
    topic_shift: bool | None
    kind: str | None


def score_episode(trajectory: Trajectory, view: EpisodeView) -> EpisodeScores:
    """Score one episode for evaluation; independent of the training reward."""
    failed = view.failed
    prediction = None if failed else view.prediction
    intent, gold = view.intent(f1), view.gold(top=_TOP)
    return EpisodeScores(
        em=best(exact_match, prediction, view.row.answers),
        f1=best(f1, prediction, view.row.answers),
        rewrite_f1=None if intent is None else (0.0 if failed else intent[0]),
        hit=None if gold is None else (0.0 if failed else gold.hit),
        searches=float(len(view.searches)),
        format_valid=float(view.structure().valid and not failed),
        failed=float(failed),
        depth=view.row.depth,
        topic_shift=view.row.topic_shift,
        kind=view.row.kind,
    )


def summarise(episodes: Sequence[tuple[Trajectory, EpisodeView]]) -> dict[str, float]:
    """Return flat figures: n, em, f1, rewrite_f1, recall_at_3, searches, format_valid, failed, intervals, breakdowns.

    ``f1/low`` and ``f1/high`` are the 95 % bootstrap interval (seeded), likewise for em and recall_at_3. ``f1/turn_2``,
    ``f1/topic_shift``, ``f1/same_topic``, ``f1/kind_<k>`` and ``f1/hit`` (a gold passage was shown) are means over
    those rows. A figure without any row is left out.
    """
    scores = [score_episode(trajectory, view) for trajectory, view in episodes]
    if not scores:
        return {"n": 0.0}
    rewrite = [s.rewrite_f1 for s in scores if s.rewrite_f1 is not None]
    hits = [s.hit for s in scores if s.hit is not None]
    figures = {
        "n": float(len(scores)),
        "em": mean([s.em for s in scores]),
        "f1": mean([s.f1 for s in scores]),
        "searches": mean([s.searches for s in scores]),
        "format_valid": mean([s.format_valid for s in scores]),
        "failed": mean([s.failed for s in scores]),
        "answered": mean([float(t.stop is StopReason.ANSWERED) for t, _ in episodes]),
        "refused": mean([float("refused" in view.row.extra) for _, view in episodes]),
        "n_rewrite": float(len(rewrite)),
        "n_gold": float(len(hits)),
    }
    if rewrite:
        figures["rewrite_f1"] = mean(rewrite)
    if hits:
        figures["recall_at_3"] = mean(hits)
    for name, values in (("em", [s.em for s in scores]), ("f1", [s.f1 for s in scores]), ("recall_at_3", hits)):
        if values:
            figures[f"{name}/low"], figures[f"{name}/high"] = bootstrap_interval(values)
    for reason in sorted({t.stop for t, _ in episodes}):
        figures[f"stop/{reason.value}"] = mean([float(t.stop is reason) for t, _ in episodes])
    return figures | _breakdowns(scores)


def bootstrap_interval(values: Sequence[float], seed: int = 0) -> tuple[float, float]:
    """Return the 95 % percentile bootstrap interval of the mean."""
    low, high = np.quantile(_resampled_means(np.asarray(values, dtype=np.float64), seed), (0.025, 0.975))
    return float(low), float(high)


@dataclass(frozen=True, slots=True)
class Gain:
    """Difference of two means over the same rows, with its 95 % interval."""

    mean: float
    low: float
    high: float


def paired_gain(before: Sequence[float], after: Sequence[float], seed: int = 0) -> Gain:
    """Return the gain of ``after`` over ``before``: rows are resampled in pairs. Raises ValueError."""
    if len(before) != len(after) or not before:
        raise ValueError(f"paired scores need the same rows on both sides, got {len(before)} and {len(after)}")
    differences = np.asarray(after, dtype=np.float64) - np.asarray(before, dtype=np.float64)
    low, high = np.quantile(_resampled_means(differences, seed), (0.025, 0.975))
    return Gain(float(differences.mean()), float(low), float(high))


def compare(
    before: Sequence[tuple[Trajectory, EpisodeView]], after: Sequence[tuple[Trajectory, EpisodeView]]
) -> dict[str, Gain]:
    """Return the paired gains of f1, em, rewrite_f1 and recall_at_3, each over the rows that have its supervision.

    Raises ValueError when the two sides are not evaluations of the same rows in the same order.
    """
    if [t.trajectory_id for t, _ in before] != [t.trajectory_id for t, _ in after]:
        raise ValueError("the two evaluations are not of the same rows in the same order")
    old, new = ([score_episode(trajectory, view) for trajectory, view in side] for side in (before, after))
    gains = {}
    for name, field in (("f1", "f1"), ("em", "em"), ("rewrite_f1", "rewrite_f1"), ("recall_at_3", "hit")):
        pairs = [(getattr(a, field), getattr(b, field)) for a, b in zip(old, new, strict=True)]
        supervised = [(a, b) for a, b in pairs if a is not None and b is not None]
        if supervised:
            gains[name] = paired_gain([a for a, _ in supervised], [b for _, b in supervised])
    return gains


def mean(values: Sequence[float]) -> float:
    """Return the arithmetic mean of a non-empty sequence."""
    return float(np.mean(values))


def _resampled_means(values: np.ndarray, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return np.array([values[rng.integers(0, len(values), len(values))].mean() for _ in range(_RESAMPLES)])


def _breakdowns(scores: Sequence[EpisodeScores]) -> dict[str, float]:
    groups: Mapping[str, Callable[[EpisodeScores], bool]] = {
        **{f"turn_{depth}": _at_depth(depth) for depth in range(1, _DEEPEST)},
        f"turn_{_DEEPEST}_on": lambda s: s.depth is not None and s.depth >= _DEEPEST,
        "topic_shift": lambda s: s.topic_shift is True,
        "same_topic": lambda s: s.topic_shift is False,
        "hit": lambda s: s.hit == 1.0,
        "miss": lambda s: s.hit == 0.0,
        **{f"kind_{kind}": _of_kind(kind) for kind in sorted({s.kind for s in scores if s.kind is not None})},
    }
    figures = {}
    for name, belongs in groups.items():
        members = [s for s in scores if belongs(s)]
        if members:
            figures[f"f1/{name}"] = mean([s.f1 for s in members])
            hits = [s.hit for s in members if s.hit is not None]
            if hits and name not in ("hit", "miss"):
                figures[f"recall_at_3/{name}"] = mean(hits)
    return figures


def _at_depth(depth: int) -> Callable[[EpisodeScores], bool]:
    return lambda s: s.depth == depth


def _of_kind(kind: str) -> Callable[[EpisodeScores], bool]:
    return lambda s: s.kind == kind
