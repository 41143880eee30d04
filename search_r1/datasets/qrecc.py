"""QReCC (Anantha et al., NAACL 2021): conversations from QuAC, TREC CAsT and Natural Questions, with human rewrites.

``qrecc_{train,test}.json`` of the first release (``Context``, ``Rewrite``, ``Answer`` ...) or the files of SCAI-QReCC
2021 (``Truth_rewrite``, ``Truth_answer``, ``Truth_passages``). Gold passages come from ``Truth_passages`` or from a
file ``*qrels*.json`` beside (``{"<conversation>_<turn>": {passage: 1}}``); most turns have none. Passages: the JSON
lines of the published collection in a folder ``collection-paragraph`` or ``passages``. The kind is the
``Conversation_source``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

from search_r1.datasets.draft import Draft, attempt, references
from search_r1.datasets.fields import Fields
from search_r1.datasets.passages import Found, corpus_lines, stable_id
from search_r1.datasets.raw import read_object, read_records
from search_r1.datasets.rows import Row
from search_r1.datasets.source import Source, SplitFile

NAME = "qrecc"
_FILES = r"(?!.*qrels).*(qrecc|train|test|dev|turns|example).*\.json"
_QRELS = r".*qrels.*\.json"
_COLLECTIONS = ("collection-paragraph", "passages")

Gold = Mapping[str, tuple[str, ...]]
"""``<conversation>_<turn>`` -> ids of its gold passages."""


def _gold(file: SplitFile) -> Gold:
    gold: dict[str, tuple[str, ...]] = {}
    for path in file.beside(_QRELS):
        for turn, passages in read_object(path).entries():
            # The empty id stands for "no passage found".
            gold[turn] = tuple(stable_id(name) for name in passages.names_in_order() if name and passages.integer(name))
    return gold


def _turn(file: SplitFile, gold: Gold, record: Fields) -> Iterator[Draft]:
    scai = "Truth_rewrite" in record.names()
    conversation, turn = record.integer("Conversation_no"), record.integer("Turn_no")
    history = next((name for name in ("Context", "NewContext") if name in record.names()), "Context")
    if history not in record.names():
        raise record.fail(history, "is required: the conversation so far")
    key = f"{conversation}_{turn}"
    judged = record.texts_or_none("Truth_passages") if scai else None
    passages = gold.get(key, ()) if judged is None else tuple(stable_id(name) for name in judged)
    yield Row(
        qid=file.qid(NAME, key),
        question=record.text("Question"),
        answers=references([record.text_or_none("Truth_answer" if scai else "Answer")]),
        history=record.history(history),
        conv_id=str(conversation),
        turn_id=turn,
        rewrite=record.text_or_none("Truth_rewrite" if scai else "Rewrite"),
        gold_passage_ids=passages or None,
        kind=record.text_or_none("Conversation_source"),
        data_source=NAME,
    )


def _rows(file: SplitFile) -> Iterator[Draft]:
    return attempt(read_records(file.path), partial(_turn, file, _gold(file)))


def _passages(folder: Path) -> Iterator[Found]:
    for name in _COLLECTIONS:
        for path in sorted((folder / name).rglob("*.jsonl")):
            yield from corpus_lines(path)


SOURCE = Source(NAME, _FILES, _rows, ("rewrite", "gold_passage_ids", "kind"), passages=_passages)
