"""One question with everything the task may know about it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

DEFAULT_SOURCE = "conversation"
"""The ``data_source`` of a row that names none."""


@dataclass(frozen=True)
class Row:
    """One turn of a conversation: the question to answer and its supervision.

    Travels as ``Prompt.row`` in the form of ``to_json``, so a trajectory on disk can be scored again on its own.
    """

    qid: str
    """Unique in its split."""
    question: str
    answers: tuple[str, ...]
    """References; scores take the best. Empty only in an importer's hands: what is loaded for a run has one."""
    history: tuple[str, ...] | None = None
    """Question, answer, question, answer ... oldest first, even length; None when only a rendered prompt exists."""
    conv_id: str | None = None
    turn_id: int | None = None
    """Position of the question in its conversation, from 1."""
    rewrite: str | None = None
    """The question made self-contained by a person or a larger model; None when there is none."""
    gold_passage_ids: tuple[str, ...] | None = None
    """Ids of the passages that hold the answer; None when unknown."""
    gold_text: str | None = None
    """Text of the gold passage (the published ``doc``); None when unknown."""
    topic_shift: bool | None = None
    kind: str | None = None
    """Kind of question, where a dataset distinguishes any; evaluation is broken down by it."""
    answerable: bool | None = None
    """False where the source marks the question as not answerable (from its passages); None when it marks nothing."""
    dialogue_act: str | None = None
    """Act of the reference reply (``directAnswer``, ``clarification`` ...), in the source's own terms."""
    data_source: str = DEFAULT_SOURCE
    corpus_sha256: str | None = None
    """Identity of the corpus that the row's passages come from, checked against the service at start."""
    messages: tuple[Mapping[str, str], ...] | None = None
    """An already rendered prompt (the published parquet), used verbatim by ``data.template=row``."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """JSON-serialisable notes of the task itself, such as why a prompt was refused."""

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-serialisable form; ``from_json`` inverts it."""
        record = asdict(self)
        for name in ("answers", "history", "gold_passage_ids", "messages"):
            record[name] = None if record[name] is None else list(record[name])
        return record

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Row:
        """Rebuild a row from ``to_json``'s form."""
        values = dict(record)
        for name in ("answers", "history", "gold_passage_ids", "messages"):
            values[name] = None if values[name] is None else tuple(values[name])
        return cls(**values)

    def with_supervision(self, **found: Any) -> Row:
        """Return the row with those of the given fields that are not None and that it lacks."""
        return replace(self, **{n: v for n, v in found.items() if v is not None and getattr(self, n) is None})

    @property
    def depth(self) -> int | None:
        """Turn number from 1: ``turn_id``, else counted from the history; None when neither is known."""
        if self.turn_id is not None:
            return self.turn_id
        return None if self.history is None else len(self.history) // 2 + 1
