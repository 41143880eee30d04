"""FaithDial (Dziri et al., TACL 2022): Wizard of Wikipedia with replies edited to be faithful to the knowledge.

``{train,valid,test}.json``: a list of dialogues of ``utterances`` (``history``, ``knowledge``, ``response`` ...). The
last entry of ``history`` is the question. The gold passage is the ``knowledge``, whose id depends on its text alone.
The set has no rewrites. ``VRM`` names the acts of the reply *before* its edit, so it is the dialogue act of the
reference only where nothing was edited (``original_response`` null); ``BEGIN`` and the reply before the edit are kept
as notes.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

from search_r1.datasets.draft import Draft, alternating, attempt, references
from search_r1.datasets.fields import Fields
from search_r1.datasets.passages import Found, Passage, Placed, text_id
from search_r1.datasets.passages import attempt as attempt_passages
from search_r1.datasets.raw import read_records
from search_r1.datasets.rows import Row
from search_r1.datasets.source import Source, SplitFile, matching

NAME = "faithdial"
_FILES = r".*(train|valid|dev|test|example).*\.json"


def _rows(file: SplitFile) -> Iterator[Draft]:
    for index, record in enumerate(read_records(file.path)):
        yield from attempt([record], partial(_replies, file, index))


def _replies(file: SplitFile, dialogue: int, record: Fields) -> Iterator[Draft]:
    for number, reply in enumerate(record.objects("utterances"), start=1):
        yield from attempt([reply], partial(_reply, file, dialogue, number))


def _reply(file: SplitFile, dialogue: int, number: int, reply: Fields) -> Iterator[Draft]:
    said = reply.texts("history")
    if not said[-1].strip():
        raise reply.fail("history", "must end with what the reply answers")
    knowledge, before = reply.text_or_none("knowledge"), reply.text_or_none("original_response")
    acts = reply.texts_or_none("VRM")
    # The other side spoke last, so sides alternate backwards from there.
    earlier = [((len(said) - 1 - place) % 2 == 0, text) for place, text in enumerate(said[:-1])]
    notes = {"begin": reply.texts_or_none("BEGIN"), "vrm": acts, "original_response": before}
    yield Row(
        qid=file.qid(NAME, f"{dialogue}_{number}"),
        question=said[-1],
        answers=references([reply.text_or_none("response")]),
        history=alternating(earlier),
        conv_id=str(dialogue),
        turn_id=number,
        gold_passage_ids=None if knowledge is None else (text_id(NAME, knowledge),),
        gold_text=knowledge,
        dialogue_act="|".join(acts) if acts and before is None else None,
        data_source=NAME,
        extra={name: list(note) if isinstance(note, tuple) else note for name, note in notes.items() if note},
    )


def _passages(folder: Path) -> Iterator[Found]:
    records = (record for path in matching(folder, _FILES) for record in read_records(path))
    return attempt_passages(records, _knowledge)


def _knowledge(record: Fields) -> Iterator[Placed]:
    for reply in record.objects("utterances"):
        if (text := reply.text_or_none("knowledge")) is not None:
            yield reply.place, Passage(text_id(NAME, text), "", text)


SOURCE = Source(NAME, _FILES, _rows, ("gold_passage_ids", "gold_text", "dialogue_act"), passages=_passages)
