"""The published conversations: which files of the repository are a configuration's splits, and merging their shards."""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from verl.errors import DataError

REPOSITORY = "slupart/chatr1-convqa-all"
SPLITS = ("train", "test")


def split_patterns(config: str, card: str | None, paths: Sequence[str]) -> dict[str, list[str]]:
    """Return split -> patterns of its files.

    The card of the repository (README.md, its ``configs``) decides; without one, files whose path names both the
    configuration and the split. Raises DataError naming the configurations that there are.
    """
    configs = _configs(card)
    if configs:
        if config not in configs:
            raise DataError(f"the repository has no configuration {config!r}; it has {', '.join(sorted(configs))}")
        found = {
            split: [p for p in patterns if fnmatch.filter(paths, p)] for split, patterns in configs[config].items()
        }
        return {split: patterns for split, patterns in found.items() if patterns}
    guessed = {
        split: [path for path in paths if path.endswith(".parquet") and _names(path, config) and _names(path, split)]
        for split in SPLITS
    }
    if not any(guessed.values()):
        raise DataError(f"the repository has no parquet file of {config!r}; it holds {', '.join(paths[:8])}")
    return {split: files for split, files in guessed.items() if files}


def _names(path: str, word: str) -> bool:
    return word in path.lower().replace("/", "-").replace("_", "-").replace(".", "-").split("-")


def _configs(card: str | None) -> dict[str, dict[str, list[str]]]:
    """Return configuration -> split -> patterns, of the header of a card; empty when it names none."""
    if card is None or not card.startswith("---"):
        return {}
    try:
        header: Any = yaml.safe_load(card.split("---", 2)[1])
    except yaml.YAMLError:
        return {}
    configs: dict[str, dict[str, list[str]]] = {}
    for entry in header.get("configs") or [] if isinstance(header, Mapping) else []:
        splits = configs.setdefault(str(entry.get("config_name")), {})
        for files in entry.get("data_files") or []:
            path = files.get("path")
            splits.setdefault(str(files.get("split")), []).extend(path if isinstance(path, list) else [path])
    return configs


def merge(shards: Sequence[Path], target: Path) -> int:
    """Write the rows of parquet files into one, whole or not at all; return their number.

    Raises DataError naming a file that cannot be read, or whose columns are not those of the first.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished, count, writer = target.with_name(f".{target.name}.partial"), 0, None
    for shard in shards:
        try:
            table = pq.read_table(shard)
            writer = writer or pq.ParquetWriter(unfinished, table.schema)
            writer.write_table(table)
        except (pa.ArrowException, OSError, ValueError) as error:
            raise DataError(f"{shard}: cannot be read, or has other columns than {shards[0].name}: {error}") from error
        count += table.num_rows
    assert writer is not None
    writer.close()
    os.replace(unfinished, target)
    return count
