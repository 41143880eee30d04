"""What ``--check`` prints: the resolved configuration and the numbers that follow from it. Needs no model library."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel

from verl.config.schema import RunConfig


def describe(config: RunConfig) -> str:
    """Return the resolved configuration as YAML, then the derived numbers, then what deserves a look."""
    lines = [yaml.safe_dump(as_dict(config), sort_keys=False, allow_unicode=True, width=120).rstrip(), ""]
    lines.append("# derived")
    lines += [f"# {name:<34} {value}" for name, value in derived(config).items()]
    lines += [f"# note: {note}" for note in notes(config)]
    return "\n".join(lines)


def as_dict(config: RunConfig) -> dict[str, Any]:
    """Return the configuration as it could stand in a YAML file, the task's keys at the top level."""
    values = config.model_dump(mode="json")
    if isinstance(config.task_config, BaseModel):
        values.update(config.task_config.model_dump(mode="json"))
    return values


def derived(config: RunConfig) -> dict[str, str]:
    """Return name -> text of the numbers that follow from a configuration."""
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    trajectories = config.data.train_batch_size * rollout.group_size
    longest = config.data.max_prompt_length + config.data.max_response_length
    mini_batches = math.ceil(trajectories / actor.ppo_mini_batch_size)
    updates = mini_batches * actor.ppo_epochs
    found = {
        "training ranks": f"{config.world_size} ({config.trainer.nnodes} x {config.trainer.n_gpus_per_node})",
        "rollout workers": f"{config.n_rollout_workers} ({rollout.name}, {rollout.placement})",
        "trajectories per step": f"{trajectories} ({config.data.train_batch_size} prompts x {rollout.group_size})",
        "optimizer steps per step": f"{updates} ({mini_batches} mini-batches x {actor.ppo_epochs})",
        "trajectories per rank and mini-batch": f"{actor.ppo_mini_batch_size / config.world_size:g}",
        "micro-batch per rank": _micro_batch(config),
        "longest episode": f"{longest} tokens",
        "tokens per step, at most": f"{trajectories * longest:,}",
        "tokens per step and rank, at most": f"{trajectories * longest // config.world_size:,}",
        "critic": "yes" if config.uses_critic else "no",
        "reference policy": "yes" if config.uses_reference else "no",
        "KL": "in the reward" if config.kl_in_reward else "in the loss" if actor.use_kl_loss else "off",
    }
    if config.trainer.total_training_steps is not None:
        found["training steps"] = str(config.trainer.total_training_steps)
        warmup = int(config.trainer.total_training_steps * actor.optim.lr_warmup_steps_ratio)  # as the optimizer counts
        found["warm-up steps of the policy"] = str(warmup)
    else:
        found["training steps"] = f"{config.trainer.total_epochs} epochs of the training rows"
    return found


def notes(config: RunConfig) -> list[str]:
    """Return what is legal but worth a look before a long run."""
    found = []
    rollout = config.actor_rollout_ref.rollout
    if config.actor_rollout_ref.actor.ppo_mini_batch_size % config.world_size:
        found.append("ppo_mini_batch_size is no multiple of the training ranks: some ranks run dummy micro-batches")
    if rollout.top_p < 1:
        found.append("rollout.top_p < 1: the policy is trained on more probability mass than it was sampled from")
    found += _algorithm_notes(config)
    if rollout.name == "hf":
        found.append("the hf engine ignores gpu_memory_utilization, max_num_batched_tokens and enforce_eager")
    for key, files in (("train_files", config.data.train_files), ("val_files", config.data.val_files)):
        found += [f"data.{key}: {file} does not exist (yet)" for file in files if not Path(file).exists()]
    model = config.actor_rollout_ref.model.path
    if not Path(model).is_dir():
        found.append(f"actor_rollout_ref.model.path: no folder {model} here (yet)")
    if hasattr(config.task_config, "notes"):
        found += config.task_config.notes(config)
    return found


def _algorithm_notes(config: RunConfig) -> list[str]:
    found = []
    actor = config.actor_rollout_ref.actor
    trajectories = config.data.train_batch_size * config.actor_rollout_ref.rollout.group_size
    one_update = actor.ppo_epochs == 1 and actor.ppo_mini_batch_size >= trajectories
    if one_update and (actor.policy_loss != "ppo" or actor.clip_ratio_c or actor.clip_ratio_high or actor.llds_coef):
        found.append(
            "one optimizer step per step: every ratio is 1, so policy_loss, clipping and llds_coef change nothing; "
            "they begin to act with a smaller ppo_mini_batch_size or ppo_epochs above 1"
        )
    if actor.use_kl_loss and actor.kl_loss_type == "kl":
        found.append("kl_loss_type=kl (k1) has an expected gradient of zero as a loss term; low_var_kl or mse act")
    return found


def _micro_batch(config: RunConfig) -> str:
    actor = config.actor_rollout_ref.actor
    if actor.use_dynamic_bsz:
        return f"up to {actor.ppo_max_token_len_per_gpu} tokens"
    return f"{max(1, actor.ppo_micro_batch_size // config.world_size)} sequences"


def count_parameters(folder: Path) -> int | None:
    """Count the parameters of a model folder from the headers of its safetensors files; None when there are none."""
    total = 0
    for file in sorted(folder.glob("*.safetensors")):
        with file.open("rb") as stream:
            prefix = stream.read(8)
            if len(prefix) < 8:
                return None
            header = json.loads(stream.read(struct.unpack("<Q", prefix)[0]))
        total += sum(math.prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__")
    return total or None
