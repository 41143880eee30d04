"""Writing rows as the published parquet, which ``search_r1.datasets.parquet`` reads back unchanged.

The columns of the published files come first and are complete, so that other trainers can use a file as it is; our own
columns follow. What a row lacks is null, never an empty string: an empty gold passage would be found in every text.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Any

from search_r1.datasets.rows import Row

_BATCH = 4096
ABILITY = "fact-reasoning"


def record_of(row: Row, split: str, index: int) -> dict[str, Any]:
    """Return the record of a row; ``index`` is its position in its split."""
    notes = {name: note for name, note in row.extra.items() if name != "golden_answers"}
    return {
        "data_source": row.data_source,
        "prompt": None if row.messages is None else [dict(message) for message in row.messages],
        "question": row.question,
        "golden_answers": list(row.extra.get("golden_answers", row.answers)),
        "ability": ABILITY,
        "reward_model": {
            "style": "rule",
            "ground_truth": {"target": list(row.answers), "rewrite": row.rewrite, "doc": row.gold_text},
        },
        "extra_info": {
            "split": split,
            "index": index,
            "notes": json.dumps(notes, ensure_ascii=False) if notes else None,
        },
        "qid": row.qid,
        "history": None if row.history is None else list(row.history),
        "conv_id": row.conv_id,
        "turn_id": row.turn_id,
        "gold_passage_ids": None if row.gold_passage_ids is None else list(row.gold_passage_ids),
        "topic_shift": row.topic_shift,
        "kind": row.kind,
        "answerable": row.answerable,
        "dialogue_act": row.dialogue_act,
        "corpus_sha256": row.corpus_sha256,
    }


def write_parquet(path: Path, rows: Iterable[Row], split: str) -> int:
    """Write the rows, whole or not at all; return their number."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    unfinished = path.with_name(f".{path.name}.partial")
    records = (record_of(row, split, index) for index, row in enumerate(rows))
    count, schema = 0, _schema()
    with pq.ParquetWriter(unfinished, schema) as writer:
        while batch := list(islice(records, _BATCH)):
            writer.write_table(pa.Table.from_pylist(batch, schema=schema))
            count += len(batch)
    os.replace(unfinished, path)
    return count


def _schema() -> Any:
    """Return the columns with their types: a column that is null in every row keeps its own."""
    import pyarrow as pa

    text, texts = pa.string(), pa.list_(pa.string())
    truth = pa.struct([("target", texts), ("rewrite", text), ("doc", text)])
    return pa.schema(
        [
            ("data_source", text),
            ("prompt", pa.list_(pa.struct([("role", text), ("content", text)]))),
            ("question", text),
            ("golden_answers", texts),
            ("ability", text),
            ("reward_model", pa.struct([("style", text), ("ground_truth", truth)])),
            ("extra_info", pa.struct([("split", text), ("index", pa.int64()), ("notes", text)])),
            ("qid", text),
            ("history", texts),
            ("conv_id", text),
            ("turn_id", pa.int64()),
            ("gold_passage_ids", texts),
            ("topic_shift", pa.bool_()),
            ("kind", text),
            ("answerable", pa.bool_()),
            ("dialogue_act", text),
            ("corpus_sha256", text),
        ]
    )
