"""The page of defects leaves none out, and every test that a page names exists."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from tests.architecture.source import ROOT

PAGE = ROOT / "docs" / "defects.md"
PAGES = sorted((ROOT / "docs").rglob("*.md"))
REFERENCE = re.compile(r"(tests/[\w/]+\.py)::(\w+)")
DEFECTS = 32


def rows() -> dict[int, str]:
    """Return the numbered rows of the table by number; a number that occurs twice is an error."""
    found = re.findall(r"^\| (\d+) \|(.*)\|$", PAGE.read_text(encoding="utf-8"), re.M)
    assert len(found) == len({number for number, _ in found})
    return {int(number): text for number, text in found}


@cache
def names_in(path: Path) -> frozenset[str]:
    """Return the names of the tests in a file; none when there is no such file."""
    if not path.is_file():
        return frozenset()
    tree = ast.parse(path.read_text(encoding="utf-8"))
    functions = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    return frozenset(node.name for node in functions if node.name.startswith("test_"))


def test_every_defect_has_its_row() -> None:
    assert list(rows()) == list(range(1, DEFECTS + 1))
    assert [number for number, text in rows().items() if text.count("|") != 2] == []


def test_every_row_names_a_test() -> None:
    assert [number for number, text in rows().items() if not REFERENCE.search(text.rpartition("|")[2])] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_named_tests_exist(page: Path) -> None:
    named = REFERENCE.findall(page.read_text(encoding="utf-8"))
    assert [f"{file}::{name}" for file, name in named if name not in names_in(ROOT / file)] == []
