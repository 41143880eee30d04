"""The whole job - service, Ray, search episodes - killed with SIGKILL at any moment ends as the uninterrupted one."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from run_records import figures
from safetensors.torch import load_file

ROOT = Path(__file__).resolve().parents[2]
STEPS = 4
SETTINGS = (
    *(
        "--config-name",
        "tiny_ppo",
        "actor_rollout_ref.rollout.deterministic=true",
        f"trainer.total_training_steps={STEPS}",
    ),
    *("trainer.save_freq=1", "trainer.test_freq=2", "trainer.logger=[]", "job.evaluate_bounds=false"),
    *("data.train_batch_size=8", "actor_rollout_ref.actor.ppo_mini_batch_size=8", "data.val_data_num=24"),
)


def launch(folder: Path, cache: Path) -> subprocess.Popen[str]:
    """Start ``job.py train`` in a process of its own."""
    return subprocess.Popen(
        [
            *(sys.executable, "scripts/job.py", "train", *SETTINGS),
            *(f"trainer.default_local_dir={folder}", f"job.cache_dir={cache}"),
        ],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )


def finish(folder: Path, cache: Path) -> str:
    """Run to the end; return what was printed."""
    with launch(folder, cache) as process:
        output, _ = process.communicate(timeout=900)
    assert process.returncode == 0, output
    return output


def newest(folder: Path) -> float:
    """Return when the run last wrote anything below its checkpoints and rollouts."""
    paths = [*folder.glob("global_step_*/**/*"), *folder.glob("rollouts/*")]
    return max((path.stat().st_mtime for path in paths if path.exists()), default=0.0)


def kill(folder: Path, cache: Path, delay_s: float) -> bool:
    """Kill the launcher ``delay_s`` after the run has written something new; False when it ended before."""
    before = newest(folder)
    with launch(folder, cache) as process:
        while process.poll() is None:
            written = newest(folder)
            if written > before and time.time() > written + delay_s:
                process.kill()
                process.communicate()  # ends only when every child that shares the pipe has ended too
                return True
            time.sleep(0.005)
    return False


@pytest.mark.slow
def test_the_main_job_killed_at_random_moments(tmp_path: Path) -> None:
    cache, whole, broken = (tmp_path / name for name in ("cache", "whole", "broken"))
    finish(whole, cache)
    chance, hits = random.Random(7), 0
    while hits < 3 and kill(broken, cache, chance.uniform(0.0, 1.5)):
        hits += 1
    assert hits, "no kill hit a living run"
    if not (broken / "summary.json").exists():
        finish(broken, cache)
    assert figures(broken) == figures(whole)
    assert [row["step"] for row in figures(broken)] == list(range(STEPS + 1))
    for step in range(1, STEPS + 1):
        one, two = ((run / "rollouts" / f"step_{step}.jsonl").read_text().splitlines() for run in (whole, broken))
        assert [json.loads(line)["segments"] for line in one] == [json.loads(line)["segments"] for line in two]
    weights = [load_file(run / f"global_step_{STEPS}" / "hf" / "model.safetensors") for run in (whole, broken)]
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
