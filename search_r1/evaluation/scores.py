"""The figures of one result row. A figure without supervision is None."""

from __future__ import annotations

from collections.abc import Mapping

from search_r1.evaluation.results import ResultRow
from search_r1.parsing import TurnKind
from search_r1.rewards.text import Normalise, best, exact_match, f1, normalise, sub_exact_match

TOP = 3
"""Depth of ``recall_at_3``."""

Scores = Mapping[str, float | None]


def score_row(row: ResultRow, form: Normalise = normalise) -> dict[str, float | None]:
    """Score one row, independent of the training reward; failed rows score zero, their counts stay.

    ``f1`` is multiset F1 with the best reference, ``f1_first`` with the first (the published evaluation);
    ``rewrite_f1`` the best executed query against the gold rewrite, 0 without a query; ``recall_at_3`` 1 when a gold
    passage was among the first three of one of the searches.
    """
    prediction = None if row.failed else row.prediction
    return {
        "em": best(exact_match, prediction, row.answers, form),
        "sub_em": best(sub_exact_match, prediction, row.answers, form),
        "f1": best(f1, prediction, row.answers, form),
        "f1_first": best(f1, prediction, row.answers[:1], form),
        "rewrite_f1": _rewrite_f1(row, form),
        "recall_at_3": _hit(row),
        "searches": float(len(row.searches)),
        "turns": None if row.turns is None else float(len(row.turns)),
        "invalid_actions": None if row.turns is None else float(sum(TurnKind(turn).invalid for turn in row.turns)),
        "format_valid": float(row.format_valid and not row.failed),
        "failed": float(row.failed),
        "refused": float(row.refused),
        "answered": None if row.stop is None else float(row.stop == "answered"),
        **row.scores,
    }


def _rewrite_f1(row: ResultRow, form: Normalise) -> float | None:
    if not row.rewrite:
        return None
    queries = [] if row.failed else [search.query for search in row.searches]
    return max((f1(query, row.rewrite, form) for query in queries), default=0.0)


def _hit(row: ResultRow) -> float | None:
    if not row.has_gold:
        return None
    if any(search.ids is None for search in row.searches):
        return None  # a file that keeps the queries but not what they found
    return float(not row.failed and any(any(search.gold[:TOP]) for search in row.searches if search.gold is not None))
