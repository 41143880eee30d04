"""INSCIT (Wu et al., TACL 2023): mixed-initiative conversations; a turn has one or two reference replies.

``{train,dev,test}.json``: conversation -> ``turns`` of ``context`` (everything said, the question last) and ``labels``
(``responseType``, ``response``, ``evidence``). The set has no rewrites. Passages: the evidence in the files, and tables
``*.tsv`` (``id``, ``text``, ``title``) of the whole Wikipedia where there are any beside.

The dialogue act is the response type, or both where the two replies differ. A question is answerable when a reply is a
``directAnswer``, and not answerable when all replies say so (``noAnswer...``); a clarification marks neither.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from search_r1.datasets.draft import Draft, attempt, references
from search_r1.datasets.fields import Fields
from search_r1.datasets.passages import Found, Passage, Placed, stable_id, wiki_table
from search_r1.datasets.passages import attempt as attempt_passages
from search_r1.datasets.raw import read_object
from search_r1.datasets.rows import Row
from search_r1.datasets.source import Source, SplitFile, matching

NAME = "inscit"
_FILES = r"(train|dev|test).*\.json"


def _rows(file: SplitFile) -> Iterator[Draft]:
    for conversation, record in read_object(file.path).entries():
        yield from attempt([record], partial(_turns, file, conversation))


def _turns(file: SplitFile, conversation: str, record: Fields) -> Iterator[Draft]:
    for number, turn in enumerate(record.objects("turns"), start=1):
        yield from attempt([turn], partial(_turn, file, conversation, number))


def _turn(file: SplitFile, conversation: str, number: int, turn: Fields) -> Iterator[Draft]:
    said, labels = turn.texts("context"), turn.objects("labels")
    if len(said) % 2 == 0 or not said[-1].strip():
        raise turn.fail("context", f"must end with the question (odd length), has {len(said)} entries")
    evidence = [item for label in labels for item in label.objects("evidence")]
    acts = [label.text("responseType") for label in labels]
    yield Row(
        qid=file.qid(NAME, f"{stable_id(conversation)}_{number}"),
        question=said[-1],
        answers=references(label.text_or_none("response") for label in labels),
        history=said[:-1],
        conv_id=stable_id(conversation),
        turn_id=number,
        gold_passage_ids=tuple(dict.fromkeys(_id(item) for item in evidence)) or None,
        gold_text=evidence[0].text_or_none("passage_text") if evidence else None,
        answerable=_answerable(acts),
        dialogue_act="|".join(dict.fromkeys(acts)) or None,
        data_source=NAME,
    )


def _answerable(acts: Sequence[str]) -> bool | None:
    if "directAnswer" in acts:
        return True
    return False if acts and all(act.startswith("noAnswer") for act in acts) else None


def _id(item: Fields) -> str:
    return stable_id(item.text("passage_id"))


def _passages(folder: Path) -> Iterator[Found]:
    tables = matching(folder, r".*\.tsv")
    for table in tables:
        yield from wiki_table(table)
    if not tables:
        conversations = (c for path in matching(folder, _FILES) for _, c in read_object(path).entries())
        yield from attempt_passages(conversations, _evidence)


def _evidence(conversation: Fields) -> Iterator[Placed]:
    for turn in conversation.objects("turns"):
        for item in (item for label in turn.objects("labels") for item in label.objects("evidence")):
            titles = item.texts_or_none("passage_titles") or ()
            yield item.place, Passage(_id(item), " > ".join(titles), item.text("passage_text"))


SOURCE = Source(
    NAME, _FILES, _rows, ("gold_passage_ids", "gold_text", "answerable", "dialogue_act"), passages=_passages
)
