"""Every benchmark that is a program starts: its imports are there, and it says how it is used."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
PROGRAMS = sorted(path.name for path in BENCHMARKS.glob("*.py") if "parse_args(" in path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", PROGRAMS)
def test_it_says_how_it_is_used(name: str) -> None:
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / name), "--help"], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0 and f"usage: {name}" in done.stdout, done.stderr
