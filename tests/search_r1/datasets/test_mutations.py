"""Files that break their format anywhere: every mistake is one of ours, with its place, and never a crash."""

import copy
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import test_importers as golden

from search_r1.datasets.catalog import SOURCES
from search_r1.datasets.draft import Dropped, Reason
from verl.errors import DataError

CASES: dict[str, Callable[[Path], None]] = {
    "topiocqa": golden.test_topiocqa,
    "qrecc": golden.test_qrecc,
    "inscit": golden.test_inscit,
    "md2d": golden.test_multidoc2dial,
    "doc2dial": golden.test_doc2dial,
    "faithdial": golden.test_faithdial,
    "cast2019": golden.test_cast_2019,
    "cast2021": golden.test_cast_2020_and_2021,
    "cast2022": golden.test_cast_2022_joins_the_paths_of_a_topic,
    "ikat2023": lambda folder: golden.test_ikat(folder, 2023, "1-2"),
    "coqa": golden.test_coqa,
    "canard": golden.test_canard,
    "quac": golden.test_quac,
    "orquac": golden.test_orquac,
    "nq": lambda folder: golden.test_single_turn(folder, "nq"),
    "own": golden.test_own_rows,
}
VALUES: tuple[Any, ...] = (None, 0, -1, 2.5, True, "", "x", "caf\ud800", [], [1], [None], {}, {"a": 1})
DELETED = object()
PER_SOURCE = 60


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every value inside."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*path, key)
        yield from places(inner, (*path, key))


def changed(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    whole = copy.deepcopy(value)
    inner = whole
    for key in path[:-1]:
        inner = inner[key]
    if new is DELETED:
        del inner[path[-1]]
    else:
        inner[path[-1]] = new
    return whole


def texts(path: Path) -> Iterator[str]:
    """Yield the file with each single change, one value at a time; the last ones are no JSON at all."""
    text = path.read_text()
    lines = path.suffix != ".json" and not text.startswith('{"C_')
    value = [json.loads(line) for line in text.splitlines()] if lines else json.loads(text)
    for place in places(value):
        for new in (*VALUES, DELETED):
            mutant = changed(value, place, new)
            yield "".join(json.dumps(item) + "\n" for item in mutant) if lines else json.dumps(mutant, indent=1)
    yield from (json.dumps(new) for new in VALUES)
    yield from (text[: len(text) // 2], text.replace(":", "", 1), "")


@pytest.mark.parametrize("source", CASES)
def test_no_change_of_a_file_is_a_crash(tmp_path: Path, source: str) -> None:
    CASES[source](tmp_path)
    files = [path for path in tmp_path.rglob("*") if path.suffix in (".json", ".jsonl", ".txt") and is_json(path)]
    mutants = [(path, text) for path in files for text in texts(path)]
    for path, text in random.Random(source).sample(mutants, min(PER_SOURCE, len(mutants))):
        original = path.read_text()
        path.write_text(text)
        try:
            read_all(source, tmp_path)
        except DataError as error:
            assert str(tmp_path) in str(error)
        finally:
            path.write_text(original)


def is_json(path: Path) -> bool:
    try:
        json.loads(path.read_text().splitlines()[0] if path.suffix != ".json" else path.read_text())
    except ValueError:
        return False
    return True


def read_all(source: str, folder: Path) -> None:
    """Read everything; what is dropped as malformed must name its file."""
    found = SOURCES[source]
    for file in found.split_files(folder):
        for draft in found.rows(file):
            if isinstance(draft, Dropped) and draft.reason is Reason.MALFORMED:
                assert draft.detail.startswith(str(folder)) and draft.place.startswith(str(folder)), draft
    if found.passages is not None:
        for passage in found.passages(folder):
            if isinstance(passage, Dropped):
                assert passage.detail.startswith(str(folder)), passage
                continue
            assert passage.id and passage.line()
