"""Passages of a source in the corpus format: stable ids, one line each, every id once."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from search_r1.datasets.draft import Dropped, Reason
from search_r1.datasets.fields import Fields
from search_r1.datasets.raw import read_records, read_table
from verl.errors import DataError


@dataclass(frozen=True, slots=True)
class Passage:
    """One passage of a corpus."""

    id: str
    """As the rows have it: ``stable_id`` of the source's own, or as it stands in a corpus file."""
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


Found = Passage | Dropped
"""A passage, or a record that breaks the format of its source."""
Placed = tuple[str, Passage]
"""(file and line, passage)."""


def attempt(records: Iterable[Fields | DataError], parse: Callable[[Fields], Iterable[Placed]]) -> Iterator[Found]:
    """Yield the passages of every record, each id once; a record that breaks the format is dropped on its own.

    One id with two texts counts as such a break, in the record that comes later.
    """
    seen: dict[str, tuple[bytes, str]] = {}
    for record in records:
        if isinstance(record, DataError):
            yield malformed(record)
            continue
        try:
            for place, passage in parse(record):
                digest = hashlib.sha256(passage.contents.encode()).digest()
                if passage.id not in seen:
                    seen[passage.id] = (digest, place)
                    yield passage
                elif seen[passage.id][0] != digest:
                    first = seen[passage.id][1]
                    raise DataError(f"{place}: passage {passage.id!r} has another text here than at {first}")
        except DataError as error:
            yield malformed(error)


def malformed(error: DataError) -> Dropped:
    """Return the record of an error, whose message begins with file and line."""
    return Dropped(Reason.MALFORMED, str(error).partition(": ")[0], str(error))


def wiki_table(path: Path) -> Iterator[Found]:
    """Yield the passages of a table with the columns ``id``, ``text``, ``title`` (DPR's layout of Wikipedia).

    Ids are taken as unique: building an index refuses repeated ones, and this holds none in memory.
    """
    for row in read_table(path):
        yield _passage(
            row, lambda row: Passage(stable_id(row.text("id")), row.text_or_none("title") or "", row.text("text"))
        )


def corpus_lines(path: Path) -> Iterator[Found]:
    """Yield the passages of JSON lines with ``id`` and ``contents``, or ``title`` and ``text``; their ids stay."""
    for record in read_records(path):
        yield _passage(record, _of_line)


def _passage(record: Fields | DataError, parse: Callable[[Fields], Passage]) -> Found:
    if isinstance(record, DataError):
        return malformed(record)
    try:
        return parse(record)
    except DataError as error:
        return malformed(error)


def _of_line(record: Fields) -> Passage:
    identifier = record.identifier("id")
    if identifier is None:
        raise record.fail("id", "is required")
    contents = record.text_or_none("contents")
    if contents is None:
        return Passage(identifier, record.text_or_none("title") or "", record.text("text"))
    title, found, text = contents.partition("\n")
    quoted = found and len(title) > 1 and title[0] == title[-1] == '"'
    return Passage(identifier, title[1:-1] if quoted else "", text if quoted else contents)
