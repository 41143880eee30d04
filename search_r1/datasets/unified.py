"""Files that are rows already: one's own JSON lines (docs/data.md), and the published parquet of ChatR1 and Search-R1.

A published row holds its conversation only inside the rendered prompt. Where the lines of its ``<context>`` block read
``User:``, ``Assistant:`` in turn, they become the history; where they do not, the row keeps its prompt alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

from search_r1.datasets.draft import Draft, attempt
from search_r1.datasets.fields import Fields
from search_r1.datasets.jsonl import Strangers, row_of
from search_r1.datasets.parquet import parquet_records
from search_r1.datasets.parquet import row_of as published_row_of
from search_r1.datasets.passages import Found, corpus_lines
from search_r1.datasets.raw import read_records
from search_r1.datasets.rows import Row
from search_r1.datasets.source import Source, SplitFile, matching
from search_r1.rendered import history_of

_CORPUS = r"(passages|corpus|wiki).*\.jsonl"


def _own(file: SplitFile) -> Iterator[Draft]:
    return attempt(read_records(file.path), partial(_own_row, Strangers()))


def _own_row(strangers: Strangers, record: Fields) -> Iterator[Draft]:
    strangers.look(record.names(), record.place)
    yield row_of(record)


def _published(file: SplitFile) -> Iterator[Draft]:
    for position, record in parquet_records(file.path):
        yield from attempt([record], partial(_published_row, position))


def _published_row(position: str, record: Fields) -> Iterator[Draft]:
    yield with_history(published_row_of(record, position))


def with_history(row: Row) -> Row:
    """Return the row with the history that its rendered prompt shows, if it has none and the prompt can be read."""
    if row.history is not None or row.messages is None:
        return row
    return replace(row, history=history_of(row.messages[-1]["content"]))


def _passages(folder: Path) -> Iterator[Found]:
    for path in matching(folder, _CORPUS):
        yield from corpus_lines(path)


_ALL = ("rewrite", "gold_passage_ids", "gold_text", "topic_shift", "kind", "answerable", "dialogue_act")
OWN = Source("own", rf"(?!{_CORPUS}).*\.jsonl", _own, _ALL, passages=_passages)
PUBLISHED = Source("published", r".*\.parquet", _published, _ALL, passages=_passages)
