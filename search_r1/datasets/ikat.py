"""TREC iKAT 2023 and 2024 (Aliannejadi et al.): conversations with a person about whom a few statements are known.

``<year>_{train,test}_topics.json``: ``turns`` of ``utterance``, ``resolved_utterance``, ``response`` and
``response_provenance``. Gold passages are ids of ClueWeb22-B, whose text needs a licence and is not here. The
statements about the person (``ptkb``), and those a turn rests on, are kept as notes.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from search_r1.datasets.draft import Draft, attempt, references
from search_r1.datasets.fields import Fields
from search_r1.datasets.raw import read_records
from search_r1.datasets.rows import Row
from search_r1.datasets.source import Source, SplitFile


def _rows(file: SplitFile, source: str) -> Iterator[Draft]:
    return attempt(read_records(file.path), partial(_turns, file, source))


def _turns(file: SplitFile, source: str, topic: Fields) -> Iterator[Draft]:
    number, history = topic.identifier("number"), list[str]()
    if number is None:
        raise topic.fail("number", "is required")
    person = topic.object_or_none("ptkb")
    statements = {} if person is None else {name: person.text(name) for name in person.names_in_order()}
    for turn in topic.objects("turns"):
        turn_id, question, response = turn.integer("turn_id"), turn.text("utterance"), turn.text_or_none("response")
        yield Row(
            qid=file.qid(source, f"{number}_{turn_id}"),
            question=question,
            answers=references([response]),
            history=tuple(history),
            conv_id=number,
            turn_id=turn_id,
            rewrite=turn.text_or_none("resolved_utterance"),
            gold_passage_ids=turn.texts_or_none("response_provenance"),
            data_source=source,
            extra={"ptkb": statements, "ptkb_provenance": list(turn.texts_or_none("ptkb_provenance") or ())},
        )
        history += [question, response or ""]


SOURCES = tuple(
    Source(
        f"ikat{year}",
        rf"{year}_(train|test)_topics.*\.json",
        partial(_rows, source=f"ikat{year}"),
        ("rewrite", "gold_passage_ids"),
    )
    for year in (2023, 2024)
)
