"""The program end to end on a random very small model: what a run leaves behind, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from run_records import figures

from verl.metrics import find
from verl.types import Trajectory

Run = Callable[[list[str]], dict[str, Any]]


def test_a_run_learns_and_leaves_everything_behind(run: Run, toy_arguments: list[str]) -> None:
    summary = run(
        [
            *toy_arguments,
            "trainer.total_training_steps=5",
            "trainer.save_freq=2",
            "trainer.test_freq=3",
            "save_val=true",
            "job.evaluate_bounds=true",
            "trainer.logger=[console,tensorboard]",
        ]
    )
    folder = Path(summary["folder"])
    rows = figures(folder)
    assert [row["step"] for row in rows] == list(range(6))
    assert [row["step"] for row in rows if "val/score" in row] == [0, 3, 5]
    # Learning: the score is the share of even tokens.
    assert summary["after"]["f1"] > summary["before"]["f1"] + 0.2
    assert summary["before"]["f1"] == rows[0]["val/f1"]
    assert summary["gain"]["f1"]["mean"] == pytest.approx(summary["after"]["f1"] - summary["before"]["f1"])
    assert set(summary["bounds"]) == {"other_remark_f1", "final"}
    # Every figure is in the table of metrics.
    assert [name for row in rows for name in row if name != "step" and find(name) is None] == []
    # The last step is saved although save_freq does not reach it, with an export; the newest two are kept.
    steps = sorted(int(path.name.rpartition("_")[2]) for path in folder.glob("global_step_*"))
    assert steps == [4, 5] and Path(summary["checkpoint"]) == folder / "global_step_5"
    assert (folder / "global_step_5" / "hf" / "model.safetensors").is_file()
    # Files for people and programs.
    for name in (
        "report.html",
        "config.json",
        "curves/reward.png",
        "validation_results_step5.json",
        "eval/val/step_3.jsonl",
    ):
        assert (folder / name).stat().st_size > 0, name
    rollout = [
        Trajectory.from_record(json.loads(line)) for line in (folder / "rollouts/step_1.jsonl").read_text().splitlines()
    ]
    assert len(rollout) == 8 and {t.trajectory_id for t in rollout} == {
        f"{t.prompt_id}#{index}" for t in rollout for index in range(2)
    }


def test_rollout_and_trainer_agree_on_every_token(run: Run, toy_arguments: list[str]) -> None:
    folder = Path(run([*toy_arguments, "trainer.total_training_steps=3"])["folder"])
    for row in figures(folder)[1:]:
        assert row["policy/rollout_gap/max"] < 1e-4
        assert row["policy/staleness"] == 0


def test_grpo_runs_without_a_critic(run: Run, toy_arguments: list[str]) -> None:
    folder = Path(run([*toy_arguments, "algorithm.adv_estimator=grpo", "trainer.total_training_steps=2"])["folder"])
    rows = figures(folder)
    assert "advantage/dead_groups" in rows[1] and not any(name.startswith("critic/") for name in rows[1])
    assert not (folder / "global_step_2" / "critic").exists()


def test_the_divergence_in_the_reward_is_zero_at_first_and_then_positive_on_average(
    run: Run, toy_arguments: list[str]
) -> None:
    arguments = [*toy_arguments, "algorithm.kl_ctrl.kl_coef=0.05", "trainer.total_training_steps=4"]
    rows = figures(Path(run(arguments)["folder"]))
    assert rows[1]["kl/reference"] == pytest.approx(0.0, abs=1e-6)
    assert rows[4]["kl/reference"] != 0.0 and rows[1]["kl/coefficient"] == 0.05


def test_the_critic_warms_up_alone(run: Run, toy_arguments: list[str]) -> None:
    arguments = [*toy_arguments, "trainer.critic_warmup=2", "trainer.total_training_steps=3"]
    rows = figures(Path(run(arguments)["folder"]))
    assert ["policy/loss" in row for row in rows] == [False, False, False, True]
    assert all("critic/loss" in row for row in rows[1:])


def test_failed_episodes_are_counted_and_score_zero(run: Run, toy_arguments: list[str]) -> None:
    arguments = [
        *toy_arguments,
        "toy_fail_every=2",
        "actor_rollout_ref.rollout.max_failure_rate=0.9",
        "trainer.total_training_steps=1",
    ]
    row = figures(Path(run(arguments)["folder"]))[1]
    assert row["data/dropped/failed"] + row["data/trained_episodes"] == row["data/episodes"] == 8
    assert row["stop/search_failed"] == row["data/dropped/failed"] / 8 > 0
    summary = run([*arguments, "trainer.val_only=true"])
    assert summary["after"]["f1"] < 0.5  # three of five rows failed


def test_evaluation_alone_writes_its_file_and_trains_nothing(
    run: Run, toy_arguments: list[str], tmp_path: Path
) -> None:
    summary = run([*toy_arguments, "trainer.val_only=true", "save_val=true", f"save_val_dir={tmp_path / 'out'}"])
    rows = json.loads((tmp_path / "out" / "validation_results_step0.json").read_text())
    assert [row["question"] for row in rows] == [f"val-{n}" for n in range(5)]
    assert summary["steps"] == 0 and summary["before"] is None and summary["after"]["n"] == 5
    assert list(Path(summary["folder"]).glob("global_step_*")) == []


def test_an_export_evaluates_to_the_same_figures(run: Run, toy_arguments: list[str]) -> None:
    trained = run([*toy_arguments, "trainer.total_training_steps=3"])
    export = f"{trained['checkpoint']}/hf"
    again = run([*toy_arguments, f"actor_rollout_ref.model.path={export}", "trainer.val_only=true"])
    assert again["after"] == trained["after"] and again["folder"] != trained["folder"]


def test_rewards_that_are_not_numbers_stop_the_run_before_anything_is_saved(
    toy_arguments: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    from verl.trainer.main_ppo import main

    assert main([*toy_arguments, "toy_nan=true", "trainer.save_freq=1"]) == 2
    assert "the reward of train-" in capsys.readouterr().err
    assert list((tmp_path / "run").glob("global_step_*")) == []


def test_too_many_failures_stop_the_run_and_say_why(
    toy_arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    from verl.trainer.main_ppo import main

    assert main([*toy_arguments, "toy_fail_every=1"]) == 2
    error = capsys.readouterr().err
    assert "HealthError" in error and "max_failure_rate=0.1" in error and "search_failed" in error


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["trainer.totl_epochs=3"], "trainer.total_epochs"),
        (["--chek"], "unknown option"),
        (["actor_rollout_ref.model.path=/no/such/model"], "/no/such/model"),
    ],
)
def test_mistakes_end_with_one_message_and_status_2(
    toy_arguments: list[str], arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from verl.trainer.main_ppo import main

    assert main([*toy_arguments, *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error and "Traceback" not in error


def test_check_prints_the_configuration_and_starts_nothing(
    toy_arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from verl.trainer.main_ppo import main

    assert main(["--check", *toy_arguments]) == 0
    assert "toy_prompts: 12" in capsys.readouterr().out
    assert not (tmp_path / "run").exists()


def test_no_gain_between_evaluations_of_other_questions(
    run: Run, toy_arguments: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run([*toy_arguments, "trainer.total_training_steps=1", "trainer.save_freq=1"])
    before = tmp_path / "run" / "eval" / "val" / "step_0.jsonl"
    before.write_text("".join(before.read_text().splitlines(keepends=True)[1:]))
    longer = ["trainer.total_training_steps=2", "trainer.save_freq=1", f"trainer.resume={tmp_path / 'run'}"]
    assert run([*toy_arguments, *longer])["gain"] is None
    assert "asked other questions" in caplog.text
