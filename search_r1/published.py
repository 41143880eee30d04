"""Scoring a published validation file (``validation_results_step<N>.json``) without model or service.

The figures are those of the published scorer: multiset F1 against the first reference, null answers score 0, the
relaxed structure check, closed search blocks counted in the raw text. Beside them stands F1 against the best reference.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from search_r1.rewards.structure import check_text
from search_r1.rewards.text import best, f1
from search_r1.tags import SEARCH
from verl.errors import DataError

_SEARCH, _SEARCH_END = f"<{SEARCH}>", f"</{SEARCH}>"
_ASSISTANT_MARK = "<|im_start|>assistant"


@dataclass(frozen=True, slots=True)
class ScoredRow:
    """One row of ``<stem>_eval_f1.json``; ``f1_max`` is ours, the rest is published."""

    data_source: str
    question: str
    golden_answer: str
    """The first reference."""
    predicted_answer: str | None
    f1_score: float
    """Against the first reference."""
    format_valid: bool
    format_reason: str
    search_count: int
    f1_max: float
    """Against the best reference."""


def predictions_path(text: str) -> Path:
    """Return the path of a predictions file; ``.json`` is appended when missing."""
    return Path(text if text.endswith(".json") else f"{text}.json")


def read_predictions(path: Path) -> list[Mapping[str, Any]]:
    """Read the list of rows; raises DataError naming the file and what is wrong."""
    try:
        rows = json.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise DataError(f"{path}: no such file; give the validation_results_step<N>.json of a run") from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: not JSON: {error}") from None
    if not isinstance(rows, list) or not rows:
        raise DataError(f"{path}: must hold a list of at least one object")
    for index, row in enumerate(rows):
        if not isinstance(row, dict):
            raise DataError(f"{path}: row {index}: must be an object, found {_shown(row)}")
    return rows


def score_rows(rows: Sequence[Mapping[str, Any]], source: Path) -> list[ScoredRow]:
    """Score every row in order; raises DataError naming file, row (from 0) and field."""
    return [_score_row(row, f"{source}: row {index}") for index, row in enumerate(rows)]


def check_row(row: Mapping[str, Any], place: str) -> list[str]:
    """Return the references of a published row; raises DataError naming the place and the field that is wrong."""
    for name in ("data_source", "question", "golden_answers", "predicted_answer", "raw_predicted_answer"):
        if name not in row:
            raise DataError(f"{place}: field {name!r} is missing")
    for name in ("data_source", "question"):
        if not _is_text(row[name]):
            raise DataError(f"{place}: {name} must be a string of valid Unicode, found {_shown(row[name])}")
    golden = [row["golden_answers"]] if isinstance(row["golden_answers"], str) else row["golden_answers"]
    if not isinstance(golden, list) or not golden or not all(map(_is_text, golden)):
        raise DataError(
            f"{place}: golden_answers must be a non-empty list of strings of valid Unicode, found {_shown(golden)}"
        )
    for name in ("predicted_answer", "raw_predicted_answer"):
        if row[name] is not None and not _is_text(row[name]):
            raise DataError(f"{place}: {name} must be a string of valid Unicode or null, found {_shown(row[name])}")
    return golden


def response_text(row: Mapping[str, Any]) -> str:
    """Return the text behind the prompt: that behind the first assistant marker where the raw text has one."""
    raw: str = row["raw_predicted_answer"] or ""
    return raw.partition(_ASSISTANT_MARK)[2] if _ASSISTANT_MARK in raw else raw


def _score_row(row: Mapping[str, Any], place: str) -> ScoredRow:
    golden = check_row(row, place)
    predicted, raw = row["predicted_answer"], row["raw_predicted_answer"] or ""
    verdict = check_text(response_text(row))
    return ScoredRow(
        data_source=row["data_source"],
        question=row["question"],
        golden_answer=golden[0],
        predicted_answer=predicted,
        f1_score=best(f1, predicted, golden[:1]),
        format_valid=verdict.valid,
        format_reason=verdict.reason,
        search_count=_closed_searches(raw),
        f1_max=best(f1, predicted, golden),
    )


def _closed_searches(text: str) -> int:
    """Count what ``<search>.*?</search>`` matches, in one pass however many blocks are never closed."""
    count, start = 0, text.find(_SEARCH)
    while start >= 0 and (end := text.find(_SEARCH_END, start)) >= 0:
        count, start = count + 1, text.find(_SEARCH, end)
    return count


def _is_text(value: Any) -> bool:
    """True for a string that can be written: half a surrogate pair, which JSON can carry, cannot."""
    if not isinstance(value, str):
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _shown(value: Any) -> str:
    return repr(value)[:80]


def write_scored(scored: Sequence[ScoredRow], predictions: Path) -> Path:
    """Write ``<stem>_eval_f1.json`` beside the predictions and return its path."""
    path = predictions.with_name(f"{predictions.stem}_eval_f1.json")
    path.write_text(json.dumps([asdict(row) for row in scored], indent=2, ensure_ascii=False), encoding="utf-8")
    return path


def table(scored: Sequence[ScoredRow], predictions: Path) -> Iterator[str]:
    """Yield the lines of the published markdown table: a row per dataset, then the unweighted mean of the rows."""
    columns = ("Dataset", "Examples", "Avg F1", "Avg F1 (best reference)", "Format Accuracy", "Avg #Search", "File")
    yield f"| {' | '.join(columns)} |"
    yield f"|{'|'.join('---' for _ in columns)}|"
    means = []
    for name in dict.fromkeys(row.data_source for row in scored):
        rows = [row for row in scored if row.data_source == name]
        figures = (
            sum(row.f1_score for row in rows) / len(rows),
            sum(row.f1_max for row in rows) / len(rows),
            sum(row.format_valid for row in rows) / len(rows),
            sum(row.search_count for row in rows) / len(rows),
        )
        means.append(figures)
        yield _line(name, str(len(rows)), figures, predictions.name)
    if means:
        yield _line("Meta-Average", str(len(scored)), [sum(c) / len(means) for c in zip(*means, strict=True)], "-")


def _line(name: str, examples: str, figures: Sequence[float], file: str) -> str:
    return f"| {name} | {examples} | {' | '.join(f'{value:.4f}' for value in figures)} | {file} |"
