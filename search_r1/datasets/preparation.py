"""From the files of a data set to what a run needs: parquet for each split, passages, qrels and a report."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from search_r1.datasets.catalog import SOURCES
from search_r1.datasets.checks import Length, Shared, coverage, leakage, lengths, missing_passages
from search_r1.datasets.collect import Corpus, Split, collect, join_corpus, join_existing, join_rewrites
from search_r1.datasets.publish import write_parquet
from search_r1.datasets.rows import Row
from search_r1.datasets.source import Source
from search_r1.prompts import shown_history
from search_r1.tags import escape_tags
from search_r1.templates import template_named, template_version


@dataclass(frozen=True)
class Preparation:
    """What to prepare, and how."""

    dataset: str
    """Name in ``SOURCES``, or ``module:attribute`` of a ``Source``."""
    input: Path
    """Folder with the published files, or one of them."""
    output: Path
    strict: bool = False
    """Stop at the first record that breaks the format or repeats an id; otherwise they are counted."""
    corpus: Path | None = None
    """Passages to join instead of the set's own (JSON lines of ``id`` and ``contents``); they are not copied."""
    pin_corpus: bool = False
    """Write the corpus's hash into the rows: a run against a service with other passages is then refused."""
    rewrites: Path | None = None
    """Rewrites from elsewhere: JSON lines of ``id`` and ``rewrite``."""
    template: str = "chatr1"
    """What the rendered prompt of the rows looks like."""
    history: str | int = "all"
    history_answers: bool = True


@dataclass
class Prepared:
    """What was made and what was seen."""

    settings: Preparation
    source: Source
    splits: Mapping[str, Split]
    corpus: Corpus | None
    shared: list[Shared]
    length: Length
    unit: str
    """Unit of the lengths: tokens or characters."""
    files: dict[str, int] = field(default_factory=dict)
    """Written file -> number of its lines or rows."""

    def figures(self) -> dict[str, Any]:
        """Return everything that the report says, as JSON values."""
        corpus = self.corpus
        return {
            "dataset": self.source.name,
            "supplies": list(self.source.supplies),
            "template": f"{self.settings.template} {template_version(self.settings.template)}",
            "inputs": {str(p): file_sha256(p) for p in self._inputs()},
            "corpus": None
            if corpus is None
            else {name: value for name, value in vars(corpus).items() if name != "found"} | {"path": str(corpus.path)},
            "splits": {name: self._split_figures(split) for name, split in self.splits.items()},
            "shared": [asdict(shared) for shared in self.shared],
            "length_unit": self.unit,
            "files": self.files,
        }

    def _inputs(self) -> list[Path]:
        files = [file.path for file in self.source.split_files(self.settings.input)]
        return [*files, *([self.settings.rewrites] if self.settings.rewrites else [])]

    def _split_figures(self, split: Split) -> dict[str, Any]:
        absent = (None, None) if self.corpus is None else missing_passages(split.rows, self.corpus.found)
        return {
            "read": split.read,
            "rows": len(split.rows),
            "with_reference": len(split.usable),
            "conversations": len({row.conv_id for row in split.rows if row.conv_id is not None}),
            "references": sum(len(row.answers) for row in split.rows),
            "dropped": {reason.value: count for reason, count in sorted(split.dropped.items())},
            "details": {reason.value: lines for reason, lines in sorted(split.details.items())},
            "have": coverage(split.rows),
            "gold_left_out_of_qrels": sum(
                not (_is_word(row.qid) and _is_word(name)) for row in split.rows for name in row.gold_passage_ids or ()
            ),
            "gold_ids_not_in_corpus": absent[0],
            "rows_with_gold_not_in_corpus": absent[1],
            "lengths": lengths(split.rows, self.length),
        }


def prepare(settings: Preparation, length: Length = len, unit: str = "characters") -> Prepared:
    """Read, join, check and write a data set; raises DataError naming file and line.

    Args:
        settings: what to read and where to write. Written are ``<split>.parquet`` (rows with a reference),
            ``conversations.jsonl`` (all rows) and ``qrels.trec`` for measuring retrieval, and ``passages.jsonl``.
        length: length of a text, for the report.
        unit: what it counts.
    """
    source = SOURCES[settings.dataset]
    template_version(settings.template)  # refuses a template that is none before anything is read
    splits = collect(source, settings.input, settings.strict)
    settings.output.mkdir(parents=True, exist_ok=True)
    if settings.rewrites is not None:
        join_rewrites(splits.values(), settings.rewrites)
    corpus = _join(settings, source, splits)
    for split in splits.values():
        split.rows[:] = [_with_prompt(row, settings, corpus) for row in split.rows]
    prepared = Prepared(settings, source, splits, corpus, leakage(splits), length, unit)
    _write(prepared)
    return prepared


def _join(settings: Preparation, source: Source, splits: Mapping[str, Split]) -> Corpus | None:
    if settings.corpus is not None:
        return join_existing(splits.values(), settings.corpus, settings.strict)
    if source.passages is None:
        return None
    folder = settings.input.parent if settings.input.is_file() else settings.input
    return join_corpus(splits.values(), source.passages(folder), settings.output / "passages.jsonl", settings.strict)


def _with_prompt(row: Row, settings: Preparation, corpus: Corpus | None) -> Row:
    """Return the row with its rendered prompt; a published row whose history cannot be read keeps the one it has."""
    if settings.pin_corpus and corpus is not None:
        row = replace(row, corpus_sha256=corpus.sha256)
    if row.history is None or settings.template == "row":
        return row
    history = shown_history(row.history, settings.history, settings.history_answers)
    content = template_named(settings.template)([escape_tags(text) for text in history], escape_tags(row.question))
    return replace(row, messages=({"role": "user", "content": content},))


def _write(prepared: Prepared) -> None:
    output, splits = prepared.settings.output, prepared.splits
    for split in splits.values():
        if split.usable:
            name = f"{split.name}.parquet"
            prepared.files[name] = write_parquet(output / name, split.usable, split.name)
    rows = [row for split in splits.values() for row in split.rows]
    prepared.files["conversations.jsonl"] = _lines(output / "conversations.jsonl", rows, _turn_line)
    found = None if prepared.corpus is None else prepared.corpus.found

    def qrels(row: Row) -> str:
        gold = (name for name in row.gold_passage_ids or () if found is None or name in found)
        # The format has no way to write white space; such passages are left out, and counted by ``figures``.
        return "".join(f"{row.qid} 0 {name} 1\n" for name in gold if _is_word(row.qid) and _is_word(name))

    prepared.files["qrels.trec"] = _lines(output / "qrels.trec", rows, qrels)
    if prepared.corpus is not None and prepared.settings.corpus is None:
        prepared.files["passages.jsonl"] = prepared.corpus.passages


def _is_word(text: str) -> bool:
    return len(text.split()) == 1 and text == text.strip()


def _turn_line(row: Row) -> str:
    """Return a row in our own format, with the column by which retrieval is tabulated."""
    record = {name: value for name, value in row.to_json().items() if value is not None}
    for name in ("messages", "extra"):
        record.pop(name, None)
    return (
        json.dumps({**record, "history": list(row.history or ()), "dataset": row.data_source}, ensure_ascii=False)
        + "\n"
    )


def _lines(path: Path, rows: Iterable[Row], line: Callable[[Row], str]) -> int:
    """Write one or more lines a row, whole or not at all; return the number of lines."""
    unfinished, count = path.with_name(f".{path.name}.partial"), 0
    with unfinished.open("w", encoding="utf-8") as sink:
        for row in rows:
            text = line(row)
            count += text.count("\n")
            sink.write(text)
    os.replace(unfinished, path)
    return count


def file_sha256(path: Path) -> str:
    """Return the hash of a file's bytes."""
    with path.open("rb") as data:
        return hashlib.file_digest(data, "sha256").hexdigest()
