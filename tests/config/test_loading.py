"""Composition and validation: what a user writes, what comes out, and what the message says when it is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from search_r1.config import SearchConfig
from verl.config import RunConfig, flatten, load_config, load_sft_config
from verl.errors import ConfigError


def mistakes(*overrides: str, name: str = "ppo_trainer") -> list[str]:
    """Return the numbered lines of the error that these overrides give."""
    with pytest.raises(ConfigError) as caught:
        load_config(name, overrides)
    first, *lines = str(caught.value).splitlines()
    assert f"has {len(lines)} mistake" in first
    return lines


def test_the_three_spellings_of_an_override_mean_the_same() -> None:
    plain = load_config(overrides=["trainer.seed=7", "retriever.topk=5"])
    assert plain.trainer.seed == 7
    assert plain.task_config.retriever.topk == 5
    assert load_config(overrides=["+trainer.seed=7", "+retriever.topk=5"]) == plain
    assert load_config(overrides=["++trainer.seed=7", "++retriever.topk=5"]) == plain


def test_five_mistakes_are_shown_at_once_with_key_value_rule_and_fix() -> None:
    lines = mistakes(
        "trainer.sed=3",
        "trainer.total_training_steps=many",
        "algorithm.adv_estimator=grpo",
        "retriever.topk=0",
        "data.max_start_length=4000",
    )
    text = "\n".join(lines)
    assert len(lines) == 6  # the fifth breaks two rules: it exceeds the prompt, and no turn could follow a search
    assert "trainer.sed = 3: is not a known key; did you mean trainer.seed?" in text
    assert "trainer.total_training_steps = 'many': must be a valid integer" in text
    assert "algorithm.adv_estimator = 'grpo'" in text and "set actor_rollout_ref.rollout.n_agent to 2 or more" in text
    assert "retriever.topk = 0: must be greater than or equal to 1; the default is 3" in text
    assert "data.max_start_length = 4000: exceeds data.max_prompt_length (512)" in text


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("retreiver.url=http://x/retrieve", "did you mean retriever.url?"),
        ("learning_rate=1", "learning_rate = 1: is not a known key"),
        ("actor_rollout_ref.actor.lr=1", "did you mean actor_rollout_ref.actor.optim.lr?"),
        ("trainer.val_befor_train=true", "did you mean trainer.val_before_train?"),
        ("task_config=3", "task_config = 3: is not a known key"),
        ("reward_model.rewrit_score=0.2", "did you mean reward_model.rewrite_score?"),
    ],
)
def test_an_unknown_key_names_the_nearest_known_one(override: str, expected: str) -> None:
    (line,) = mistakes(override)
    assert expected in line


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("trainer.seed", "not of the form key.path=value"),
        ("=3", "not of the form key.path=value"),
        ("~trainer.seed", "keys cannot be deleted"),
        ("trainer.experiment_name=a=[", "cannot be parsed"),
        ("data.train_files=${nowhere.at.all}", "cannot be resolved"),
        ("data.train_files=???", "give the key a value"),
        ("data.template=fancy", "must be 'chatr1', 'search_r1', 'compact' or 'row'"),
        ("data.history=some", "must be 'all', or must be a valid integer"),
        ("data=3", "data = 3: must be a valid dictionary"),
        ("trainer.logger=[mlflow]", "trainer.logger"),
        ("actor_rollout_ref.rollout.val_kwargs.temperature=-1", "must be greater than or equal to 0"),
        ("actor_rollout_ref.actor.optim.betas=[0.9]", "actor_rollout_ref.actor.optim.betas = [0.9]"),
        ("task=search_r1.task:Nothing", "has no attribute 'Nothing'"),
        ("task=no.such.module:Task", "cannot import module"),
        ("task=os:path", "is no task: it has no config_schema()"),
        ("task=.:path", "not of the form 'module:attribute'"),
        ("algorithm.adv_estimator=os:nothere", "has no attribute 'nothere'"),
        ("algorithm.adv_estimator=os:sep", "is not a function"),
        ("actor_rollout_ref.actor.optim.betas=[2,0.9]", "must be less than 1"),
        ("critic.optim.betas=[-1,-1]", "= [-1, -1]: must be greater than or equal to 0; "),
        ("actor_rollout_ref.actor.optim.lr=true", "lr = True: must be a number, not true or false"),
        ("critic.optim.betas=[true,0.9]", "must be a number"),
        ("data.history=false", "must be a number"),
        ("max_turns=true", "must be a number"),
        ("trainer.seed=99999999999999999999999", "must be less than 9223372036854775808"),
        ("reward_model.rewrite_score=inf", "must be a finite number"),
        ("retriever.timeout_s=nan", "must be a finite number"),
        ("reward_model.rewrite_score=0.2", "preset"),
    ],
)
def test_a_wrong_value_is_one_mistake_with_a_remedy(override: str, expected: str) -> None:
    (line,) = mistakes(override)
    assert expected in line
    assert "; " in line


def test_published_keys_are_accepted_at_their_harmless_value_and_refused_at_any_other() -> None:
    published = load_config(
        overrides=[
            "actor_rollout_ref.hybrid_engine=True",
            "actor_rollout_ref.model.use_remove_padding=True",
            "actor_rollout_ref.actor.state_masking=true",
            "actor_rollout_ref.actor.strategy=fsdp",
            "actor_rollout_ref.rollout.load_format=dummy_dtensor",
            "actor_rollout_ref.rollout.prompt_length=512",
            "algorithm.no_think_rl=false",
            "algorithm.state_masking.start_state_marker='<information>'",
            "critic.model.fsdp_config.wrap_policy.min_num_params=0",
            "reward_model.enable=false",
            "trainer.default_hdfs_dir=null",
        ]
    )
    assert published == load_config()
    lines = mistakes(
        "actor_rollout_ref.hybrid_engine=false",
        "actor_rollout_ref.actor.state_masking=false",
        "actor_rollout_ref.rollout.prompt_length=100",
        "actor_rollout_ref.actor.ulysses_sequence_parallel_size=2",
        "reward_model.enable=true",
    )
    assert len(lines) == 5
    assert "observation tokens are never trained; leave it out or set true" in "\n".join(lines)
    assert "must equal data.max_prompt_length (512)" in "\n".join(lines)


def test_the_published_training_command_is_understood() -> None:
    """The overrides of the published 3B TopiOCQA script, by their names."""
    config = load_config(
        overrides=[
            "data.train_files=data_conv/topiocqa_train/train.parquet",
            "data.val_files=data_conv/topiocqa_test/test.parquet",
            "data.train_data_num=null", "data.val_data_num=null",
            "data.train_batch_size=512", "data.val_batch_size=256",
            "data.max_prompt_length=3500", "data.max_response_length=500",
            "data.max_start_length=2048", "data.max_obs_length=500",
            "data.shuffle_train_dataloader=True",
            "algorithm.adv_estimator=gae",
            "actor_rollout_ref.model.path=Qwen/Qwen2.5-3B-Instruct",
            "actor_rollout_ref.actor.optim.lr=1e-6",
            "actor_rollout_ref.model.enable_gradient_checkpointing=true",
            "actor_rollout_ref.model.use_remove_padding=True",
            "actor_rollout_ref.actor.optim.lr_warmup_steps_ratio=0.285",
            "actor_rollout_ref.actor.ppo_mini_batch_size=256",
            "actor_rollout_ref.actor.ppo_micro_batch_size=64",
            "actor_rollout_ref.actor.fsdp_config.param_offload=true",
            "actor_rollout_ref.actor.fsdp_config.grad_offload=true",
            "actor_rollout_ref.actor.fsdp_config.optimizer_offload=true",
            "actor_rollout_ref.rollout.log_prob_micro_batch_size=128",
            "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
            "actor_rollout_ref.rollout.gpu_memory_utilization=0.6",
            "actor_rollout_ref.ref.log_prob_micro_batch_size=128",
            "actor_rollout_ref.ref.fsdp_config.param_offload=True",
            "actor_rollout_ref.rollout.n_agent=1", "actor_rollout_ref.rollout.temperature=1",
            "actor_rollout_ref.rollout.top_p=1.0",
            "actor_rollout_ref.actor.state_masking=true",
            "critic.optim.lr=1e-5", "critic.model.use_remove_padding=True",
            "critic.optim.lr_warmup_steps_ratio=0.015",
            "critic.model.path=Qwen/Qwen2.5-3B-Instruct",
            "critic.model.enable_gradient_checkpointing=true", "critic.ppo_micro_batch_size=8",
            "critic.model.fsdp_config.param_offload=true",
            "algorithm.kl_ctrl.kl_coef=0.001", "algorithm.no_think_rl=false",
            "reward_model.preset=auto",  # what verl.trainer.main_ppo_format adds
            "reward_model.structure_format_score=0", "reward_model.final_format_score=0",
            "reward_model.retrieval_score=0", "reward_model.rewrite_score=0.2",
            "trainer.critic_warmup=0", "trainer.logger=['console']",
            "+trainer.val_only=false", "+trainer.val_before_train=false",
            "trainer.default_hdfs_dir=null", "trainer.n_gpus_per_node=4", "trainer.nnodes=1",
            "trainer.save_freq=100", "trainer.test_freq=100",
            "trainer.project_name=Chat-R1", "trainer.experiment_name=x",
            "trainer.total_epochs=200", "trainer.total_training_steps=500",
            "trainer.default_local_dir=verl_checkpoints/x",
            "max_turns=2", "retriever.url=http://127.0.0.1:8002/retrieve", "retriever.topk=3",
        ]
    )  # fmt: skip
    assert config.actor_rollout_ref.actor.optim.lr == 1e-6
    assert config.critic.ppo_mini_batch_size == 256
    assert config.task_config.reward_model.rewrite_score == 0.2
    assert config.world_size == 4


def test_keys_of_another_section_are_followed_unless_set() -> None:
    config = load_config(overrides=["actor_rollout_ref.actor.ppo_mini_batch_size=32", "actor_rollout_ref.model.path=m"])
    assert config.critic.ppo_mini_batch_size == 32
    assert config.critic.model.path == "m"
    own = load_config(overrides=["critic.model.path=v", "actor_rollout_ref.model.path=m"])
    assert own.critic.model.path == "v"


def test_one_path_and_a_list_of_paths_are_the_same_kind_of_value() -> None:
    assert load_config(overrides=["data.val_files=a.jsonl"]).data.val_files == ("a.jsonl",)
    assert load_config(overrides=["data.val_files=[a.jsonl,b.jsonl]"]).data.val_files == ("a.jsonl", "b.jsonl")


def test_the_result_cannot_be_changed() -> None:
    config = load_config()
    with pytest.raises(ValueError, match="frozen"):
        config.trainer.seed = 3


def test_a_recipe_outside_the_repository_builds_on_the_shipped_ones(tmp_path: Path) -> None:
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("defaults: [tiny_grpo, _self_]\ntrainer: {seed: 11}\n")
    config = load_config(str(recipe), ["max_turns=1"])
    assert (config.trainer.seed, config.algorithm.adv_estimator, config.task_config.max_turns) == (11, "grpo", 1)


def test_an_unknown_recipe_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"no configuration 'tiny_pppo'.*tiny_ppo"):
        load_config("tiny_pppo")


def test_defaults_of_the_file_are_the_defaults_of_the_schema() -> None:
    assert flatten(load_config()) == flatten(RunConfig()) | flatten(SearchConfig())
    assert flatten(load_sft_config()) == flatten(type(load_sft_config())())


def test_flatten_has_every_key_once_and_the_task_at_the_top() -> None:
    flat = flatten(load_config())
    assert flat["trainer.seed"] == 1
    assert flat["retriever.topk"] == 3
    assert flat["actor_rollout_ref.rollout.val_kwargs.temperature"] == 0.0
    assert not any(key.startswith("task_config") for key in flat)


def test_supervised_mistakes_are_shown_at_once_too() -> None:
    with pytest.raises(ConfigError) as caught:
        load_sft_config(overrides=["model.lora_rank=8", "optim.name=sgd", "data.max_length=100000", "data.foo=1"])
    text = str(caught.value)
    assert "has 4 mistakes" in text
    assert "all weights are trained" in text
    assert "must hold the longest row (data.max_length = 100000)" in text


def test_supervised_numbers_are_held_to_the_same_limits() -> None:
    with pytest.raises(ConfigError) as caught:
        load_sft_config(overrides=["optim.betas=[2,0.9]", "optim.lr=true", "trainer.seed=18446744073709551616"])
    text = str(caught.value)
    assert "has 3 mistakes" in text
    assert "must be less than 1;" in text and "must be a number" in text and "less than 9223372036854775808" in text
