"""CANARD (Elgohary et al., EMNLP 2019): QuAC's questions with human rewrites.

``{train,dev,test}.json``: a record a question (``History``, ``Question``, ``Rewrite``, ``QuAC_dialog_id``,
``Question_no``). ``History`` begins with the titles of article and section, which are kept as notes and are no turns.
The answer to a question stands in the history of the next one; the last question of a dialogue has none. The files
hold no passages.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial

from search_r1.datasets.draft import Draft, attempt, references
from search_r1.datasets.fields import Fields
from search_r1.datasets.raw import read_records
from search_r1.datasets.rows import Row
from search_r1.datasets.source import Source, SplitFile
from verl.errors import DataError

NAME = "canard"
_FILES = r"(train|dev|test).*\.json"
_TITLES = 2


def _rows(file: SplitFile) -> Iterator[Draft]:
    records = list(read_records(file.path))
    return attempt(records, partial(_row, file, _answers(records)))


def _answers(records: list[Fields | DataError]) -> Mapping[tuple[str, int], str]:
    """Return (dialogue, question number) -> its answer, as later histories tell."""
    answers: dict[tuple[str, int], str] = {}
    for record in records:
        history = None if isinstance(record, DataError) else record.texts_or_none("History")
        if isinstance(record, DataError) or history is None:
            continue
        dialogue = record.identifier("QuAC_dialog_id") or ""
        for place, text in enumerate(history[_TITLES:]):
            if place % 2:
                answers[dialogue, place // 2 + 1] = text
    return answers


def _row(file: SplitFile, answers: Mapping[tuple[str, int], str], record: Fields) -> Iterator[Draft]:
    dialogue, number = record.text("QuAC_dialog_id"), record.integer("Question_no")
    history = record.history("History")
    if len(history) < _TITLES:
        raise record.fail("History", "must begin with the titles of article and section")
    yield Row(
        qid=file.qid(NAME, f"{dialogue}_{number}"),
        question=record.text("Question"),
        answers=references([answers.get((dialogue, number))]),
        history=history[_TITLES:],
        conv_id=dialogue,
        turn_id=number,
        rewrite=record.text_or_none("Rewrite"),
        data_source=NAME,
        extra={"article": history[0], "section": history[1]},
    )


SOURCE = Source(NAME, _FILES, _rows, ("rewrite",))
