"""Runs that go wrong on purpose: the watch names the trouble, and the last good checkpoint is kept and loads."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from run_records import figures
from safetensors.torch import load_file

from verl.trainer.checkpoint import CheckpointStore
from verl.trainer.main_ppo import main
from verl.workers.policy import PolicyWorker

Run = Callable[[list[str]], dict[str, Any]]


def stopped_at(folder: Path, watch: str) -> tuple[int, int]:
    """Return the step at which a run was stopped and the newest checkpoint it kept, after checking that it loads."""
    rows = figures(folder)
    assert rows[-1][f"health/{watch}"] >= 1
    good = CheckpointStore(folder, 2).newest()
    assert good is not None, "a good checkpoint was kept"
    good.verify()
    for row in rows[1:]:
        if row["step"] <= good.step + 1:
            assert not any(name.startswith("health/") for name in row), "no watch was out of bounds up to it"
    assert not (folder / "summary.json").exists()
    return rows[-1]["step"], good.step


def test_a_learning_rate_that_grows_to_a_hundred_times_too_much_is_stopped_before_its_weights_are_kept(
    run: Run, toy_arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [
        *toy_arguments,
        "actor_rollout_ref.actor.optim.lr=0.3",  # toy.yaml: 0.003
        "actor_rollout_ref.actor.optim.lr_warmup_steps_ratio=1.0",
        "trainer.total_training_steps=30",
        "trainer.save_freq=1",
        "health.action=stop",
    ]
    assert main(arguments) == 3
    error = capsys.readouterr().err
    assert "WatchError: step" in error and "health." in error and "is the last good checkpoint" in error
    folder = tmp_path / "run"
    watch = error.split("WatchError: ")[1].split("health.")[1].split(":")[0]
    step, good = stopped_at(folder, watch)
    assert 0 < good < step
    assert str(folder / f"global_step_{good}") in error
    # The export of that checkpoint is a model that still evaluates.
    summary = run(
        [*toy_arguments, f"actor_rollout_ref.model.path={folder}/global_step_{good}/hf", "trainer.val_only=true"]
    )
    assert summary["after"]["n"] == 5


def test_a_reward_that_pays_for_invented_information_is_named_and_stops_the_run(
    toy_arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [
        *toy_arguments,
        "toy_pays_inventions=true",
        "actor_rollout_ref.rollout.n_agent=8",
        "trainer.total_training_steps=40",
        "trainer.save_freq=1",
        "health.invented_information={above: 2.0, action: stop}",
    ]
    assert main(arguments) == 3
    error = capsys.readouterr().err
    assert "health.invented_information: episode/invented_information is" in error
    assert "must not pay for blocks that the model wrote" in error
    step, good = stopped_at(tmp_path / "run", "invented_information")
    assert good <= step - 3


def test_a_run_that_only_warns_goes_on_and_says_so_everywhere(
    run: Run, toy_arguments: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    summary = run([*toy_arguments, "health.searches={above: 0.5, steps: 2}", "trainer.total_training_steps=4"])
    assert summary["steps"] == 4
    assert summary["watches"] == [{"watch": "searches", "first_step": 2, "last_step": 4}]
    rows = figures(Path(summary["folder"]))
    assert [row.get("health/searches") for row in rows] == [None, 1, 2, 3, 4]
    assert "Watches that fired" in Path(summary["report"]).read_text()
    warned = [
        r.getMessage() for r in caplog.records if r.levelno == logging.WARNING and "health.searches" in r.msg % r.args
    ]
    assert len(warned) == 3 and "step 2: health.searches: episode/searches is 1, above" in warned[0]


def test_a_healthy_run_has_no_watch_out_of_bounds(run: Run, toy_arguments: list[str]) -> None:
    summary = run([*toy_arguments, "trainer.total_training_steps=5"])
    assert summary["watches"] == []
    assert not any(name.startswith("health/") for row in figures(Path(summary["folder"])) for name in row)


def weights(summary: dict[str, Any]) -> dict[str, torch.Tensor]:
    return load_file(Path(summary["checkpoint"]) / "hf" / "model.safetensors")


def test_a_step_with_a_gradient_that_is_not_a_number_is_dropped_and_everything_else_is_as_without_it(
    run: Run,
    toy_arguments: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    plain_terms, plain_update = PolicyWorker._terms, PolicyWorker.update

    def nan_at_step_2(self: PolicyWorker, *arguments: Any) -> Any:
        loss, shares = plain_terms(self, *arguments)
        return (loss * float("nan"), shares) if self.engine.update == 2 else (loss, shares)

    with monkeypatch.context() as patch:
        patch.setattr(PolicyWorker, "_terms", nan_at_step_2)
        dropped = run(toy_arguments)
    rows = figures(Path(dropped["folder"]))
    assert [row.get("policy/dropped_updates") for row in rows] == [None, None, 1, None, None]
    assert [row.get("health/non_finite") for row in rows] == [None, None, 1, None, None]
    named = next(r.getMessage() for r in caplog.records if "the optimiser step is left out" in r.getMessage())
    rollout = (Path(dropped["folder"]) / "rollouts" / "step_2.jsonl").read_text().splitlines()
    for prompt in {json.loads(line)["prompt_id"] for line in rollout}:
        assert prompt in named

    def none_at_step_2(self: PolicyWorker, *arguments: Any) -> dict[str, float]:
        if self.engine.update == 1:
            self.engine.update += 1
            return {}
        return plain_update(self, *arguments)

    monkeypatch.setattr(PolicyWorker, "update", none_at_step_2)
    without = run([*toy_arguments, f"trainer.default_local_dir={tmp_path / 'without'}"])
    mine, theirs = weights(dropped), weights(without)
    assert mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)
    assert dropped["after"] == without["after"]


def test_gradients_that_are_never_finite_end_the_run(
    toy_arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = PolicyWorker._terms

    def always_nan(self: PolicyWorker, *arguments: Any) -> Any:
        loss, shares = plain(self, *arguments)
        return loss * float("nan"), shares

    monkeypatch.setattr(PolicyWorker, "_terms", always_nan)
    assert main([*toy_arguments, "health.max_dropped_steps=1"]) == 3
    error = capsys.readouterr().err
    assert "step 2: 2 steps in a row had a gradient that is not finite" in error and "max_dropped_steps=1" in error
