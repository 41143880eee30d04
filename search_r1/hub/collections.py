"""The published passage collections and indexes, and putting their pieces together."""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl.errors import DataError

logger = logging.getLogger(__name__)

INDEX_NAME = "e5_Flat.index"
_ROWS = 50_000


@dataclass(frozen=True, slots=True)
class Collection:
    """Where a collection is published. Patterns are those of ``fnmatch`` over paths in the repository."""

    corpus_repo: str
    corpus: tuple[str, ...]
    index_repo: str
    index: tuple[str, ...]


COLLECTIONS: Mapping[str, Collection] = {
    "topiocqa": Collection(
        "slupart/topiocqa-collection",
        ("data/train-*-of-*.parquet",),
        "slupart/topiocqa-e5-index",
        ("index/part_aa", "index/part_ab"),
    ),
    "wiki18": Collection(
        "PeterJinGo/wiki-18-corpus", ("wiki-18.jsonl.gz",), "PeterJinGo/wiki-18-e5-index", ("part_aa", "part_ab")
    ),
}
"""Name -> the repositories that the published scripts fetch."""


def merge_shards(shards: Sequence[Path], target: Path) -> int:
    """Write the columns ``id`` and ``contents`` of parquet files as JSON lines, whole or not at all; return the lines.

    Raises DataError naming file and row for a column that is missing or a value that is none.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    unfinished, count = target.with_name(f".{target.name}.partial"), 0
    with unfinished.open("w", encoding="utf-8") as sink:
        for shard in shards:
            try:
                file = pq.ParquetFile(shard)
                absent = {"id", "contents"} - set(file.schema_arrow.names)
                if absent:
                    raise DataError(f"{shard}: no column {sorted(absent)[0]!r}; it has {file.schema_arrow.names}")
                row = 0
                for batch in file.iter_batches(batch_size=_ROWS, columns=["id", "contents"]):
                    for record in batch.to_pylist():
                        sink.write(_line(record, shard, row))
                        row += 1
                count += row
            except (pa.ArrowException, OSError) as error:
                raise DataError(f"{shard}: not a parquet file that can be read: {error}") from error
    os.replace(unfinished, target)
    return count


def _line(record: Mapping[str, Any], shard: Path, row: int) -> str:
    if record["id"] is None or not isinstance(record["contents"], str):
        raise DataError(f"{shard}: row {row}: id and contents must not be empty; found {str(dict(record))[:80]}")
    return json.dumps({"id": str(record["id"]), "contents": record["contents"]}, ensure_ascii=False) + "\n"


def join_parts(parts: Sequence[Path], target: Path) -> int:
    """Write the pieces in order, whole or not at all; return the bytes. Raises DataError when there is no room."""
    size = sum(part.stat().st_size for part in parts)
    if target.is_file() and target.stat().st_size == size:
        return size
    target.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(target.parent).free
    if free < size:
        raise DataError(f"{target}: {size} bytes are needed, {free} are free; make room or give another --save_path")
    unfinished = target.with_name(f".{target.name}.partial")
    with unfinished.open("wb") as sink:
        for part in sorted(parts):
            with part.open("rb") as source:
                shutil.copyfileobj(source, sink, 1 << 24)
    os.replace(unfinished, target)
    return size
