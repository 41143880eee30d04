"""The published format: parquet rows of Search-R1 and ChatR1.

Columns: ``data_source``, ``prompt`` (chat messages, with the conversation inside), ``question``, ``golden_answers``,
``reward_model.ground_truth.{target, rewrite, doc}``. ``target`` is what answers are scored against. Where files have
them, the columns of our own format (``qid``, ``history``, ``gold_passage_ids``, ``topic_shift`` ...) are read as there;
without a history only ``data.template=row`` can be used. ``extra_info.index`` is not unique over merged files, so rows
without a ``qid`` are named ``<data_source>:<file stem>:<position>``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from search_r1.datasets.fields import Fields
from search_r1.datasets.rows import DEFAULT_SOURCE, Row
from verl.errors import DataError

_BATCH = 1024


def read_parquet(path: Path, prompt_key: str = "prompt") -> Iterator[tuple[str, Row]]:
    """Yield (place, row) in file order. Raises DataError naming file and row (from 0)."""
    for position, fields in parquet_records(path):
        yield fields.place, row_of(fields, position, prompt_key)


def parquet_records(path: Path) -> Iterator[tuple[str, Fields]]:
    """Yield (file stem and position, record) in file order; raises DataError naming file and row of damage."""
    import pyarrow as pa  # imported here so that the task loads without it where only JSONL is used
    import pyarrow.parquet as pq

    try:
        table = pq.ParquetFile(path)
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path}: not a readable parquet file: {error}") from error
    index, batches = 0, table.iter_batches(batch_size=_BATCH)
    while True:
        try:
            records = next(batches).to_pylist()
        except StopIteration:
            return
        except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
            raise DataError(f"{path}: damaged in or after row {index}: {error}") from error
        for record in records:
            yield f"{path.stem}:{index}", Fields(record, f"{path}: row {index}")
            index += 1


def row_of(fields: Fields, position: str, prompt_key: str = "prompt") -> Row:
    """Return the row of one record; raises DataError naming its place, the column and the value."""
    source = fields.text_or_none("data_source") or DEFAULT_SOURCE
    truth = _ground_truth(fields)
    golden = fields.texts_or_none("golden_answers")
    if truth.raw("target") is None and golden is None:
        raise fields.fail("golden_answers", "or reward_model.ground_truth.target must hold the references")
    answers = golden if truth.raw("target") is None else truth.texts("target")
    assert answers is not None
    has_history = fields.raw("history") is not None
    return Row(
        qid=fields.identifier("qid") or f"{source}:{position}",
        question=fields.text("question"),
        answers=answers,
        history=fields.history("history") if has_history else None,
        conv_id=fields.identifier("conv_id"),
        turn_id=fields.integer_or_none("turn_id"),
        rewrite=truth.text_or_none("rewrite"),
        gold_passage_ids=fields.texts_or_none("gold_passage_ids"),
        gold_text=truth.text_or_none("doc"),
        topic_shift=fields.flag_or_none("topic_shift"),
        kind=fields.text_or_none("kind"),
        answerable=fields.flag_or_none("answerable"),
        dialogue_act=fields.text_or_none("dialogue_act"),
        data_source=source,
        corpus_sha256=fields.text_or_none("corpus_sha256"),
        messages=_messages(fields, prompt_key),
        extra=_notes(fields) | ({} if golden is None or golden == answers else {"golden_answers": list(golden)}),
    )


def _ground_truth(fields: Fields) -> Fields:
    reward_model = fields.raw("reward_model")
    truth = reward_model.get("ground_truth") if isinstance(reward_model, Mapping) else None
    if truth is None:
        return Fields({}, f"{fields.place}: reward_model.ground_truth")
    if not isinstance(truth, Mapping):
        raise fields.fail("reward_model", "must be {style, ground_truth: {target, rewrite, doc}}")
    return Fields(truth, f"{fields.place}: reward_model.ground_truth")


def _notes(fields: Fields) -> dict[str, Any]:
    """Return what the importer of the source noted (``extra_info.notes``, a JSON object as text)."""
    info = fields.object_or_none("extra_info")
    text = None if info is None else info.text_or_none("notes")
    if info is None or text is None:
        return {}
    try:
        notes = json.loads(text)
    except ValueError as error:
        raise info.fail("notes", f"must be a JSON object: {error}") from None
    if not isinstance(notes, dict):
        raise info.fail("notes", "must be a JSON object")
    return notes


def _messages(fields: Fields, prompt_key: str) -> tuple[Mapping[str, str], ...] | None:
    value: Any = fields.raw(prompt_key)
    if value is None:
        return None
    ok = isinstance(value, list) and value and all(isinstance(m, Mapping) for m in value)
    if not ok or not all(isinstance(m.get(key), str) for m in value for key in ("role", "content")):
        raise fields.fail(prompt_key, "must be a non-empty list of {role, content}")
    return tuple({"role": m["role"], "content": m["content"]} for m in value)
