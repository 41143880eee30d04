"""Reading a whole data set: its splits, what was dropped and why, and what is joined to its rows."""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO

from search_r1.datasets.draft import Dropped, Reason
from search_r1.datasets.passages import Found, corpus_lines, stable_id
from search_r1.datasets.raw import read_records
from search_r1.datasets.rows import Row
from search_r1.datasets.source import Source
from verl.errors import DataError

STOPPING = (Reason.MALFORMED, Reason.DUPLICATE_ID)
"""What stops a strict import."""
_SHOWN = 20
_ORDER = ("train", "dev", "test")


@dataclass
class Split:
    """The rows of one split, with and without references, and what became of the other records."""

    name: str
    rows: list[Row] = field(default_factory=list)
    dropped: Counter[Reason] = field(default_factory=Counter)
    details: dict[Reason, list[str]] = field(default_factory=dict)
    """The first few of each reason, by file and line."""
    read: int = 0
    """Records and turns seen: rows and dropped."""

    def drop(self, dropped: Dropped) -> None:
        """Count a record that is no row."""
        self.dropped[dropped.reason] += 1
        shown = self.details.setdefault(dropped.reason, [])
        if len(shown) < _SHOWN:
            shown.append(dropped.detail or dropped.place)

    @property
    def usable(self) -> list[Row]:
        """The rows that can be trained and scored on: those with a reference."""
        return [row for row in self.rows if row.answers]


def collect(source: Source, place: Path, strict: bool) -> dict[str, Split]:
    """Read every split of a data set, in file order; of rows with one id the first stays.

    Raises DataError for files that cannot be read and, if ``strict``, for the first record that breaks the format or
    repeats an id; raises it too when there is no row at all.
    """
    splits: dict[str, Split] = {}
    seen: set[tuple[str, str]] = set()
    for file in source.split_files(place):
        split = splits.setdefault(file.split, Split(file.split))
        for draft in source.rows(file):
            split.read += 1
            if isinstance(draft, Row) and (file.split, draft.qid) in seen:
                draft = Dropped(Reason.DUPLICATE_ID, str(file.path), f"{file.path}: {draft.qid}")
            if isinstance(draft, Row):
                seen.add((file.split, draft.qid))
                split.rows.append(draft)
            elif strict and draft.reason in STOPPING:
                raise DataError(f"{draft.detail or draft.place} ({draft.reason.value}; without --strict it is counted)")
            else:
                split.drop(draft)
    if not any(split.rows for split in splits.values()):
        details = [line for split in splits.values() for lines in split.details.values() for line in lines]
        raise DataError(f"{place}: no rows" + (f"; the first of {len(details)} drops: {details[0]}" if details else ""))
    return {name: splits[name] for name in sorted(splits, key=_ORDER.index)}


def join_rewrites(splits: Iterable[Split], path: Path) -> int:
    """Give rows the rewrites of a file; return how many rows got one.

    Lines are ``{"id", "rewrite"}``; the id is a row's ``qid`` or what follows its split (the id of the source). The
    source's own rewrites stay. Raises DataError for a malformed line, and when no id is known.
    """
    rewrites: dict[str, str] = {}
    for record in read_records(path):
        if isinstance(record, DataError):
            raise record
        identifier = record.identifier("id")
        if identifier is None:
            raise record.fail("id", "is required")
        rewrites[identifier] = record.text("rewrite")
    found = 0
    for split in splits:
        for index, row in enumerate(split.rows):
            official = row.qid.split(":", 2)[-1]
            split.rows[index] = row.with_supervision(rewrite=rewrites.get(row.qid, rewrites.get(official)))
            found += split.rows[index] is not row and split.rows[index] != row
    if not found:
        raise DataError(f"{path}: none of its {len(rewrites)} ids belongs to a row without a rewrite")
    return found


@dataclass(frozen=True)
class Corpus:
    """The passages that a data set was joined to."""

    path: Path
    passages: int
    sha256: str
    found: Mapping[str, str]
    """Gold passage id -> its text, of those that are in the corpus."""
    malformed: int
    """Records that break the format and are no passages."""
    details: tuple[str, ...]
    """The first few of them."""


def join_corpus(splits: Iterable[Split], passages: Iterable[Found], path: Path, strict: bool) -> Corpus | None:
    """Write the passages and give rows the text of their first gold passage; None when there is no passage.

    Raises DataError for the first malformed passage if ``strict``; otherwise they are counted.
    """
    unfinished = path.with_name(f".{path.name}.partial")
    with unfinished.open("wb") as sink:
        corpus = _joined(list(splits), passages, path, sink, strict)
    if not corpus.passages:
        unfinished.unlink()
        return None
    os.replace(unfinished, path)
    return corpus


def join_existing(splits: Iterable[Split], path: Path, strict: bool) -> Corpus:
    """Do the same with a corpus file that exists; nothing is written."""
    digest = hashlib.sha256()
    with path.open("rb") as data:
        while block := data.read(1 << 20):
            digest.update(block)
    return replace(_joined(list(splits), corpus_lines(path), path, None, strict), sha256=digest.hexdigest())


def _joined(splits: list[Split], passages: Iterable[Found], path: Path, sink: IO[bytes] | None, strict: bool) -> Corpus:
    wanted = {stable_id(name) for split in splits for row in split.rows for name in row.gold_passage_ids or ()}
    names: dict[str, str] = {}
    found: dict[str, str] = {}
    digest, count, malformed, details = hashlib.sha256(), 0, 0, list[str]()
    for passage in passages:
        if isinstance(passage, Dropped):
            if strict:
                raise DataError(f"{passage.detail} (without --strict it is counted)")
            malformed += 1
            details += [passage.detail] if len(details) < _SHOWN else []
            continue
        count += 1
        if (name := stable_id(passage.id)) in wanted:
            names[name], found[passage.id] = passage.id, passage.text
        if sink is not None:
            line = passage.line().encode()
            digest.update(line)
            sink.write(line)
    for split in splits:
        for index, row in enumerate(split.rows):
            # A row calls a passage what the corpus calls it, white space or not: a service answers with that id.
            gold = tuple(dict.fromkeys(names.get(stable_id(name), name) for name in row.gold_passage_ids or ()))
            text = next((found[name] for name in gold if name in found), None)
            split.rows[index] = replace(row, gold_passage_ids=gold or None).with_supervision(gold_text=text)
    return Corpus(path, count, digest.hexdigest(), found, malformed, tuple(details))
