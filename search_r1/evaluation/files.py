"""Reading result files of every kind: ours, trajectories of a run, and the published validation JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from search_r1.codec import Codec
from search_r1.evaluation.results import IssuedQuery, ResultRow
from search_r1.published import check_row, read_predictions, response_text
from search_r1.rewards.structure import check_text
from search_r1.rewards.text import Normalise, normalise
from search_r1.rewards.view import EpisodeView
from search_r1.tags import SEARCH
from verl.errors import DataError
from verl.types import Trajectory

_SEARCHES = re.compile(rf"<{SEARCH}>((?:(?!<{SEARCH}>).)*?)</{SEARCH}>", re.DOTALL)


def read_results(path: Path, codec: Callable[[], Codec] | None = None, form: Normalise = normalise) -> list[ResultRow]:
    """Read ``results_step_N.jsonl``, ``step_N.jsonl`` (trajectories) or ``validation_results_stepN.json``.

    Trajectories hold token ids, so ``codec`` gives the tokenizer that reads them. Raises DataError naming file and
    line.
    """
    if path.suffix == ".json":
        return [_published(row, path, index) for index, row in enumerate(read_predictions(path))]
    rows = [_row(record, place, codec, form) for place, record in _records(path)]
    if not rows:
        raise DataError(f"{path}: no rows")
    seen: dict[tuple[str, int], int] = {}
    for number, row in enumerate(rows, start=1):
        if (row.qid, row.sample) in seen:
            raise DataError(
                f"{path}:{number}: sample {row.sample} of question {row.qid!r} occurs before, in line "
                f"{seen[row.qid, row.sample]}"
            )
        seen[row.qid, row.sample] = number
    return rows


def write_results(path: Path, rows: Sequence[ResultRow]) -> None:
    """Write a result file, replacing one that is there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f"{path.name}.tmp")
    lines = (json.dumps(row.to_json(), ensure_ascii=False) + "\n" for row in rows)
    scratch.write_text("".join(lines), encoding="utf-8")
    scratch.replace(path)


def _records(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except FileNotFoundError:
        raise DataError(f"{path}: no such file; give a results_step_N.jsonl or validation_results_stepN.json") from None
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 ({error.reason} at byte {error.start})") from None
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{path}:{number}: not a JSON object: {error}") from None
        if not isinstance(record, dict):
            raise DataError(f"{path}:{number}: a row must be a JSON object, found {type(record).__name__}")
        yield f"{path}:{number}", record


def _row(record: Mapping[str, Any], place: str, codec: Callable[[], Codec] | None, form: Normalise) -> ResultRow:
    try:
        if "segments" not in record:
            return ResultRow.from_json(record)
        if codec is None:
            raise DataError(f"{place}: holds token ids; name the model whose tokenizer reads them (--model FOLDER)")
        trajectory = Trajectory.from_record(record)
        return ResultRow.of(trajectory, EpisodeView.of(trajectory, codec()), form)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{place}: not a row of a result file ({error!r})") from error


def _published(record: Mapping[str, Any], path: Path, index: int) -> ResultRow:
    """Read a row of the published file: it has no name, no rewrite, no gold and no ids of what was found."""
    golden = check_row(record, f"{path}: row {index}")
    text = response_text(record)
    verdict = check_text(text)
    queries = tuple(IssuedQuery(query.strip()) for query in _SEARCHES.findall(text))
    return ResultRow(
        qid=f"row {index}",
        data_source=record["data_source"],
        question=record["question"],
        answers=tuple(golden),
        prediction=record["predicted_answer"],
        text=text,
        searches=queries,
        format_valid=verdict.valid,
        format_reason=verdict.reason,
    )
