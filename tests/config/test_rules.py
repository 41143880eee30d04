"""Every cross-field rule: one configuration that breaks it, and it alone."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import pytest

from verl.config import load_config
from verl.config.rules import RUN_RULES
from verl.errors import ConfigError

R, A = "actor_rollout_ref.rollout", "actor_rollout_ref.actor"

BREAKING: dict[str, tuple[str, ...]] = {
    "one group key": (f"{R}.n=2", f"{R}.n_agent=2"),
    "known estimator": ("algorithm.adv_estimator=gea",),
    "template exists": ("data.template=no/such.txt",),
    "groups to compare": ("algorithm.adv_estimator=rloo",),
    "mini-batch fits the step": (f"{A}.ppo_mini_batch_size=2048", "critic.ppo_mini_batch_size=256"),
    "critic mini-batch fits the step": ("critic.ppo_mini_batch_size=2048",),
    "start fits prompt": ("data.max_start_length=600", "data.max_obs_length=256"),
    "a turn can follow a search": ("data.max_obs_length=768",),
    "micro-batch holds a sequence": (
        f"{A}.use_dynamic_bsz=true", f"{A}.ppo_max_token_len_per_gpu=1000",
        "critic.ppo_max_token_len_per_gpu=1024",
    ),
    "critic micro-batch holds a sequence": (f"{A}.use_dynamic_bsz=true", "critic.ppo_max_token_len_per_gpu=1000"),
    "one kl term": (f"{A}.use_kl_loss=true", f"{A}.kl_loss_coef=0"),
    "adaptive kl has a target": ("algorithm.kl_ctrl.type=adaptive", "algorithm.kl_ctrl.horizon=1000"),
    "top_k": (f"{R}.top_k=0",),
    "validation top_k": (f"{R}.val_kwargs.top_k=-2",),
    "greedy needs one sample": (f"{R}.val_kwargs.n=4",),
    "hf engine uses one device": (f"{R}.name=hf", f"{R}.tensor_model_parallel_size=2"),
    "split placement has devices": (f"{R}.n_gpus=2",),
    "staleness needs split": ("trainer.staleness=1",),
    "local cluster is one process": ("cluster.kind=local",),
    "evaluation only evaluates": ("trainer.val_only=true", "trainer.val_before_train=false"),
    "frequencies": ("trainer.save_freq=0",),
    "evaluation frequency": ("trainer.test_freq=-3",),
    "training rows": ("data.train_files=[]",),
    "held-out rows": ("data.val_files=[]",),
    "service has passages": ("job.serve_retrieval=true",),
    "known policy loss": (f"{A}.policy_loss=gpso",),
    "gspo averages trajectories": (f"{A}.policy_loss=gspo",),
    "dual clip has a surrogate": (f"{A}.policy_loss=cispo", f"{A}.clip_ratio_c=3"),
    "loss scale is used": (f"{A}.loss_scale_factor=100",),
    "entropy starts within its bounds": (f"{A}.entropy_ctrl.target=1", f"{A}.entropy_coeff=0.5"),
    "adaptive kl is in the reward": (
        "algorithm.kl_ctrl.type=adaptive", "algorithm.kl_ctrl.horizon=9", "algorithm.kl_ctrl.target_kl=1",
        f"{A}.use_kl_loss=true",
    ),
    "turn discounts are used": ("algorithm.turn_gamma=0.9",),
    "turn weight is used": ("algorithm.turn_coef=0.5",),
    "turn rewards are rewards": ("algorithm.adv_estimator=turn_grpo", f"{R}.n_agent=4"),
    "correction knows the distribution": ("algorithm.correction.mode=truncate", f"{R}.top_p=0.95"),
    "correction bounds": ("algorithm.correction.mode=truncate", "algorithm.correction.low=0.5"),
    "filter has groups": ("algorithm.filter_groups.enable=true",),
    "overlong has a length": ("algorithm.shaping.overlong_coef=0.1",),
}  # fmt: skip
UNREACHABLE = {
    "vllm is installed", "vllm log-probs", "deterministic engine",
    "wandb is installed", "trackio is installed", "mlflow is installed",
}  # fmt: skip
"""They depend on what is installed; tested below."""


@pytest.mark.parametrize("name", BREAKING)
def test_a_broken_rule_is_the_only_mistake(name: str) -> None:
    (rule,) = [rule for rule in RUN_RULES if rule.name == name]
    with pytest.raises(ConfigError) as caught:
        load_config(overrides=BREAKING[name])
    lines = str(caught.value).splitlines()
    assert len(lines) == 2, lines
    assert lines[1].startswith(f"  1. {rule.keys[0]}"), lines
    assert "{" not in lines[1]


def test_no_rule_is_left_out() -> None:
    assert {rule.name for rule in RUN_RULES} == set(BREAKING) | UNREACHABLE


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """Decide whether vLLM seems to be installed."""

    def decide(present: bool) -> None:
        for module in ("schema", "rules"):
            monkeypatch.setattr(f"verl.config.{module}.vllm_installed", lambda: present)

    return decide


def test_vllm_is_asked_for_only_where_it_is_installed(installed: Callable[[bool], None]) -> None:
    installed(False)
    with pytest.raises(ConfigError, match=r"vLLM is not installed; install it \(CHATR1_VLLM=1 make setup\), or set"):
        load_config(overrides=[f"{R}.name=vllm"])
    installed(True)
    assert load_config(overrides=[f"{R}.name=vllm"]).actor_rollout_ref.rollout.name == "vllm"


@pytest.mark.parametrize(
    ("present", "overrides", "engine"),
    [
        (False, (), "hf"),
        (True, (), "vllm"),
        (True, (f"{R}.deterministic=true",), "hf"),
        (True, (f"{R}.name=hf",), "hf"),
    ],
)
def test_auto_is_settled_when_the_run_is_configured(
    installed: Callable[[bool], None], present: bool, overrides: tuple[str, ...], engine: str
) -> None:
    installed(present)
    assert load_config(overrides=overrides).actor_rollout_ref.rollout.name == engine


def test_what_vllm_cannot_do_is_refused(installed: Callable[[bool], None]) -> None:
    installed(True)
    with pytest.raises(ConfigError, match="only the hf engine can run deterministically"):
        load_config(overrides=[f"{R}.name=vllm", f"{R}.deterministic=true"])
    with pytest.raises(ConfigError, match=r"before top-p and top-k \(top_p = 0.9, top_k = -1\) at temperature 1 only"):
        load_config(overrides=[f"{R}.name=vllm", f"{R}.top_p=0.9", f"{R}.temperature=0.7"])
    for allowed in ("temperature=0.7", "top_p=0.9"):
        load_config(overrides=[f"{R}.name=vllm", f"{R}.{allowed}"])


@pytest.mark.parametrize("name", ["wandb", "trackio", "mlflow"])
def test_a_tracker_is_asked_for_only_when_it_is_installed(name: str) -> None:
    if importlib.util.find_spec(name) is None:
        with pytest.raises(ConfigError, match=rf"{name} is not installed; pip install 'chatr1\[{name}\]'"):
            load_config(overrides=[f"trainer.logger=['{name}']"])
    else:
        assert load_config(overrides=[f"trainer.logger=['{name}']"]).trainer.logger == (name,)


def test_evaluation_needs_neither_groups_nor_training_batches() -> None:
    config = load_config(
        overrides=[
            "trainer.val_only=true",
            "algorithm.adv_estimator=grpo",
            "data.train_batch_size=8",
            "data.train_files=[]",
        ]
    )
    assert config.trainer.val_only


def test_a_rule_is_not_tried_when_one_of_its_keys_is_wrong_already() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(overrides=["data.max_start_length=lots", "data.max_prompt_length=600"])
    assert len(str(caught.value).splitlines()) == 2
