"""``ResultRow``: one answered question as text, all that is needed to score it again without model or service."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from search_r1.rewards.text import Normalise, normalise
from search_r1.rewards.view import EpisodeView, is_gold, shown_text
from verl.types import SearchCall, Trajectory


@dataclass(frozen=True, slots=True)
class IssuedQuery:
    """One executed search."""

    query: str
    turn: int | None = None
    """Generation that asked, from 0; None in files that do not say."""
    ids: tuple[str, ...] | None = None
    """Passages in rank order; None in files that do not say."""
    gold: tuple[bool, ...] | None = None
    """Which of them are gold; None without supervision."""


@dataclass(frozen=True, slots=True)
class ResultRow:
    """One episode. What a source does not say is None, and figures that need it are over the rows that have it."""

    qid: str
    data_source: str
    question: str
    answers: tuple[str, ...]
    """References."""
    prediction: str | None
    text: str
    """Everything behind the prompt."""
    sample: int = 0
    """Index among the samples of the question."""
    history: tuple[str, ...] | None = None
    stop: str | None = None
    failed: bool = False
    """Service, engine or deadline failed: scores zero and is counted."""
    refused: bool = False
    """The prompt did not fit: scores zero and is counted."""
    turns: tuple[str, ...] | None = None
    """Outcome of each generation."""
    searches: tuple[IssuedQuery, ...] = ()
    rewrite: str | None = None
    gold_ids: tuple[str, ...] | None = None
    has_gold: bool = False
    """It is known which passages are gold, by id or by text."""
    depth: int | None = None
    topic_shift: bool | None = None
    answerable: bool | None = None
    kind: str | None = None
    dialogue_act: str | None = None
    format_valid: bool = False
    format_reason: str = ""
    scores: Mapping[str, float | None] = field(default_factory=dict)
    """Scores that were bought: ``bertscore``, ``judge``; None where there is none."""

    @classmethod
    def of(cls, trajectory: Trajectory, view: EpisodeView, form: Normalise = normalise) -> ResultRow:
        """Read an episode."""
        row, verdict = view.row, view.structure()
        supervised = view.gold(form=form) is not None
        return cls(
            qid=row.qid,
            data_source=row.data_source,
            question=row.question,
            answers=row.answers,
            prediction=view.prediction,
            text=shown_text(view),
            sample=int(trajectory.trajectory_id.rpartition("#")[2] or 0),
            history=row.history,
            stop=trajectory.stop.value,
            failed=view.failed,
            refused="refused" in row.extra,
            turns=trajectory.turns,
            searches=tuple(_issued(call, view, supervised, form) for call in view.searches),
            rewrite=row.rewrite,
            gold_ids=row.gold_passage_ids,
            has_gold=supervised,
            depth=row.depth,
            topic_shift=row.topic_shift,
            answerable=row.answerable,
            kind=row.kind,
            dialogue_act=row.dialogue_act,
            format_valid=verdict.valid,
            format_reason=verdict.reason,
        )

    def to_json(self) -> dict[str, Any]:
        """Return the line of a result file; ``from_json`` inverts it."""
        return asdict(self)

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> ResultRow:
        """Rebuild a row; raises KeyError, TypeError or ValueError for what is none."""
        known = {item.name for item in fields(cls)}
        if strangers := set(record) - known:
            raise ValueError(f"unknown fields {sorted(strangers)}")
        values = dict(record)
        for name in ("answers", "history", "turns", "gold_ids"):
            if values.get(name) is not None:
                values[name] = tuple(values[name])
        values["searches"] = tuple(_query(search) for search in values.get("searches", ()))
        return cls(**values)


def _issued(call: SearchCall, view: EpisodeView, supervised: bool, form: Normalise) -> IssuedQuery:
    gold = tuple(is_gold(document, view.row, form) for document in call.documents) if supervised else None
    return IssuedQuery(call.query, call.turn, tuple(document.id for document in call.documents), gold)


def _query(record: Mapping[str, Any]) -> IssuedQuery:
    ids, gold = record["ids"], record["gold"]
    return IssuedQuery(
        record["query"], record["turn"], None if ids is None else tuple(ids), None if gold is None else tuple(gold)
    )


def by_question(rows: Sequence[ResultRow]) -> dict[str, list[ResultRow]]:
    """Return qid -> its samples, questions in order of first appearance."""
    groups: dict[str, list[ResultRow]] = {}
    for row in rows:
        groups.setdefault(row.qid, []).append(row)
    return groups
