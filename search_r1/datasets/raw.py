"""Reading files as their publishers wrote them (JSON, JSON lines, tables), so that every record knows its line."""

from __future__ import annotations

import csv
import json
import json.decoder
import json.scanner
from bisect import bisect_right
from collections.abc import Iterator
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

from search_r1.datasets.fields import Fields
from verl.errors import DataError

csv.field_size_limit(1 << 27)  # passages of tables are longer than the module's default of 128 KiB


class Located(dict[str, Any]):
    """A JSON object that knows where its text begins."""

    file: Path
    line: int
    """From 1."""


class _LocatingDecoder(json.JSONDecoder):
    """Decodes every object as ``Located``. The scanner in Python is used, since the one in C hands out no positions."""

    def __init__(self, file: Path, text: str) -> None:
        super().__init__()
        starts = [0, *accumulate(len(line) + 1 for line in text.split("\n"))]  # offsets at which lines begin

        def parse_object(text_and_start: tuple[str, int], *options: Any) -> tuple[Located, int]:
            value, end = json.decoder.JSONObject(text_and_start, *options)  # type: ignore[attr-defined]
            located = Located(value)
            located.file, located.line = file, bisect_right(starts, text_and_start[1] - 1)
            return located, end

        self.parse_object = parse_object
        self.scan_once = json.scanner.py_make_scanner(self)  # type: ignore[attr-defined]


def read_text(path: Path) -> str:
    """Return the text of a file; raises DataError naming it when it is missing or no UTF-8."""
    try:
        return path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise DataError(f"{path}:{line}: not UTF-8 ({error.reason})") from None


def read_json(path: Path) -> Any:
    """Return the value of a JSON file, its objects as ``Located``; raises DataError naming file and line."""
    text = read_text(path)
    try:
        return _LocatingDecoder(path, text).decode(text)
    except json.JSONDecodeError as error:
        raise DataError(f"{path}:{error.lineno}: not JSON: {error.msg} (column {error.colno})") from None
    except RecursionError:
        raise DataError(f"{path}: not JSON that can be read (nested too deeply)") from None


def read_object(path: Path) -> Fields:
    """Return the object that a JSON file holds."""
    value = read_json(path)
    if not isinstance(value, Located):
        raise DataError(f"{path}: must hold an object, holds a {type(value).__name__}")
    return Fields(value, f"{path}:{value.line}")


def read_records(path: Path) -> Iterator[Fields | DataError]:
    """Yield the records of a JSON array or, by any other ending than ``.json``, of JSON lines.

    What is no object is yielded as the error that names its line; a file that is no JSON at all is raised.
    """
    if path.suffix == ".json":
        values = read_json(path)
        if not isinstance(values, list):
            raise DataError(f"{path}: must hold a list of records, holds a {type(values).__name__}")
        for index, value in enumerate(values):
            yield _record(value, f"{path}: record {index}")
        return
    with path.open("rb") as lines:  # line by line: a corpus does not fit into memory
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                value = json.loads(line.decode("utf-8-sig"), object_hook=partial(_at, path, number))
            except (ValueError, RecursionError) as error:
                yield DataError(f"{path}:{number}: not JSON: {error}")
            else:
                yield _record(value, f"{path}:{number}")


def _at(path: Path, line: int, pairs: dict[str, Any]) -> Located:
    located = Located(pairs)
    located.file, located.line = path, line
    return located


def _record(value: Any, place: str) -> Fields | DataError:
    if isinstance(value, Located):
        return Fields(value, f"{value.file}:{value.line}")
    return DataError(f"{place}: must be an object, is a {type(value).__name__}")


def read_table(path: Path, columns: tuple[str, ...] = ()) -> Iterator[Fields | DataError]:
    """Yield the rows of a tab-separated table as records of strings; ``columns`` names those of one without a header.

    A row with another number of cells is yielded as the error that names its line.
    """
    with path.open(encoding="utf-8-sig", newline="") as lines:
        reader = csv.reader(lines, delimiter="\t")
        try:
            names = columns or tuple(next(reader, ()))
            for cells in reader:
                place = f"{path}:{reader.line_num}"
                if len(cells) == len(names):
                    yield Fields(dict(zip(names, cells, strict=True)), place)
                else:
                    yield DataError(f"{place}: has {len(cells)} cells, the table has {len(names)} columns")
        except (csv.Error, UnicodeDecodeError) as error:
            raise DataError(f"{path}:{reader.line_num + 1}: not a table that can be read: {error}") from None


def read_qrels(path: Path, at_least: int = 1) -> dict[str, tuple[str, ...]]:
    """Return question id -> ids of the passages judged ``at_least`` so relevant, in file order (TREC's format)."""
    relevant: dict[str, list[str]] = {}
    for number, line in enumerate(read_text(path).splitlines(), start=1):
        cells = line.split()
        if not cells:
            continue
        if len(cells) != 4 or not cells[3].lstrip("-").isdigit():
            raise DataError(f"{path}:{number}: must be 'question 0 passage relevance'; found {line[:80]!r}")
        if int(cells[3]) >= at_least:
            relevant.setdefault(cells[0], []).append(cells[2])
    return {qid: tuple(passages) for qid, passages in relevant.items()}
