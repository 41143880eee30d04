"""Every recipe of docs/algorithms.md is run on the toy task, takes effect and learns."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from run_records import figures

from verl.config import load_config
from verl.config.algorithm_schema import ESTIMATORS, POLICY_LOSSES
from verl.metrics import find
from verl.types import Trajectory

Run = Callable[[list[str]], dict[str, Any]]
PAGE = Path(__file__).resolve().parents[2] / "docs" / "algorithms.md"
ROWS = re.findall(r"^\| ([^|]+) \| [^|]+ \| `(algorithm[^`]+)` \|$", PAGE.read_text(encoding="utf-8"), re.M)
RECIPES = {name: keys.replace("A.", "actor_rollout_ref.actor.").split() for name, keys in ROWS}

#: Two optimizer steps per step, so that ratios leave 1; groups of four.
COMMON = ("actor_rollout_ref.rollout.n_agent=4", "actor_rollout_ref.actor.ppo_mini_batch_size=8")

QUICK = ("turn-level PPO", "DAPO", "GSPO", "LLDS with GRPO", "masked importance sampling", "entropy target")
"""Run by default; the others are run by ``make test-all``."""

TOY = {"entropy target": ("actor_rollout_ref.actor.entropy_ctrl.target=4.5",)}
"""Settings that fit the toy task, whose entropy is at most ln 64 = 4.16."""

EFFECTS: dict[str, Callable[[list[dict[str, float]]], bool]] = {
    "DAPO": lambda rows: (
        all(row["data/generation_batches"] >= 1 for row in rows) and all("reward/part/overlong" in row for row in rows)
    ),
    "LLDS with GRPO": lambda rows: max(row["policy/displacement"] for row in rows) > 0,
    "truncated importance sampling": lambda rows: all(
        abs(row["correction/effective_share"] - 1) < 1e-6 and abs(row["correction/weight"] - 1) < 1e-3 for row in rows
    ),
    "masked importance sampling": lambda rows: all(row["correction/bounded"] == 0 for row in rows),
    "entropy target": lambda rows: (
        rows[0]["policy/entropy_coeff"] == 0 and max(row["policy/entropy_coeff"] for row in rows) > 0
    ),
    "KL in the reward, adaptive": lambda rows: len({row["kl/coefficient"] for row in rows}) > 1,
    "KL as a loss (k3)": lambda rows: rows[-1]["policy/reference_kl"] > 0,
    "CISPO": lambda rows: all(row["policy/clip_fraction"] < 0.5 for row in rows),
}
"""What a recipe's own figures must show, beside learning."""


def test_the_page_has_every_estimator_and_loss() -> None:
    words = " ".join(word for keys in RECIPES.values() for word in keys)
    for name in ESTIMATORS:
        assert f"algorithm.adv_estimator={name}" in words.split(), name
    for name in POLICY_LOSSES:
        assert name == "ppo" or f"policy_loss={name}" in words
    assert set(EFFECTS) <= set(RECIPES)


def _marked(name: str) -> Any:
    return pytest.param(name, marks=() if name in QUICK else pytest.mark.slow)


@pytest.mark.parametrize("name", [_marked(name) for name in RECIPES])
def test_a_recipe_takes_effect_and_learns(run: Run, toy_arguments: list[str], name: str) -> None:
    summary = run([*toy_arguments, *COMMON, "trainer.total_training_steps=5", *RECIPES[name], *TOY.get(name, ())])
    rows = figures(Path(summary["folder"]))[1:]
    assert summary["after"]["f1"] > summary["before"]["f1"] + 0.1, name
    assert [key for row in rows for key in row if key != "step" and find(key) is None] == []
    assert any(key.startswith("critic/") for key in rows[0]) == ("gae" in " ".join(RECIPES[name]))
    assert EFFECTS.get(name, lambda rows: True)(rows), rows


def test_two_losses_give_two_policies(run: Run, toy_arguments: list[str]) -> None:
    """The keys reach the update: with everything else equal the second step's loss differs."""
    arguments = [*toy_arguments, *COMMON, "trainer.total_training_steps=2", "actor_rollout_ref.actor.ppo_epochs=3"]
    losses = {}
    for name in ("GRPO", "GSPO", "CISPO", "Dr. GRPO", "RLOO"):
        rows = figures(Path(run([*arguments, "actor_rollout_ref.actor.clip_ratio=0.01", *RECIPES[name]])["folder"]))
        losses[name] = rows[2]["policy/loss"]
    assert len(set(losses.values())) == len(losses), losses


def test_length_costs_reach_the_reward_and_the_records(run: Run, toy_arguments: list[str]) -> None:
    arguments = [*toy_arguments, "trainer.total_training_steps=1", "algorithm.shaping.length_coef=10"]
    folder = Path(run(arguments)["folder"])
    (row,) = figures(folder)[1:]
    assert row["reward/part/length"] == pytest.approx(row["length/model/mean"])
    assert row["reward/total/mean"] == pytest.approx(row["reward/part/even"] - row["length/model/mean"] / 100)
    lines = (folder / "rollouts" / "step_1.jsonl").read_text().splitlines()
    rewards = [t.reward.total for t in map(Trajectory.from_record, map(json.loads, lines)) if t.reward]
    assert sum(rewards) / len(rewards) == pytest.approx(row["reward/total/mean"])


def test_dynamic_sampling_and_the_entropy_weight_survive_an_interruption(run: Run, toy_arguments: list[str]) -> None:
    recipe = [*COMMON, *RECIPES["DAPO"], "actor_rollout_ref.actor.entropy_ctrl.target=3.9", "trainer.save_freq=1"]
    whole = figures(Path(run([*toy_arguments, *recipe, "trainer.total_training_steps=4"])["folder"]))
    half = [f"{argument}-halves" if "default_local_dir" in argument else argument for argument in toy_arguments]
    run([*half, *recipe, "trainer.total_training_steps=2"])
    folder = Path(half[-1].partition("=")[2])
    resumed = figures(
        Path(run([*half, *recipe, "trainer.total_training_steps=4", f"trainer.resume={folder}"])["folder"])
    )
    for name in ("policy/loss", "policy/entropy_coeff", "reward/total/mean", "data/filtered_groups"):
        assert [row[name] for row in resumed[1:]] == [row[name] for row in whole[1:]], name


def test_check_says_when_a_loss_cannot_act() -> None:
    from verl.config.describe import notes

    idle = load_config(overrides=["actor_rollout_ref.actor.clip_ratio_high=0.28", "data.train_batch_size=256"])
    assert any("every ratio is 1" in note for note in notes(idle))
    busy = load_config(overrides=["actor_rollout_ref.actor.clip_ratio_high=0.28"])
    assert not any("every ratio is 1" in note for note in notes(busy))
    k1 = load_config(overrides=["actor_rollout_ref.actor.use_kl_loss=true", "actor_rollout_ref.actor.kl_loss_type=kl"])
    assert any("k1" in note for note in notes(k1))
