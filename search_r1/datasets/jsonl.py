"""Our own format: one JSON object per line, one question per object.

    {"qid": "c1_2", "conv_id": "c1", "turn_id": 2, "question": "When?", "history": ["Who wrote it?", "Ann Lee."],
     "answers": ["1990"], "rewrite": "When did Ann Lee write it?", "gold_passage_ids": ["d7"], "topic_shift": false}

``qid``, ``question`` and ``answers`` are required; ``history`` alternates question and answer, oldest first. Optional:
``conv_id``, ``turn_id`` (from 1), ``rewrite``, ``gold_passage_ids``, ``gold_text``, ``topic_shift``, ``kind`` (of
question), ``answerable``, ``dialogue_act`` (of the reference reply), ``data_source`` and ``corpus_sha256`` (which
corpus the passages come from; checked against the retrieval service). Evaluation is broken down by the marks.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from search_r1.datasets.fields import Fields
from search_r1.datasets.rows import DEFAULT_SOURCE, Row
from verl.errors import DataError
from verl.registry import closest

logger = logging.getLogger(__name__)

KEYS = [
    *("qid", "question", "answers", "history", "conv_id", "turn_id", "rewrite"),
    *("gold_passage_ids", "gold_text", "topic_shift", "kind", "answerable", "dialogue_act"),
    *("data_source", "corpus_sha256"),
]


def read_jsonl(path: Path, prompt_key: str = "prompt") -> Iterator[tuple[str, Row]]:
    """Yield (place, row) in file order; blank lines are skipped. Raises DataError naming file and line.

    ``prompt_key`` is for files with rendered prompts and has no meaning here.
    """
    strangers = Strangers()
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            place = f"{path}:{number}"
            record = _parse(line, place)
            strangers.look(record, place)
            yield place, row_of(Fields(record, place))


class Strangers:
    """Warns of columns that are not read, each once."""

    def __init__(self) -> None:
        self._seen: set[str] = set()

    def look(self, columns: Iterable[str], place: str) -> None:
        """Warn of what is new among the columns of a row."""
        for name in sorted(set(columns) - set(KEYS) - self._seen):
            self._seen.add(name)
            logger.warning("%s: column %r is not read%s", place, name, closest(name, KEYS))


def _parse(line: bytes, place: str) -> dict[str, Any]:
    try:
        record = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise DataError(f"{place}: not UTF-8 ({error.reason} at byte {error.start} of the line)") from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{place}: not a JSON object: {error}") from None
    if not isinstance(record, dict):
        raise DataError(f"{place}: a row must be a JSON object, found {type(record).__name__}")
    return record


def row_of(fields: Fields) -> Row:
    """Return the row of one object; raises DataError naming its place, the column and the value."""
    qid = fields.identifier("qid")
    if qid is None:
        raise fields.fail("qid", "is required")
    return Row(
        qid=qid,
        question=fields.text("question"),
        answers=fields.texts("answers"),
        history=fields.history("history"),
        conv_id=fields.identifier("conv_id"),
        turn_id=fields.integer_or_none("turn_id"),
        rewrite=fields.text_or_none("rewrite"),
        gold_passage_ids=fields.texts_or_none("gold_passage_ids"),
        gold_text=fields.text_or_none("gold_text"),
        topic_shift=fields.flag_or_none("topic_shift"),
        kind=fields.text_or_none("kind"),
        answerable=fields.flag_or_none("answerable"),
        dialogue_act=fields.text_or_none("dialogue_act"),
        data_source=fields.text_or_none("data_source") or DEFAULT_SOURCE,
        corpus_sha256=fields.text_or_none("corpus_sha256"),
    )
