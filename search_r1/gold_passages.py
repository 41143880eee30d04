"""The text of gold passages, for the pipeline that is handed them: from the row itself, or looked up in the corpus."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from search_r1.datasets.rows import Row
from search_r1.search_wire import split_contents
from verl.errors import DataError
from verl.types import Document

logger = logging.getLogger(__name__)

_KEY = "gold_documents"


def with_gold_documents(rows: Sequence[Row], passages: Path | None) -> list[Row]:
    """Return the rows with their gold passages attached, where known; raises DataError naming file and line."""
    wanted = {identity for row in rows for identity in row.gold_passage_ids or ()}
    found = look_up(passages, wanted) if passages is not None and wanted else {}
    if len(found) < len(wanted):
        where = "evaluation.passages is not set" if passages is None else f"not in {passages}"
        logger.warning("oracle_passage: %d of %d gold passages: %s", len(wanted) - len(found), len(wanted), where)
    return [_attach(row, found) for row in rows]


def _attach(row: Row, found: Mapping[str, tuple[str, str]]) -> Row:
    documents = [[i, *found[i]] for i in row.gold_passage_ids or () if i in found]
    if not documents and row.gold_text:
        documents = [["gold", *split_contents(row.gold_text)]]
    return replace(row, extra={**row.extra, _KEY: documents}) if documents else row


def gold_documents(row: Row) -> tuple[Document, ...]:
    """Return the attached passages; none when they are not known."""
    return tuple(Document(*values) for values in row.extra.get(_KEY, ()))


def look_up(path: Path, wanted: Iterable[str]) -> dict[str, tuple[str, str]]:
    """Return id -> (title, text) of the wanted passages of a corpus file (JSON lines)."""
    missing, found = set(wanted), dict[str, tuple[str, str]]()
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if not missing:
                    break
                if not line.strip():
                    continue
                identity, title, text = _passage(line, f"{path}:{number}")
                if identity in missing:
                    missing.discard(identity)
                    found[identity] = title, text
    except OSError as error:
        raise DataError(f"evaluation.passages={path}: cannot be read ({error.strerror}); name the corpus") from error
    except UnicodeDecodeError as error:
        raise DataError(
            f"evaluation.passages={path}: no UTF-8 text ({error.reason}); unpack the corpus into JSON lines"
        ) from error
    return found


def _passage(line: str, place: str) -> tuple[str, str, str]:
    try:
        record: Any = json.loads(line)
        if "contents" in record:
            return (str(record["id"]), *split_contents(record["contents"]))
        return str(record["id"]), str(record.get("title", "")), str(record["text"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{place}: no passage with id and contents, or title and text ({error!r})") from error
