"""Killed at any moment and started again, a deterministic run ends as the uninterrupted one, figure for figure."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from run_records import figures, toy_run
from safetensors.torch import load_file

Start = Callable[[list[str]], "subprocess.Popen[str]"]
Run = Callable[[list[str]], dict[str, Any]]
STEPS = 6
SETTINGS = (
    f"trainer.total_training_steps={STEPS}",
    "trainer.save_freq=1",
    "trainer.test_freq=3",
    "algorithm.kl_ctrl.type=adaptive",
    "algorithm.kl_ctrl.kl_coef=0.01",
    "algorithm.kl_ctrl.target_kl=0.001",
    "algorithm.kl_ctrl.horizon=20",
    "toy_prompts=7",
    "trainer.logger=[]",
)
"""An adaptive coefficient and an epoch that ends between two saves: state that is easily forgotten."""


def complete(start: Start, arguments: list[str]) -> None:
    with start(arguments) as process:
        output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output


def in_folder(arguments: list[str], folder: Path) -> list[str]:
    return [*arguments, f"trainer.default_local_dir={folder}"]


def kill_when(start: Start, arguments: list[str], moment: Callable[[], bool]) -> bool:
    """Start a run and SIGKILL it at the first moment that is true; False when it ended before."""
    with start(arguments) as process:
        while process.poll() is None:
            if moment():
                process.kill()
                process.communicate()
                return True
            time.sleep(0.002)
        output, _ = process.communicate()
    assert process.returncode == 0, output
    return False


def saves(folder: Path) -> set[Path]:
    """Return the checkpoint folders, complete or not."""
    return set(folder.glob("global_step_*"))


def while_saving(folder: Path, skip: int) -> Callable[[], bool]:
    """A new checkpoint has files and is not complete, after ``skip`` others of this session."""
    known = saves(folder)

    def moment() -> bool:
        new = saves(folder) - known
        return len(new) > skip and any(not (path / "COMPLETE").exists() and any(path.iterdir()) for path in new)

    return moment


def after_rollout(folder: Path, step: int, delay_s: float) -> Callable[[], bool]:
    """``delay_s`` after the episodes of a step were written: somewhere in scoring, update, publishing, saving."""
    path = folder / "rollouts" / f"step_{step}.jsonl"
    return lambda: path.exists() and time.time() > path.stat().st_mtime + delay_s


def assert_same_run(reference: Path, other: Path) -> None:
    """Every figure, every rollout, and the final weights are equal."""
    expected, found = figures(reference), figures(other)
    assert [row["step"] for row in found] == list(range(STEPS + 1))
    assert found == expected
    for step in range(1, STEPS + 1):
        files = ((folder / "rollouts" / f"step_{step}.jsonl").read_text() for folder in (reference, other))
        for one, two in zip(*(text.splitlines() for text in files), strict=True):
            assert json.loads(one)["segments"] == json.loads(two)["segments"]
    weights = [load_file(folder / f"global_step_{STEPS}" / "hf" / "model.safetensors") for folder in (reference, other)]
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


@pytest.fixture
def arguments(toy_arguments: list[str]) -> list[str]:
    return [*toy_arguments, *SETTINGS]


@pytest.fixture(scope="module")
def whole(start: Start, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an uninterrupted run."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    complete(start, in_folder([*toy_run(tiny_model), *SETTINGS], folder))
    return folder


def drill(start: Start, arguments: list[str], broken: Path, kills: int, seed: int) -> int:
    """Kill ``kills`` times, alternately in a step and while saving, then let the run end; return how many hit."""
    chance = random.Random(seed)
    for attempt in range(kills):
        done = len(list((broken / "rollouts").glob("step_*.jsonl")))
        if attempt % 2 == 0:
            moment = after_rollout(broken, min(STEPS, done + chance.randint(0, 2) or 1), chance.uniform(0.0, 0.4))
        else:
            moment = while_saving(broken, skip=chance.randrange(2))
        if not kill_when(start, arguments, moment):
            return attempt
    complete(start, arguments)
    return kills


def test_two_kills_one_of_them_while_saving(start: Start, arguments: list[str], whole: Path, tmp_path: Path) -> None:
    assert drill(start, arguments, tmp_path / "run", kills=2, seed=0) == 2
    assert_same_run(whole, tmp_path / "run")


@pytest.mark.slow
def test_ten_kills(start: Start, arguments: list[str], whole: Path, tmp_path: Path) -> None:
    """Runs are drilled one after the other until ten kills have hit; each must end as the uninterrupted one."""
    hits = 0
    for number in range(10):
        folder = tmp_path / f"run{number}"
        hits += drill(start, in_folder(arguments, folder), folder, kills=min(4, 10 - hits), seed=number)
        assert_same_run(whole, folder)
        if hits >= 10:
            return
    pytest.fail(f"only {hits} kills hit a living run")


def test_sigterm_saves_and_the_run_goes_on(start: Start, arguments: list[str], whole: Path, tmp_path: Path) -> None:
    arguments, broken = [*arguments, "trainer.save_freq=-1"], tmp_path / "run"
    with start(arguments) as process:
        while not (broken / "rollouts" / "step_2.jsonl").exists() and process.poll() is None:
            time.sleep(0.002)
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=300)
    assert process.returncode == 128 + signal.SIGTERM, output
    (saved,) = saves(broken)
    assert (saved / "COMPLETE").exists() and not (broken / "summary.json").exists()
    complete(start, arguments)
    assert_same_run(whole, broken)


def test_an_outage_keeps_the_last_good_step_and_the_run_goes_on(
    run: Run, arguments: list[str], whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from verl.errors import HealthError
    from verl.trainer.main_ppo import main
    from verl.workers.rollout.manager import Rollouts

    generate = Rollouts.generate

    def outage(self: Rollouts, prompts: Any, step: int, *args: Any, **options: Any) -> Any:
        if step == 3:
            raise HealthError("every search failed")
        return generate(self, prompts, step, *args, **options)

    arguments, broken = [*arguments, "trainer.save_freq=-1"], tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(Rollouts, "generate", outage)
        assert main(arguments) == 2
    (saved,) = saves(broken)
    assert saved.name == "global_step_2" and (saved / "COMPLETE").exists()
    run(arguments)
    assert_same_run(whole, broken)


def test_a_finished_run_is_not_run_again_and_can_be_made_longer(
    run: Run, arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from verl.trainer.main_ppo import main

    short = [*arguments, "trainer.total_training_steps=2", "trainer.test_freq=-1"]
    first, second = run(short), run(short)
    assert second["folder"] == first["folder"] + "-2"
    assert figures(Path(first["folder"])) == figures(Path(second["folder"]))
    assert main([*arguments, "trainer.total_training_steps=1", f"trainer.resume={first['folder']}"]) == 2
    assert "asks for 1 steps, but" in capsys.readouterr().err
    longer = run([*arguments, "trainer.total_training_steps=3", f"trainer.resume={first['folder']}"])
    assert longer["folder"] == first["folder"] and longer["steps"] == 3
    assert [row["step"] for row in figures(Path(first["folder"]))] == [0, 1, 2, 3]


def test_a_refused_checkpoint_leaves_the_run_as_it_was(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    from toy_task import ToyTask

    from verl.trainer.main_ppo import main

    short = [*arguments, "trainer.total_training_steps=3"]
    folder = Path(run(short)["folder"])
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    prompts = ToyTask.prompts
    monkeypatch.setattr(ToyTask, "prompts", lambda self, split: prompts(self, split)[1:])
    assert main([*short, f"trainer.resume={folder / 'global_step_2'}"]) == 2
    assert "the training prompts differ" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


def test_other_training_rows_are_refused(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], run: Run
) -> None:
    from verl.trainer.main_ppo import main

    first = run([*arguments, "trainer.total_training_steps=1"])
    (Path(first["folder"]) / "summary.json").unlink()
    assert main([*arguments, "trainer.total_training_steps=2", "toy_prompts=6"]) == 2
    assert "toy_prompts: 7 in the run, 6 now" in capsys.readouterr().err


def test_a_full_disk_while_saving_ends_with_the_remedy(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    import errno
    import os

    from verl.trainer.main_ppo import main
    from verl.workers.critic import CriticWorker

    whole = CriticWorker.save

    def full(self: CriticWorker, directory: str) -> None:
        if "global_step_3" in directory:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), directory)
        whole(self, directory)

    monkeypatch.setattr(CriticWorker, "save", full)
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert "disk full" in error and "step 2 is the newest complete checkpoint" in error and "Traceback" not in error
