"""Evaluation keeps every row in file order, counts failures as zero, and can be scored again from its file."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from verl.errors import CheckpointError
from verl.trainer.evaluate import Evaluator, read_trajectories
from verl.types import Origin, Prompt, Reward, Segment, StopReason, Trajectory

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "e2e"))
from toy_task import ToyConfig, ToyTask

sys.path.pop(0)


class ScriptedRollouts:
    """Writes row n as n even tokens out of four; row 3 fails. Remembers how it was asked."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def generate(self, prompts: Sequence[Prompt], step: int, n: int, **how: Any) -> list[Trajectory]:
        self.calls.append({"prompts": len(prompts), "step": step, "n": n} | how)
        return [self.trajectory(prompt) for prompt in prompts]

    def figures(self) -> Mapping[str, float]:
        return {}

    @staticmethod
    def trajectory(prompt: Prompt) -> Trajectory:
        number = prompt.row["n"]
        ids = (2,) * number + (3,) * (4 - number)
        segments = (Segment(Origin.PROMPT, prompt.token_ids), Segment(Origin.MODEL, ids, (-1.0,) * 4, 0))
        stop = StopReason.SEARCH_FAILED if number == 3 else StopReason.ANSWERED
        return Trajectory(f"{prompt.prompt_id}#0", prompt.prompt_id, segments, stop, reward=Reward(1.0), row=prompt.row)


def make(tmp_path: Path, without: int = -1, **save: Any) -> tuple[Evaluator, ScriptedRollouts]:
    config = SimpleNamespace(
        save_val=bool(save),
        save_val_dir=save.get("directory"),
        data=SimpleNamespace(val_batch_size=2),
        actor_rollout_ref=SimpleNamespace(
            rollout=SimpleNamespace(val_kwargs=SimpleNamespace(temperature=0.0, top_p=1.0, top_k=-1, n=1))
        ),
    )
    rollouts = ScriptedRollouts()
    task = ToyTask(ToyConfig(toy_without_pipelines=without))
    return Evaluator(task, task.prompts("val"), rollouts, config, tmp_path), rollouts


def test_all_rows_greedily_in_file_order_whatever_the_batch(tmp_path: Path) -> None:
    evaluator, rollouts = make(tmp_path)
    evaluation = evaluator.run(4)
    assert [t.prompt_id for t in evaluation.trajectories] == [f"val-{n}" for n in range(5)]
    assert [call["prompts"] for call in rollouts.calls] == [2, 2, 1]
    assert {(call["temperature"], call["mode"], call["step"]) for call in rollouts.calls} == {(0.0, "policy", 4)}


def test_a_failed_row_scores_zero_and_is_counted(tmp_path: Path) -> None:
    evaluation = make(tmp_path)[0].run(0)
    # Rows 0..4 score 0, 1/4, 2/4, 3/4 and 1; row 3 failed.
    assert evaluation.score == pytest.approx((0 + 0.25 + 0.5 + 0 + 1) / 5)
    assert evaluation.metrics() == {"val/n": 5.0, "val/f1": evaluation.score, "val/score": evaluation.score}


def test_the_file_scores_again_to_the_same_figures(tmp_path: Path) -> None:
    evaluation = make(tmp_path)[0].run(2)
    again = read_trajectories(tmp_path / "eval" / "val" / "step_2.jsonl")
    assert tuple(again) == evaluation.trajectories
    assert ToyTask(ToyConfig()).evaluate(again) == evaluation.figures
    summary = json.loads((tmp_path / "eval" / "val" / "summary_step_2.json").read_text())
    assert summary == dict(evaluation.figures)


def test_the_published_file_is_written_on_request_where_it_is_wanted(tmp_path: Path) -> None:
    make(tmp_path)[0].run(0)
    assert not (tmp_path / "validation_results_step0.json").exists()
    make(tmp_path, directory=str(tmp_path / "out"))[0].run(0)
    assert len(json.loads((tmp_path / "out" / "validation_results_step0.json").read_text())) == 5


def test_bounds_are_measured_once_per_step_and_kept_apart_from_the_policy(tmp_path: Path) -> None:
    evaluator, rollouts = make(tmp_path, directory=str(tmp_path / "out"))
    for step in (0, 0, 9):
        evaluator.measure_bounds(step)
    assert [call["step"] for call in rollouts.calls] == [0, 0, 0, 9, 9, 9]  # three batches each
    assert {call["mode"] for call in rollouts.calls} == {"other"}
    score = pytest.approx(0.35)
    assert evaluator.read_bounds(9) == {"other_remark_f1": score, "final": {"other_remark_f1": score}}
    assert not (tmp_path / "out").exists() and not (tmp_path / "eval" / "val").exists()


def test_pipelines_leave_out_what_they_cannot_run_and_stand_beside_the_policy(tmp_path: Path) -> None:
    evaluator, rollouts = make(tmp_path, without=2)
    evaluator.run(0)
    evaluator.measure_bounds(0)
    assert [call["prompts"] for call in rollouts.calls] == [2, 2, 1, 2, 2]
    table = tmp_path / "eval" / "pipelines" / "table_step_0.md"
    assert table.read_text() == "| policy | 5 |\n| other_remark | 4 |\n"
    assert evaluator.figures(0) == json.loads((tmp_path / "eval" / "val" / "summary_step_0.json").read_text())
    assert evaluator.figures(3) is None


def test_a_damaged_record_is_named_by_file_and_line(tmp_path: Path) -> None:
    make(tmp_path)[0].run(0)
    path = tmp_path / "eval" / "val" / "step_0.jsonl"
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:2], "{}", *lines[3:]]))
    with pytest.raises(CheckpointError, match=r"step_0\.jsonl:3"):
        read_trajectories(path)
