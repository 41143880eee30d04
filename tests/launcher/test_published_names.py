"""The published script names start our jobs with the recipe they stand for, also from Slurm's copy of the file."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RECIPE = ["--config-name", "chatr1_3b_topiocqa"]
JOBS = [
    ("train_ppo_3b_topiocqa_retrieval.sh", "train_ppo.sh", RECIPE),
    ("train_grpo.sh", "train_ppo.sh", ["--config-name", "search_r1_grpo"]),
    ("eval_topiocqa.sh", "eval.sh", [*RECIPE, "max_turns=4", "data.max_prompt_length=4096"]),
]
SERVE = [
    "--index_path",
    "collection/topiocqa/index/e5_Flat.index",
    "--corpus_path",
    "collection/topiocqa.jsonl",
    "--topk",
    "3",
    "--retriever_name",
    "e5",
    "--retriever_model",
    "intfloat/e5-base-v2",
    "--faiss_gpu",
]


def _checkout(folder: Path, target: str) -> None:
    """A checkout in which ``target`` only prints its name and arguments, one a line."""
    (folder / "scripts").mkdir(parents=True)
    (folder / "scripts" / "setup.sh").touch()
    (folder / target).write_text('printf "%s\\n" "$(basename "$0")" "$@"\n')


def _run(script: Path, **environment: str) -> list[str]:
    command = ["bash", str(script), "a.b=c d", "--check"]
    done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


@pytest.mark.parametrize(
    ("name", "target", "arguments"), [*JOBS, ("retrieval_launch_topiocqa.sh", "retrieval_launch.sh", SERVE)]
)
def test_name_stands_for_its_command(tmp_path: Path, name: str, target: str, arguments: list[str]) -> None:
    _checkout(tmp_path / "checkout", target)
    script = Path(shutil.copy(ROOT / name, tmp_path / "checkout"))
    assert _run(script) == [target, *arguments, "a.b=c d", "--check"]


@pytest.mark.parametrize(("name", "target", "arguments"), JOBS)
def test_copy_that_slurm_runs_finds_the_checkout(tmp_path: Path, name: str, target: str, arguments: list[str]) -> None:
    _checkout(tmp_path / "checkout", target)
    (tmp_path / "spool").mkdir()
    script = Path(shutil.copy(ROOT / name, tmp_path / "spool" / "slurm_script"))
    printed = _run(script, SLURM_SUBMIT_DIR=str(tmp_path / "checkout"))
    assert printed == [target, *arguments, "a.b=c d", "--check"]
    assert (ROOT / "configs" / f"{arguments[1]}.yaml").is_file()
