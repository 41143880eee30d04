"""Rules about several keys at once: (name, keys, predicate, message, fix). One list per schema, tried all together."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from verl.config.algorithm_rules import ALGORITHM_RULES
from verl.config.algorithm_schema import ESTIMATORS, GROUP_ESTIMATORS
from verl.config.base import leaves
from verl.config.problems import MISSING, Problem
from verl.config.rule import Rule
from verl.config.schema import RunConfig, vllm_installed


def run_rules(rules: Sequence[Rule], config: BaseModel, problems: list[Problem]) -> None:
    """Try every rule whose keys are in order; add what does not hold to ``problems``."""
    values = dict(leaves(config))
    broken = {problem.key for problem in problems}
    for rule in rules:
        if any(_touches(key, bad) for key in rule.keys for bad in broken):
            continue
        if not rule.predicate(config):
            message, fix = (_fill(text, values) for text in (rule.message, rule.fix))
            problems.append(Problem(rule.keys[0], values.get(rule.keys[0], MISSING), message, fix))


def _touches(key: str, bad: str) -> bool:
    return key == bad or key.startswith(f"{bad}.")


def _fill(text: str, values: dict[str, Any]) -> str:
    for key, value in values.items():
        text = text.replace(f"{{{key}}}", str(value))
    return text


# ---------------------------------------------------------------------------------------------------------------
# Training

ROLLOUT = "actor_rollout_ref.rollout"
ACTOR = "actor_rollout_ref.actor"


def _trajectories(config: RunConfig) -> int:
    return config.data.train_batch_size * config.actor_rollout_ref.rollout.group_size


def _estimator_known(config: RunConfig) -> bool:
    return config.algorithm.adv_estimator in ESTIMATORS or ":" in config.algorithm.adv_estimator


def _installed(name: str) -> Rule:
    return Rule(
        f"{name} is installed",
        ("trainer.logger",),
        lambda config: name not in config.trainer.logger or importlib.util.find_spec(name) is not None,
        f"{name} is not installed",
        f"pip install 'chatr1[{name}]' or leave {name} out of trainer.logger",
    )


TRACKERS = tuple(map(_installed, ("wandb", "trackio", "mlflow")))

RUN_RULES: tuple[Rule, ...] = (
    Rule(
        "one group key",
        (f"{ROLLOUT}.n", f"{ROLLOUT}.n_agent"),
        lambda c: min(c.actor_rollout_ref.rollout.n, c.actor_rollout_ref.rollout.n_agent) == 1,
        f"n is an alias of n_agent and both are above 1 (n_agent = {{{ROLLOUT}.n_agent}})",
        f"set {ROLLOUT}.n=1",
    ),
    Rule(
        "known estimator",
        ("algorithm.adv_estimator",),
        _estimator_known,
        "is not a known advantage estimator",
        f"set one of {', '.join(ESTIMATORS)}, or module:function",
    ),
    Rule(
        "template exists",
        ("data.template",),
        lambda c: not c.data.template.endswith(".txt") or Path(c.data.template).is_file(),
        "is no file",
        "give the path of a text file, or the name of a built-in template",
    ),
    Rule(
        "groups to compare",
        ("algorithm.adv_estimator", f"{ROLLOUT}.n", f"{ROLLOUT}.n_agent", "trainer.val_only"),
        lambda c: (
            c.algorithm.adv_estimator not in GROUP_ESTIMATORS
            or c.trainer.val_only
            or c.actor_rollout_ref.rollout.group_size > 1
        ),
        "it compares the trajectories of a prompt, and a group of one has nothing to compare",
        f"set {ROLLOUT}.n_agent to 2 or more",
    ),
    Rule(
        "mini-batch fits the step",
        (
            f"{ACTOR}.ppo_mini_batch_size",
            "data.train_batch_size",
            f"{ROLLOUT}.n",
            f"{ROLLOUT}.n_agent",
            "trainer.val_only",
        ),
        lambda c: c.trainer.val_only or c.actor_rollout_ref.actor.ppo_mini_batch_size <= _trajectories(c),
        "exceeds the trajectories of a step (data.train_batch_size {data.train_batch_size} x group size)",
        "lower it or raise data.train_batch_size",
    ),
    Rule(
        "critic mini-batch fits the step",
        (
            "critic.ppo_mini_batch_size",
            "data.train_batch_size",
            f"{ROLLOUT}.n",
            f"{ROLLOUT}.n_agent",
            "algorithm.adv_estimator",
        ),
        lambda c: c.trainer.val_only or not c.uses_critic or c.critic.ppo_mini_batch_size <= _trajectories(c),
        "exceeds the trajectories of a step (data.train_batch_size {data.train_batch_size} x group size)",
        "lower it or raise data.train_batch_size",
    ),
    Rule(
        "start fits prompt",
        ("data.max_start_length", "data.max_prompt_length"),
        lambda c: c.data.max_start_length <= c.data.max_prompt_length,
        "exceeds data.max_prompt_length ({data.max_prompt_length}), which bounds the whole context before a turn",
        "lower it or raise data.max_prompt_length",
    ),
    Rule(
        "a turn can follow a search",
        ("data.max_obs_length", "data.max_start_length", "data.max_prompt_length", "data.max_response_length"),
        lambda c: (
            c.data.max_start_length + c.data.max_obs_length < c.data.max_prompt_length + c.data.max_response_length
        ),
        "together with data.max_start_length ({data.max_start_length}) must be below the context "
        "(max_prompt_length + max_response_length), or nothing could follow a search",
        "lower it or raise data.max_prompt_length",
    ),
    Rule(
        "micro-batch holds a sequence",
        (
            f"{ACTOR}.ppo_max_token_len_per_gpu",
            f"{ACTOR}.use_dynamic_bsz",
            "data.max_prompt_length",
            "data.max_response_length",
        ),
        lambda c: (
            not c.actor_rollout_ref.actor.use_dynamic_bsz
            or c.actor_rollout_ref.actor.ppo_max_token_len_per_gpu
            >= c.data.max_prompt_length + c.data.max_response_length
        ),
        "must hold the longest episode (max_prompt_length + max_response_length)",
        "raise it, or lower the lengths",
    ),
    Rule(
        "critic micro-batch holds a sequence",
        (
            "critic.ppo_max_token_len_per_gpu",
            "critic.use_dynamic_bsz",
            "data.max_prompt_length",
            "data.max_response_length",
        ),
        lambda c: (
            not (c.uses_critic and c.critic.use_dynamic_bsz)
            or c.critic.ppo_max_token_len_per_gpu >= c.data.max_prompt_length + c.data.max_response_length
        ),
        "must hold the longest episode (max_prompt_length + max_response_length)",
        "raise it, or lower the lengths",
    ),
    Rule(
        "one kl term",
        (f"{ACTOR}.use_kl_loss", f"{ACTOR}.kl_loss_coef"),
        lambda c: not c.actor_rollout_ref.actor.use_kl_loss or c.actor_rollout_ref.actor.kl_loss_coef > 0,
        f"needs a weight above 0 ({ACTOR}.kl_loss_coef = {{{ACTOR}.kl_loss_coef}})",
        f"set {ACTOR}.kl_loss_coef, or {ACTOR}.use_kl_loss=false",
    ),
    Rule(
        "adaptive kl has a target",
        ("algorithm.kl_ctrl.type", "algorithm.kl_ctrl.target_kl", "algorithm.kl_ctrl.horizon"),
        lambda c: (
            c.algorithm.kl_ctrl.type == "fixed"
            or None not in (c.algorithm.kl_ctrl.target_kl, c.algorithm.kl_ctrl.horizon)
        ),
        "the adaptive controller needs a target and a horizon",
        "set algorithm.kl_ctrl.target_kl and algorithm.kl_ctrl.horizon, or type=fixed",
    ),
    Rule(
        "top_k",
        (f"{ROLLOUT}.top_k",),
        lambda c: c.actor_rollout_ref.rollout.top_k == -1 or c.actor_rollout_ref.rollout.top_k >= 1,
        "must be -1 (all) or at least 1",
        "set -1",
    ),
    Rule(
        "validation top_k",
        (f"{ROLLOUT}.val_kwargs.top_k",),
        lambda c: (
            c.actor_rollout_ref.rollout.val_kwargs.top_k == -1 or c.actor_rollout_ref.rollout.val_kwargs.top_k >= 1
        ),
        "must be -1 (all) or at least 1",
        "set -1",
    ),
    Rule(
        "greedy needs one sample",
        (f"{ROLLOUT}.val_kwargs.n", f"{ROLLOUT}.val_kwargs.temperature"),
        lambda c: (
            c.actor_rollout_ref.rollout.val_kwargs.n == 1 or c.actor_rollout_ref.rollout.val_kwargs.temperature > 0
        ),
        "greedy episodes of one question are all the same",
        f"set {ROLLOUT}.val_kwargs.n=1 or a temperature above 0",
    ),
    Rule(
        "vllm is installed",
        (f"{ROLLOUT}.name",),
        lambda c: c.actor_rollout_ref.rollout.name != "vllm" or vllm_installed(),
        "vLLM is not installed",
        f"install it (CHATR1_VLLM=1 make setup), or set {ROLLOUT}.name=hf",
    ),
    Rule(
        "vllm log-probs",
        (f"{ROLLOUT}.temperature", f"{ROLLOUT}.top_p", f"{ROLLOUT}.top_k", f"{ROLLOUT}.name"),
        lambda c: (
            c.actor_rollout_ref.rollout.name != "vllm"
            or c.actor_rollout_ref.rollout.temperature == 1
            or (c.actor_rollout_ref.rollout.top_p == 1 and c.actor_rollout_ref.rollout.top_k == -1)
        ),
        f"the vllm engine gives log-probs before top-p and top-k (top_p = {{{ROLLOUT}.top_p}}, top_k = "
        f"{{{ROLLOUT}.top_k}}) at temperature 1 only",
        f"set {ROLLOUT}.temperature=1, or top_p=1 and top_k=-1, or {ROLLOUT}.name=hf",
    ),
    Rule(
        "hf engine uses one device",
        (f"{ROLLOUT}.tensor_model_parallel_size", f"{ROLLOUT}.name"),
        lambda c: (
            c.actor_rollout_ref.rollout.name != "hf" or c.actor_rollout_ref.rollout.tensor_model_parallel_size == 1
        ),
        "the hf engine holds its model on one device",
        "set 1",
    ),
    Rule(
        "deterministic engine",
        (f"{ROLLOUT}.deterministic", f"{ROLLOUT}.name"),
        lambda c: not c.actor_rollout_ref.rollout.deterministic or c.actor_rollout_ref.rollout.name == "hf",
        "only the hf engine can run deterministically",
        f"set {ROLLOUT}.name=hf or {ROLLOUT}.deterministic=false",
    ),
    Rule(
        "split placement has devices",
        (f"{ROLLOUT}.n_gpus", f"{ROLLOUT}.placement"),
        lambda c: (
            (c.actor_rollout_ref.rollout.placement == "split") == (c.actor_rollout_ref.rollout.n_gpus is not None)
        ),
        "devices of their own belong to placement=split, and to it alone",
        f"set {ROLLOUT}.placement=split together with {ROLLOUT}.n_gpus",
    ),
    Rule(
        "staleness needs split",
        ("trainer.staleness", f"{ROLLOUT}.placement"),
        lambda c: c.trainer.staleness == 0,
        "rollouts that lag behind the policy are not part of this release",
        "set trainer.staleness=0",
    ),
    Rule(
        "local cluster is one process",
        ("cluster.kind", "trainer.nnodes", "trainer.n_gpus_per_node", f"{ROLLOUT}.n_workers"),
        lambda c: c.cluster.kind != "local" or (c.world_size == 1 and c.n_rollout_workers == 1),
        "the local cluster has one worker of each kind",
        f"set trainer.nnodes=1 trainer.n_gpus_per_node=1 {ROLLOUT}.n_workers=1, or cluster.kind=ray",
    ),
    Rule(
        "evaluation only evaluates",
        ("trainer.val_only", "trainer.val_before_train", "job.evaluate_bounds"),
        lambda c: not c.trainer.val_only or c.trainer.val_before_train or c.job.evaluate_bounds,
        "there is nothing to do without an evaluation before training and without the fixed pipelines",
        "set trainer.val_before_train=true, or job.evaluate_bounds=true for the pipelines alone",
    ),
    Rule(
        "frequencies",
        ("trainer.save_freq",),
        lambda c: c.trainer.save_freq == -1 or c.trainer.save_freq >= 1,
        "must be -1 (only the last step) or at least 1",
        "set -1",
    ),
    Rule(
        "evaluation frequency",
        ("trainer.test_freq",),
        lambda c: c.trainer.test_freq == -1 or c.trainer.test_freq >= 1,
        "must be -1 (only before and after) or at least 1",
        "set -1",
    ),
    Rule(
        "training rows",
        ("data.train_files", "trainer.val_only"),
        lambda c: c.trainer.val_only or len(c.data.train_files) > 0,
        "names no file",
        "set data.train_files=PATH",
    ),
    Rule(
        "held-out rows",
        ("data.val_files",),
        lambda c: len(c.data.val_files) > 0,
        "names no file",
        "set data.val_files=PATH",
    ),
    Rule(
        "service has passages",
        ("job.serve_retrieval", "job.corpus_path", "job.index_path"),
        lambda c: not c.job.serve_retrieval or c.job.build_world or c.job.corpus_path is not None,
        "the service needs passages",
        "set job.corpus_path=FILE, or job.serve_retrieval=false and retriever.url",
    ),
    *TRACKERS,
    *ALGORITHM_RULES,
)
"""Everything that must hold between the keys of a run."""

SFT_RULES: tuple[Rule, ...] = (
    Rule(
        "rows fit micro-batches",
        ("data.max_token_len_per_gpu", "data.use_dynamic_bsz", "data.max_length"),
        lambda c: not c.data.use_dynamic_bsz or c.data.max_token_len_per_gpu >= c.data.max_length,
        "must hold the longest row (data.max_length = {data.max_length})",
        "raise it, or lower data.max_length",
    ),
    Rule(
        "rows",
        ("data.train_files",),
        lambda c: len(c.data.train_files) > 0,
        "names no file",
        "set data.train_files=PATH",
    ),
    *TRACKERS,
)
"""Everything that must hold between the keys of a supervised run."""
