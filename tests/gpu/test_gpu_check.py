"""The dry run of ``scripts/gpu_check.sh``: every row that a CPU allows, with torch and transformers alone installed."""

from __future__ import annotations

import importlib.metadata as metadata
import os
import subprocess
import sys
from pathlib import Path, PurePath

import pytest
import torch
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
ON_A_CPU = {
    "bf16 log-prob parity", "fp32 log-prob parity", "FSDP2 step", "packed forward (SDPA)", "chunked head memory",
    "weight publish (hf)", "offload memory", "20 PPO steps", "tokens/s and MFU", "FSDP2 on two ranks",
}  # fmt: skip
NOT_ON_A_CPU = {
    "packed forward (flash)",
    "CUDA IPC",
    "vllm log-prob gap",
    "weight publish (vllm)",
    "vllm sleep and wake",
}


def needed(names: list[str]) -> dict[str, metadata.Distribution]:
    """Return the installed distributions that these need, themselves included."""
    found: dict[str, metadata.Distribution] = {}
    while names:
        name = names.pop().lower().replace("_", "-")
        if name in found:
            continue
        found[name] = metadata.distribution(name)
        requirements = [Requirement(text) for text in found[name].requires or []]
        names += [r.name for r in requirements if r.marker is None or r.marker.evaluate({"extra": ""})]
    return found


@pytest.fixture
def bare_python(tmp_path: Path) -> Path:
    """An interpreter that has torch, transformers and what they need, and nothing else."""
    site = tmp_path / "site"
    site.mkdir()
    for distribution in needed(["torch", "transformers"]).values():
        tops = {PurePath(file).parts[0] for file in distribution.files or () if ".." not in PurePath(file).parts}
        for top in tops - {"__pycache__"}:
            source = Path(str(distribution.locate_file(top)))
            if source.exists() and not (site / top).exists():
                (site / top).symlink_to(source)
    program = tmp_path / "python"
    program.write_text(f'#!/bin/sh\nPYTHONPATH="$PYTHONPATH:{site}" exec {sys.executable} -S "$@"\n')
    program.chmod(0o755)
    return program


def table(python: Path, *arguments: str) -> tuple[int, dict[str, tuple[str, str]], str]:
    """Run the script; return its status, row -> (outcome, figures), and its output."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        ["bash", str(ROOT / "scripts" / "gpu_check.sh"), *arguments],
        env={**environment, "PYTHON": str(python), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    rows = {}
    for line in done.stdout.splitlines():
        name, outcome, rest = line[:26].strip(), line[27:32].strip(), line[33:]
        if outcome in ("ok", "FAIL", "SKIP"):
            rows[name] = (outcome, rest.strip().partition("  ")[2])
    return done.returncode, rows, done.stdout + done.stderr


def test_every_row_runs_or_says_what_is_missing(bare_python: Path) -> None:
    status, rows, output = table(bare_python, "--tiny", "--device", "cpu")
    assert status == 0, output
    assert {name for name, (outcome, _) in rows.items() if outcome == "ok"} == ON_A_CPU, output
    assert {name for name, (outcome, _) in rows.items() if outcome == "SKIP"} == NOT_ON_A_CPU, output
    assert all(text.startswith("needs ") for outcome, text in rows.values() if outcome == "SKIP")
    assert "needs the package vllm" in rows["vllm log-prob gap"][1]
    assert "Traceback" not in output


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_a_machine_without_a_device_is_told_so() -> None:
    status, rows, output = table(Path(sys.executable))
    assert status == 2 and rows == {}
    assert "torch sees no CUDA device" in output


def test_a_row_that_fails_is_shown_and_the_others_go_on(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    import gpu_check
    from gpu_setting import Row, Setting, Skip

    def wrong(setting: Setting) -> str:
        raise AssertionError("gap 3.0")

    def unable(setting: Setting) -> str:
        raise Skip("a thing")

    rows = (Row("wrong", wrong), Row("unable", unable), Row("fine", lambda setting: "1 token"))
    setting = Setting.prepare(tmp_path, tiny=True)
    assert [gpu_check._run(row, setting, left_s=60.0) for row in rows] == ["FAIL", "SKIP", "ok"]
    assert gpu_check._run(rows[2], setting, left_s=-1.0) == "SKIP"
    printed = capsys.readouterr().out
    assert "AssertionError: gap 3.0 (test_gpu_check.py:" in printed and "needs a thing" in printed
    assert "needs time" in printed


@pytest.mark.gpu
def test_every_row_holds_on_a_device() -> None:
    status, rows, output = table(Path(sys.executable))
    assert status == 0, output
    assert {name for name, (outcome, _) in rows.items() if outcome == "ok"} >= ON_A_CPU - {"FSDP2 on two ranks"}, output
