"""Passages of a source in the corpus format: stable ids, one line each, every id once."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from search_r1.datasets.raw import read_records, read_table
from verl.errors import DataError


@dataclass(frozen=True, slots=True)
class Passage:
    """One passage of a corpus."""

    id: str
    """Without white space, so that it can stand in TREC files."""
    title: str
    """Empty where the source has none."""
    text: str

    @property
    def contents(self) -> str:
        """The published form: the title in double quotes, a line break, the text. Untitled text is one line.

        Readers take the first line for the title.
        """
        return f'"{self.title}"\n{self.text}' if self.title else " ".join(self.text.split())

    def line(self) -> str:
        """Return the line of the corpus file."""
        return json.dumps({"id": self.id, "contents": self.contents}, ensure_ascii=False) + "\n"


def stable_id(text: str) -> str:
    """Return an id of the source as one word: white space becomes ``_``, as in Wikipedia's addresses."""
    return re.sub(r"\s", "_", text.strip())


def text_id(source: str, text: str) -> str:
    """Return the id of a passage that its source does not name: it depends on the text alone."""
    return f"{source}:{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def unique(passages: Iterable[tuple[str, Passage]]) -> Iterator[Passage]:
    """Yield every passage once, of (place, passage); raises DataError when one id has two texts."""
    seen: dict[str, tuple[str, str]] = {}
    for place, passage in passages:
        digest = hashlib.sha256(passage.contents.encode()).hexdigest()
        if passage.id not in seen:
            seen[passage.id] = (digest, place)
            yield passage
        elif seen[passage.id][0] != digest:
            first = seen[passage.id][1]
            raise DataError(f"{place}: passage {passage.id!r} has another text here than at {first}")


def wiki_table(path: Path) -> Iterator[Passage]:
    """Yield the passages of a table with the columns ``id``, ``text``, ``title`` (DPR's layout of Wikipedia)."""
    for row in read_table(path):
        yield Passage(stable_id(row.text("id")), row.text_or_none("title") or "", row.text("text"))


def corpus_lines(path: Path) -> Iterator[Passage]:
    """Yield the passages of JSON lines with ``id`` and ``contents``, or ``title`` and ``text``."""
    for record in read_records(path):
        if isinstance(record, DataError):
            raise record
        identifier = record.identifier("id")
        if identifier is None:
            raise record.fail("id", "is required")
        contents = record.text_or_none("contents")
        if contents is None:
            yield Passage(stable_id(identifier), record.text_or_none("title") or "", record.text("text"))
            continue
        title, found, text = contents.partition("\n")
        quoted = found and len(title) > 1 and title[0] == title[-1] == '"'
        yield Passage(stable_id(identifier), title[1:-1] if quoted else "", text if quoted else contents)
