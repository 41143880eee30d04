"""Bytes per training rank in every phase, worked out from sizes. What torch and its allocator add is not in it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from verl.trainer.plan.architecture import Architecture

DTYPE_BYTES = {"float32": 4, "bfloat16": 2}
LOGIT_CHUNK = 2**27
"""Logits held at once on an accelerator (``verl.workers.device.logit_chunk_elements``)."""
_LOGIT_COPIES = 3
"""float32 copies of a chunk during the backward pass: logits, probabilities, gradient."""


@dataclass(frozen=True)
class Use:
    """Bytes of one phase by what they are for. Example: ``Use("update", {"weights": 3e9, "gradients": 3e9})``."""

    phase: str
    parts: dict[str, float]

    @property
    def total(self) -> float:
        """All parts."""
        return sum(self.parts.values())


def phases(config: Any, model: Architecture, device_bytes: float | None) -> list[Use]:
    """Return the use of memory per rank in rollout, score and update, in this order.

    ``device_bytes`` (None: unknown) is what an engine that takes a share of its device takes a share of.
    """
    resting = _resting(config, model)
    return [
        Use("rollout", resting | _engine(config, model, device_bytes)),
        Use("score", _score(config, model, resting)),
        Use("update", _update(config, model)),
    ]


def host_bytes(config: Any, model: Architecture) -> float:
    """Return what offloading keeps in a machine's memory, over its ranks."""
    share = config.trainer.n_gpus_per_node * model.parameters / config.world_size
    return share * sum(
        4 * section.param_offload + (8 * section.optimizer_offload if trained else 0)
        for section, trained in _sections(config)
    )


def checkpoint_bytes(config: Any, model: Architecture, export: bool) -> float:
    """Return the size of a checkpoint: float32 weights and two moments per trained model, and the export's weights."""
    return model.parameters * (12 * (2 if config.uses_critic else 1) + (4 if export else 0))


def disk_bytes(config: Any, model: Architecture) -> float:
    """Return the disk that checkpoints take at most: those kept, the best one, and the one being written."""
    kept = config.trainer.keep_checkpoints + 2 if config.trainer.save_freq > 0 else 1
    return kept * checkpoint_bytes(config, model, config.trainer.export_every > 0 or kept == 1)


@dataclass(frozen=True)
class MicroBatches:
    """How much of a mini-batch is computed at once: by tokens per rank, or by sequences over all ranks."""

    dynamic: bool
    tokens: int
    sequences: int

    def most_tokens(self, config: Any) -> int:
        """Return the most tokens of a micro-batch on one rank: every sequence as long as an episode can be."""
        if self.dynamic:
            return max(_longest(config), self.tokens)
        return _longest(config) * self._per_rank(config)

    def count(self, config: Any, trajectories: float, tokens: float) -> int:
        """Return the micro-batches in which a rank walks through ``tokens``, its share of ``trajectories``."""
        if self.dynamic:
            return math.ceil(tokens / self.tokens)
        return math.ceil(trajectories / config.world_size / self._per_rank(config))

    def _per_rank(self, config: Any) -> int:
        return max(1, self.sequences // int(config.world_size))


def policy_updates(config: Any) -> MicroBatches:
    """Return the limits of the policy's forward and backward passes."""
    actor = config.actor_rollout_ref.actor
    return MicroBatches(actor.use_dynamic_bsz, actor.ppo_max_token_len_per_gpu, actor.ppo_micro_batch_size)


def policy_scores(config: Any) -> MicroBatches:
    """Return the limits of the policy's passes without gradients."""
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    return MicroBatches(actor.use_dynamic_bsz, actor.ppo_max_token_len_per_gpu, rollout.log_prob_micro_batch_size)


def critic_updates(config: Any) -> MicroBatches:
    """Return the limits of the critic's forward and backward passes."""
    critic = config.critic
    return MicroBatches(critic.use_dynamic_bsz, critic.ppo_max_token_len_per_gpu, critic.ppo_micro_batch_size)


def critic_scores(config: Any) -> MicroBatches:
    """Return the limits of the critic's passes without gradients."""
    critic = config.critic
    return MicroBatches(critic.use_dynamic_bsz, critic.ppo_max_token_len_per_gpu, critic.forward_micro_batch_size)


def activation_bytes(model: Architecture, tokens: int, dtype_bytes: int, checkpointing: bool) -> float:
    """Return what a forward pass keeps for backward.

    With checkpointing that is the input of every layer, and all of one layer while it is run again.
    """
    layer = tokens * model.saved_elements() * dtype_bytes
    return model.layers * tokens * model.hidden * dtype_bytes + layer if checkpointing else model.layers * layer


def _sections(config: Any) -> list[tuple[Any, bool]]:
    """Return (fsdp_config, trained) of every model that the training ranks hold."""
    found = [(config.actor_rollout_ref.actor.fsdp_config, True)]
    if config.uses_reference:
        found.append((config.actor_rollout_ref.ref.fsdp_config, False))
    if config.uses_critic:
        found.append((config.critic.model.fsdp_config, True))
    return found


def _resting(config: Any, model: Architecture) -> dict[str, float]:
    """What idle models keep on the device."""
    share = model.parameters / config.world_size
    sections = _sections(config)
    return {
        "idle weights": sum(4 * share for section, _ in sections if not section.param_offload),
        "idle optimizer": sum(8 * share for section, trained in sections if trained and not section.optimizer_offload),
    }


def _engine(config: Any, model: Architecture, device_bytes: float | None) -> dict[str, float]:
    rollout = config.actor_rollout_ref.rollout
    if rollout.placement == "split":
        return {}
    size = DTYPE_BYTES[rollout.dtype]
    weights = model.parameters * size / rollout.tensor_model_parallel_size
    if rollout.name == "vllm" and device_bytes is not None:
        return {"engine weights": weights, "KV cache": rollout.gpu_memory_utilization * device_bytes - weights}
    return {"engine weights": weights, "KV cache": _rows(config) * _longest(config) * model.cache_elements * size}


def _score(config: Any, model: Architecture, resting: dict[str, float]) -> dict[str, float]:
    """Policy, reference and critic one after the other; without gradients one layer's activations exist."""
    actor = config.actor_rollout_ref.actor
    size = DTYPE_BYTES[config.actor_rollout_ref.model.dtype]
    tokens = policy_scores(config).most_tokens(config)
    return resting | {
        "weights": 4 * model.parameters / config.world_size if actor.fsdp_config.param_offload else 0.0,
        "gathered": _gathered(config, model, size),
        "activations": tokens * (2 * model.hidden + 2 * model.feed_forward) * size,
        "logits": 4.0 * min(LOGIT_CHUNK, tokens * model.vocabulary),
    }


def _update(config: Any, model: Architecture) -> dict[str, float]:
    """Policy and critic are updated at the same time."""
    share = model.parameters / config.world_size
    critic = config.critic
    size = DTYPE_BYTES[config.actor_rollout_ref.model.dtype]
    checkpointing = config.actor_rollout_ref.model.enable_gradient_checkpointing
    tokens = policy_updates(config).most_tokens(config)
    models = 2 if config.uses_critic else 1
    activations = activation_bytes(model, tokens, size, checkpointing)
    if config.uses_critic:
        critic_size = DTYPE_BYTES[critic.model.dtype]
        critic_tokens = critic_updates(config).most_tokens(config)
        activations += activation_bytes(model, critic_tokens, critic_size, critic.model.enable_gradient_checkpointing)
    reference = config.uses_reference and not config.actor_rollout_ref.ref.fsdp_config.param_offload
    return {
        "weights": 4 * share * (models + reference),
        "gradients": 4 * share * models,
        "optimizer": 8 * share * models,
        "gathered": _gathered(config, model, size) * models,
        "activations": activations,
        "logits": _LOGIT_COPIES * 4.0 * min(LOGIT_CHUNK, tokens * model.vocabulary),
    }


def _gathered(config: Any, model: Architecture, size: int) -> float:
    """Whole weights in the compute type: on one rank all (none in float32); sharded, two layers and the root."""
    if config.world_size == 1:
        return 0.0 if size == 4 else float(model.parameters * size)
    layer = model.body_parameters / model.layers
    return float(size * (2 * layer + model.parameters - model.body_parameters))


def _longest(config: Any) -> int:
    return int(config.data.max_prompt_length + config.data.max_response_length)


def _rows(config: Any) -> int:
    rollout = config.actor_rollout_ref.rollout
    return int(min(rollout.max_num_seqs, rollout.chunk_size))
