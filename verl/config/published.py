"""Keys that published scripts set and that have nothing to decide here: one table, each with its reason.

A key of this table is accepted at a harmless value and then dropped; at any other value it is an error, since what
it asks for would not happen.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

ANY = object()
"""Marks a key that decides nothing whatever its value."""


@dataclass(frozen=True)
class Pointless:
    """One published key: the values at which it is harmless and why it decides nothing."""

    allowed: tuple[Any, ...]
    reason: str
    same_as: str | None = None
    """Key path that the value must equal instead of being one of ``allowed``."""


_MASKS = "masks come from the origin of each segment; observation tokens are never trained"
_PACKED = "sequences are always packed without padding"
_PLUGIN = "code outside the tree is named by import path (task, registries), not loaded as a side effect"
_ULYSSES = "sequence parallelism is not part of this trainer"
_SHARD = "every worker group shards over all its ranks, block by block"
_HDFS = "checkpoints go to trainer.default_local_dir"
_ORDER = "mini-batches follow the (already shuffled) order of prompts"
_RAW = "rows always travel with their samples"
_REWARD = "it configures a reward network, and there is none"
_GRADIENTS = "gradients exist only inside an update and are freed after it"
_SYNC = "weights always arrive through the weight channel"

RUN_KEYS: Mapping[str, Pointless] = {
    "data.tokenizer": Pointless((None,), "the tokenizer is the one in the model folder"),
    "data.return_raw_input_ids": Pointless((False,), _RAW),
    "data.return_raw_chat": Pointless((False,), _RAW),
    "actor_rollout_ref.hybrid_engine": Pointless((True,), "placement is set by actor_rollout_ref.rollout.placement"),
    "actor_rollout_ref.model.external_lib": Pointless((None,), _PLUGIN),
    "actor_rollout_ref.model.override_config": Pointless(({},), "the model folder's config is used as it is"),
    "actor_rollout_ref.model.use_remove_padding": Pointless((True, False), _PACKED),
    "actor_rollout_ref.actor.strategy": Pointless(("fsdp", "fsdp2"), "the one strategy is FSDP2"),
    "actor_rollout_ref.actor.state_masking": Pointless((True,), _MASKS),
    "actor_rollout_ref.actor.shuffle": Pointless((False,), _ORDER),
    "actor_rollout_ref.actor.ulysses_sequence_parallel_size": Pointless((1,), _ULYSSES),
    "actor_rollout_ref.actor.optim.total_training_steps": Pointless((-1, None), "it is trainer.total_training_steps"),
    "actor_rollout_ref.actor.fsdp_config.grad_offload": Pointless((True, False), _GRADIENTS),
    "actor_rollout_ref.actor.fsdp_config.wrap_policy": Pointless((None, {}, {"min_num_params": 0}), _SHARD),
    "actor_rollout_ref.actor.fsdp_config.fsdp_size": Pointless((-1,), _SHARD),
    "actor_rollout_ref.ref.ulysses_sequence_parallel_size": Pointless((1,), _ULYSSES),
    "actor_rollout_ref.ref.fsdp_config.grad_offload": Pointless((True, False), _GRADIENTS),
    "actor_rollout_ref.ref.fsdp_config.wrap_policy": Pointless((None, {}, {"min_num_params": 0}), _SHARD),
    "actor_rollout_ref.ref.fsdp_config.fsdp_size": Pointless((-1,), _SHARD),
    "actor_rollout_ref.rollout.prompt_length": Pointless((), "it is the data key", same_as="data.max_prompt_length"),
    "actor_rollout_ref.rollout.response_length": Pointless(
        (), "it is the data key", same_as="data.max_response_length"
    ),
    "actor_rollout_ref.rollout.ignore_eos": Pointless((False,), "an episode's turn ends at EOS"),
    "actor_rollout_ref.rollout.free_cache_engine": Pointless((True,), "the engine's cache is freed while it sleeps"),
    "actor_rollout_ref.rollout.load_format": Pointless((ANY,), _SYNC),
    "actor_rollout_ref.rollout.do_sample": Pointless((True,), "greedy is temperature 0 (rollout.val_kwargs)"),
    "critic.strategy": Pointless(("fsdp", "fsdp2"), "the one strategy is FSDP2"),
    "critic.shuffle": Pointless((False,), _ORDER),
    "critic.ulysses_sequence_parallel_size": Pointless((1,), _ULYSSES),
    "critic.optim.total_training_steps": Pointless((-1, None), "it is trainer.total_training_steps"),
    "critic.model.tokenizer_path": Pointless((None,), "the critic reads token ids of the policy's tokenizer"),
    "critic.model.external_lib": Pointless((None,), _PLUGIN),
    "critic.model.override_config": Pointless(({},), "the model folder's config is used as it is"),
    "critic.model.use_remove_padding": Pointless((True, False), _PACKED),
    "critic.model.fsdp_config.grad_offload": Pointless((True, False), _GRADIENTS),
    "critic.model.fsdp_config.wrap_policy": Pointless((None, {}, {"min_num_params": 0}), _SHARD),
    "critic.model.fsdp_config.fsdp_size": Pointless((-1,), _SHARD),
    "reward_model.enable": Pointless((False,), "rewards are computed by the task; there is no reward network"),
    "reward_model.strategy": Pointless((ANY,), _REWARD),
    "reward_model.model": Pointless((ANY,), _REWARD),
    "reward_model.micro_batch_size": Pointless((ANY,), _REWARD),
    "reward_model.use_dynamic_bsz": Pointless((ANY,), _REWARD),
    "reward_model.forward_max_token_len_per_gpu": Pointless((ANY,), _REWARD),
    "reward_model.max_length": Pointless((ANY,), _REWARD),
    "algorithm.no_think_rl": Pointless((False,), "thinking is part of the episode"),
    "algorithm.state_masking": Pointless((ANY,), _MASKS),
    "trainer.default_hdfs_dir": Pointless((None,), _HDFS),
}
"""Key path -> rule, for training and evaluation runs. A path covers everything below it."""

SFT_KEYS: Mapping[str, Pointless] = {
    "data.balance_dp_token": Pointless((False,), "micro-batches are balanced by packing"),
    "data.chat_template": Pointless((None,), "segments are tokenised as they are"),
    "model.external_lib": Pointless((None,), _PLUGIN),
    "model.lora_rank": Pointless((0,), "all weights are trained"),
    "model.lora_alpha": Pointless((ANY,), "it scales LoRA, which is off"),
    "model.target_modules": Pointless((ANY,), "it selects modules for LoRA, which is off"),
    "model.fsdp_config.grad_offload": Pointless((True, False), _GRADIENTS),
    "model.fsdp_config.wrap_policy": Pointless((None, {}, {"min_num_params": 0}), _SHARD),
    "model.fsdp_config.cpu_offload": Pointless((False,), "use param_offload and optimizer_offload"),
    "model.fsdp_config.offload_params": Pointless((False,), "use param_offload and optimizer_offload"),
    "trainer.default_hdfs_dir": Pointless((None,), _HDFS),
}
"""The same for supervised training."""
