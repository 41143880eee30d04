"""Single questions in Search-R1's format: NQ, TriviaQA, PopQA, HotpotQA, 2WikiMultihopQA, MuSiQue, Bamboogle ...

``{train,dev,test}.jsonl`` of ``id``, ``question``, ``golden_answers`` (the FlashRAG collection, from which Search-R1
takes them). Other columns (``metadata``) are not read. Passages: ``wiki*.jsonl`` or ``corpus*.jsonl`` of ``id`` and
``contents``.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

from search_r1.datasets.draft import Draft, attempt, references
from search_r1.datasets.fields import Fields
from search_r1.datasets.passages import Found, corpus_lines
from search_r1.datasets.raw import read_records
from search_r1.datasets.rows import Row
from search_r1.datasets.source import Source, SplitFile, matching

NAMES = (
    "nq",
    "triviaqa",
    "popqa",
    "hotpotqa",
    "2wikimultihopqa",
    "musique",
    "bamboogle",
    "strategyqa",
    "web_questions",
)
_CORPUS = r"(wiki|corpus).*\.jsonl"


def _rows(file: SplitFile, source: str) -> Iterator[Draft]:
    return attempt(read_records(file.path), partial(_row, file, source))


def _row(file: SplitFile, source: str, record: Fields) -> Iterator[Draft]:
    identifier = record.identifier("id")
    if identifier is None:
        raise record.fail("id", "is required")
    yield Row(
        qid=file.qid(source, identifier),
        question=record.text("question"),
        answers=references(record.texts("golden_answers")),
        history=(),
        turn_id=1,
        data_source=source,
    )


def _passages(folder: Path) -> Iterator[Found]:
    for path in matching(folder, _CORPUS):
        yield from corpus_lines(path)


SOURCES = tuple(
    Source(name, r"(train|dev|test).*\.jsonl", partial(_rows, source=name), (), passages=_passages) for name in NAMES
)
