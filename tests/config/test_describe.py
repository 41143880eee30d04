"""What ``--check`` derives, against numbers worked out by hand."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import yaml
from safetensors.numpy import save_file

from verl.config import describe, load_config
from verl.config.describe import as_dict, count_parameters, derived, notes


def test_derived_numbers_of_the_grpo_recipe() -> None:
    found = derived(
        load_config(
            "search_r1_grpo",
            ["data.train_batch_size=512", "actor_rollout_ref.actor.ppo_mini_batch_size=256", "trainer.nnodes=2"],
        )
    )
    assert found["trajectories per step"] == "2560 (512 prompts x 5)"
    assert found["optimizer steps per step"] == "10 (10 mini-batches x 1)"
    assert found["training ranks"] == "16 (2 x 8)"
    assert found["micro-batch per rank"] == "4 sequences"
    assert found["longest episode"] == "4596 tokens"
    assert found["tokens per step, at most"] == "11,765,760"  # 2560 x 4596
    assert found["critic"] == "no"
    assert found["KL"] == "in the loss"
    assert found["warm-up steps of the policy"] == "286"  # 0.285 x 1005 = 286.4


def test_parameters_are_counted_from_the_headers_of_the_model_files(tmp_path: Path) -> None:
    save_file({"a": np.zeros((1024, 1024), np.float32), "b": np.zeros(1024, np.float32)}, tmp_path / "m.safetensors")
    parameters = 1024 * 1024 + 1024
    assert count_parameters(tmp_path) == parameters
    assert count_parameters(tmp_path / "nothing") is None


def test_the_printed_configuration_can_be_run_again(tmp_path: Path) -> None:
    config = load_config("tiny_grpo", ["trainer.seed=5"])
    values = yaml.safe_load(describe(config))
    assert values == as_dict(config)
    again = tmp_path / "again.yaml"
    again.write_text(yaml.safe_dump(values | {"defaults": ["ppo_trainer", "_self_"]}))
    assert load_config(str(again)) == config


def test_notes_name_missing_files_and_a_cut_distribution() -> None:
    text = "\n".join(
        notes(load_config(overrides=["data.val_files=nowhere.jsonl", "actor_rollout_ref.rollout.top_p=0.9"]))
    )
    assert "data.val_files: nowhere.jsonl does not exist" in text
    assert "top_p < 1" in text


def test_a_context_that_cannot_hold_the_turns_is_noted_with_the_length_that_would() -> None:
    # 100 + 2 * (20 + 30) + 20 = 220 tokens at the most, of which the last generation takes 20.
    lengths = ["max_start_length=100", "max_response_length=20", "max_obs_length=30"]
    overrides = ["max_turns=2", *(f"data.{length}" for length in lengths)]

    def said(max_prompt_length: int) -> list[str]:
        found = notes(load_config(overrides=[*overrides, f"data.max_prompt_length={max_prompt_length}"]))
        return [note for note in found if "at its longest" in note]

    assert said(200) == []
    (note,) = said(199)
    assert "needs 220 tokens, the context has 219" in note and "data.max_prompt_length=200" in note


def test_turn_placement_that_the_estimator_cannot_see_is_noted() -> None:
    shaped = ["reward_model.preset=chatr1", "reward_model.rewrite_score=0.2", "reward_model.intent_placement=turn"]
    groups = "actor_rollout_ref.rollout.n_agent=4"
    blind = describe(load_config(overrides=[*shaped, groups, "algorithm.adv_estimator=rloo"]))
    assert "# note: intent_placement=turn changes nothing with adv_estimator=rloo" in blind
    overrides = [*shaped, groups, "algorithm.adv_estimator=turn_grpo", "algorithm.kl_ctrl.kl_coef=0"]
    assert "intent_placement=turn changes nothing" not in describe(load_config(overrides=overrides))
