"""The world as files: one corpus over all splits, one file of conversation turns per split."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from search_r1.world.conversations import rows, write_conversations
from search_r1.world.encyclopedia import Encyclopedia, build_encyclopedia


@dataclass(frozen=True)
class SplitSize:
    """``per_kind`` entities of each of the six kinds and ``conversations`` of 8 to 10 turns about them."""

    per_kind: int
    conversations: int


@dataclass(frozen=True)
class WorldSettings:
    """Sizes of all splits and the seed that everything is drawn from."""

    splits: Mapping[str, SplitSize]
    seed: int = 0


DEFAULT_WORLD = WorldSettings(
    MappingProxyType({"train": SplitSize(200, 400), "dev": SplitSize(60, 50), "test": SplitSize(60, 80)})
)


def _encyclopedias(settings: WorldSettings) -> dict[str, Encyclopedia]:
    return {split: build_encyclopedia(split, size.per_kind, settings.seed) for split, size in settings.splits.items()}


def build_corpus(settings: WorldSettings = DEFAULT_WORLD) -> list[dict[str, str]]:
    """Passages of all splits: every split is searched among the passages of all others."""
    return [entity.passage() for world in _encyclopedias(settings).values() for entity in world.entities]


def build_rows(split: str, settings: WorldSettings = DEFAULT_WORLD) -> list[dict[str, object]]:
    """Dataset rows of one split, one per turn. Raises ``KeyError`` for a split that the settings do not name."""
    size = settings.splits[split]
    world = build_encyclopedia(split, size.per_kind, settings.seed)
    return list(rows(write_conversations(world, size.conversations, settings.seed), split))


def write_world(folder: Path, settings: WorldSettings = DEFAULT_WORLD) -> dict[str, int]:
    """Writes ``corpus.jsonl`` and ``<split>.jsonl``; returns file name -> number of lines.

    Rows name their corpus by its hash, so that a run against another one is refused at its start.
    """
    folder.mkdir(parents=True, exist_ok=True)
    corpus = folder / "corpus.jsonl"
    counts = {corpus.name: _write_jsonl(corpus, build_corpus(settings))}
    source = {"corpus_sha256": hashlib.sha256(corpus.read_bytes()).hexdigest()}
    for split in settings.splits:
        rows_of_split = [row | source for row in build_rows(split, settings)]
        counts[f"{split}.jsonl"] = _write_jsonl(folder / f"{split}.jsonl", rows_of_split)
    return counts


def _write_jsonl(path: Path, records: Iterable[Mapping[str, object]]) -> int:
    lines = [json.dumps(record, ensure_ascii=False) + "\n" for record in records]
    path.write_text("".join(lines), encoding="utf-8")
    return len(lines)
