"""The rankings that issued queries got, scored by pytrec_eval (trec_eval's own code) against the gold passage ids."""

from __future__ import annotations

import math
from collections.abc import Sequence

from search_r1.evaluation.results import IssuedQuery, ResultRow

CUTOFFS = (1, 3, 5, 10)

_NAMES = {"recip_rank": "mrr"} | {
    f"{theirs}_{cutoff}": f"{ours}_{cutoff}"
    for theirs, ours in (("recall", "recall"), ("ndcg_cut", "ndcg"))
    for cutoff in CUTOFFS
}
"""pytrec_eval's name -> ours."""


def score_rankings(rows: Sequence[ResultRow]) -> list[dict[str, float] | None]:
    """Return, per row, ``queries/<figure>``, the mean over its queries, and ``best_query/<figure>``, the best of them.

    Figures: recall_k, ndcg_k and mrr. A question whose queries found nothing, that issued none, or that failed scores
    0. None for rows without gold ids or without the ids of what was found. Cut-offs beyond the longest ranking of all
    are left out: they would repeat the one before.
    """
    longest = max((len(search.ids or ()) for row in rows for search in row.searches), default=0)
    kept = [cutoff for cutoff in CUTOFFS if cutoff <= max(longest, 1)]
    names = [ours for ours in _NAMES.values() if ours == "mrr" or int(ours.rpartition("_")[2]) in kept]
    measured = _measure(rows)
    return [_of_row(row, index, measured, names) for index, row in enumerate(rows)]


def _usable(row: ResultRow) -> bool:
    return bool(row.gold_ids) and all(search.ids is not None for search in row.searches)


def _measure(rows: Sequence[ResultRow]) -> dict[str, dict[str, float]]:
    """Return ``<row>/<query>`` -> pytrec_eval's figures, for queries that found something."""
    from pytrec_eval import RelevanceEvaluator

    qrel: dict[str, dict[str, int]] = {}
    run: dict[str, dict[str, float]] = {}
    for index, row in enumerate(rows):
        if not _usable(row) or row.failed:
            continue
        for number, search in enumerate(row.searches):
            if ranking := _ranking(search):
                qrel[f"{index}/{number}"] = dict.fromkeys(row.gold_ids or (), 1)
                run[f"{index}/{number}"] = ranking
    if not run:
        return {}
    found: dict[str, dict[str, float]] = RelevanceEvaluator(qrel, set(_NAMES)).evaluate(run)
    return found


def _ranking(search: IssuedQuery) -> dict[str, float]:
    """Return id -> a score that falls with the rank; of a passage that stands there twice the first counts."""
    ids = list(dict.fromkeys(search.ids or ()))
    return {identity: float(len(ids) - rank) for rank, identity in enumerate(ids)}


def _of_row(
    row: ResultRow, index: int, measured: dict[str, dict[str, float]], names: Sequence[str]
) -> dict[str, float] | None:
    if not _usable(row):
        return None
    queries = [measured.get(f"{index}/{number}", {}) for number in range(len(row.searches))]
    figures: dict[str, float] = {}
    for theirs, ours in _NAMES.items():
        if ours in names:
            values = [query.get(theirs, 0.0) for query in queries]
            figures[f"queries/{ours}"] = math.fsum(values) / len(values) if values else 0.0
            figures[f"best_query/{ours}"] = max(values, default=0.0)
    return figures
