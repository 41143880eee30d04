"""Loading a split: which reader for which file, unique names, seeded subsets."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator, Sequence
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

    Raises DataError naming file and line: a missing file, a malformed row, a ``qid`` that occurs twice, no rows.
    """
    rows: list[Row] = []
    places: dict[str, str] = {}
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
            rows.append(row)
    if not rows:
        raise DataError(f"{', '.join(map(str, paths)) or 'data files'}: no rows")
    return _subset(rows, limit)


def _subset(rows: list[Row], limit: int | None) -> list[Row]:
    if limit is None:
        return rows
    if limit > len(rows):
        logger.warning("asked for %d rows of %d: all are used", limit, len(rows))
        return rows
    chosen = sorted(random.Random(_SUBSET_SEED).sample(range(len(rows)), limit))
    return [rows[index] for index in chosen]
