"""Loading a split: which reader for which file, unique names, seeded subsets."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from search_r1.datasets.jsonl import read_jsonl
from search_r1.datasets.parquet import read_parquet
from search_r1.datasets.rows import Row
from verl.errors import DataError
from verl.registry import Registry

logger = logging.getLogger(__name__)

Reader = Callable[[Path, str], Iterator[tuple[str, Row]]]
"""(path, prompt key) -> (place for messages, row) in file order."""

READERS: Registry[Reader] = Registry("data file format", {".jsonl": read_jsonl, ".parquet": read_parquet})

_SUBSET_SEED = 42


def load_rows(paths: Sequence[str | Path], prompt_key: str = "prompt", limit: int | None = None) -> list[Row]:
    """Read all files in order.

    Args:
        paths: ``.jsonl`` or ``.parquet`` files.
        prompt_key: column of the rendered prompt in parquet files.
        limit: keep a random subset of this many rows (always the same one), in file order; None keeps all.

    Blank references are left out, and so are rows that have no other: an empty answer would be the right one. A
    warning counts both. Raises DataError naming file and line: a missing file, a malformed row, a ``qid`` that occurs
    twice, no rows.
    """
    rows: list[Row] = []
    places: dict[str, str] = {}
    blank = _BlankReferences()
    for path in map(Path, paths):
        if path.suffix not in READERS:
            raise DataError(f"{path}: unknown kind of data file; known: {', '.join(READERS.names())}")
        if not path.is_file():
            raise DataError(f"{path}: no such file; set data.train_files or data.val_files")
        for place, row in READERS[path.suffix](path, prompt_key):
            if row.qid in places:
                raise DataError(
                    f"{place}: qid {row.qid!r} occurs before, at {places[row.qid]}; it must be unique (parquet rows "
                    "are named data_source:file:row, so give files of one source different names)"
                )
            places[row.qid] = place
            if (cleaned := blank.removed(row, place)) is not None:
                rows.append(cleaned)
    blank.report()
    if not rows:
        dropped = f" with a reference ({blank.rows} without)" if blank.rows else ""
        raise DataError(f"{', '.join(map(str, paths)) or 'data files'}: no rows{dropped}")
    return _subset(rows, limit)


class _BlankReferences:
    """Takes blank references out of rows and counts what went."""

    def __init__(self) -> None:
        self.rows = self.references = 0
        self._first = ""

    def removed(self, row: Row, place: str) -> Row | None:
        """Return the row without its blank references; None when nothing is left of them."""
        answers = tuple(text for text in row.answers if text.strip())
        if len(answers) == len(row.answers):
            return row
        self._first = self._first or place
        self.references += len(row.answers) - len(answers)
        self.rows += not answers
        return replace(row, answers=answers) if answers else None

    def report(self) -> None:
        """Warn when anything was left out."""
        if self.references:
            logger.warning(
                "%d blank references left out, and with them %d rows that have no other; the first at %s",
                self.references,
                self.rows,
                self._first,
            )


def _subset(rows: list[Row], limit: int | None) -> list[Row]:
    if limit is None:
        return rows
    if limit > len(rows):
        logger.warning("asked for %d rows of %d: all are used", limit, len(rows))
        return rows
    chosen = sorted(random.Random(_SUBSET_SEED).sample(range(len(rows)), limit))
    return [rows[index] for index in chosen]
