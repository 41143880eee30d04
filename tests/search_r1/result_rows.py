"""Made-up result rows for tests of the evaluation."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from search_r1.evaluation.results import IssuedQuery, ResultRow

BASE = ResultRow(
    qid="q0",
    data_source="topiocqa",
    question="When was it opened?",
    answers=("1793", "in 1793"),
    prediction="in 1793",
    text="<think>b</think><answer> in 1793 </answer>",
    stop="answered",
    turns=("search", "answer"),
    searches=(IssuedQuery("When was the Louvre opened?", 0, ("d2", "d9"), (True, False)),),
    rewrite="When was the Louvre opened?",
    gold_ids=("d2",),
    has_gold=True,
    depth=2,
    format_valid=True,
    format_reason="valid",
)


def row(qid: str = "q0", **values: Any) -> ResultRow:
    """Return ``BASE`` with other values."""
    return replace(BASE, qid=qid, **values)


def queries(*rankings: tuple[str, ...], gold: tuple[str, ...] = ("d2",)) -> tuple[IssuedQuery, ...]:
    """Return one query per ranking."""
    return tuple(
        IssuedQuery(f"query {turn}", turn, ids, tuple(identity in gold for identity in ids))
        for turn, ids in enumerate(rankings)
    )
