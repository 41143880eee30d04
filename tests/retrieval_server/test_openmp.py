"""Threads of torch and FAISS sleep while they wait: the programs say so before either library is loaded."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.architecture.source import ROOT

CHECK = """
import os, sys
from retrieval_server.{module} import main
assert "torch" not in sys.modules and "faiss" not in sys.modules
status = main({arguments!r})
print(status, os.environ["OMP_WAIT_POLICY"])
"""
SERVE = ("__main__", ["--index_path", "no-such-index", "--corpus_path", "c"])
BUILD = ("build_index", ["--corpus_path", "no-such-corpus"])


@pytest.mark.parametrize("program", [SERVE, BUILD], ids=["server", "builder"])
@pytest.mark.parametrize(("given", "expected"), [({}, "PASSIVE"), ({"OMP_WAIT_POLICY": "ACTIVE"}, "ACTIVE")])
def test_waiting_threads_sleep_unless_the_user_says_otherwise(
    program: tuple[str, list[str]], given: dict[str, str], expected: str
) -> None:
    inherited = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    code = CHECK.format(module=program[0], arguments=program[1])
    done = subprocess.run(
        [sys.executable, "-c", code], env={**inherited, **given}, cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.stdout.split() == ["2", expected], done.stderr
