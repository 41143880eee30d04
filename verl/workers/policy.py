"""The policy worker: scores samples, updates the policy, hands out its weights. One process per rank of the group.

Every method is called on all ranks with the same arguments, in the same order.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from verl.algorithms.kl import ESTIMATORS, k1
from verl.algorithms.losses import AGGREGATIONS, Totals
from verl.algorithms.policy_losses import POLICY_LOSSES, PolicyInput, clip_of, likelihood_displacement
from verl.data.batch import MicroBatch
from verl.data.samples import ScoredRows
from verl.types import Sample
from verl.workers import device as devices
from verl.workers.engine import Engine, EngineSpec
from verl.workers.passes import Limit, UpdatePlan, score_rows, train_pass
from verl.workers.trained_model import TrainedModel, on_device, optim_spec
from verl.workers.weight_sync import WeightChannel, WeightManifest

logger = logging.getLogger(__name__)

FIGURES = ("loss", "total_loss", "clip_fraction", "update_kl", "ratio", "update_entropy")
"""What an update reports, in the order of the sums; the figures of optional terms follow."""


class PolicyWorker(TrainedModel):
    """The policy and, when a KL term is used, the frozen model it started from."""

    def __init__(self, config: Any, total_steps: int) -> None:
        super().__init__(config, total_steps)
        self._channels: dict[str, WeightChannel] = {}
        self._reference: Engine | None = None
        self._entropy_coeff = 0.0

    def spec(self) -> EngineSpec:
        """Return the policy as ``actor_rollout_ref`` describes it."""
        config = self.config.actor_rollout_ref
        return EngineSpec(
            model_path=config.model.path,
            seed=self.config.trainer.seed,
            dtype=config.model.dtype,
            trust_remote_code=config.model.trust_remote_code,
            gradient_checkpointing=config.model.enable_gradient_checkpointing,
            max_grad_norm=config.actor.grad_clip,
            param_offload=config.actor.fsdp_config.param_offload,
            optimizer_offload=config.actor.fsdp_config.optimizer_offload,
            optim=optim_spec(config.actor.optim, self.total_steps),
        )

    def setup(self) -> None:
        """Join the group and load the models. Raises ModelError, ResourceError."""
        super().setup()
        if self.config.uses_reference and not self.config.trainer.val_only:
            offload = self.config.actor_rollout_ref.ref.fsdp_config.param_offload
            frozen = replace(
                self.spec(), optim=None, gradient_checkpointing=False, optimizer_offload=False, param_offload=offload
            )
            self._reference = Engine(frozen, self.device)
            self._reference.offload()

    # -- scoring -----------------------------------------------------------------------------------------------------

    def log_probs(self, samples: Sequence[Sample]) -> ScoredRows:
        """Return this rank's share of the policy's log-probs, and ``policy/entropy`` over all model tokens."""
        actor = self.config.actor_rollout_ref.actor
        limit = Limit(
            actor.use_dynamic_bsz,
            actor.ppo_max_token_len_per_gpu,
            self.config.actor_rollout_ref.rollout.log_prob_micro_batch_size,
        )
        rows, entropy = self._score(self.engine, samples, limit)
        return ScoredRows(rows, {"policy/entropy": entropy})

    def reference_log_probs(self, samples: Sequence[Sample]) -> ScoredRows:
        """Return this rank's share of the reference's log-probs; the config must use a KL term."""
        if self._reference is None:
            raise RuntimeError("no reference policy was loaded: the configuration uses no KL term")
        ref = self.config.actor_rollout_ref.ref
        limit = Limit(ref.log_prob_use_dynamic_bsz, ref.log_prob_max_token_len_per_gpu, ref.log_prob_micro_batch_size)
        rows, _ = self._score(self._reference, samples, limit)
        return ScoredRows(rows)

    def _score(self, engine: Engine, samples: Sequence[Sample], limit: Limit) -> tuple[Any, float]:
        with on_device(engine):
            return score_rows(engine, samples, limit, self.config.actor_rollout_ref.rollout.temperature)

    # -- training ----------------------------------------------------------------------------------------------------

    def update(self, samples: Sequence[Sample], entropy_coeff: float | None = None) -> dict[str, float]:
        """Make one trainer step on samples with old log-probs and advantages; return ``policy/*`` figures.

        ``entropy_coeff`` replaces the configured weight of the entropy bonus. A mini-batch whose gradient is not finite
        is left out: ``policy/dropped_updates`` counts them, ``dropped_prompts`` names what they held.
        """
        actor = self.config.actor_rollout_ref.actor
        columns = ("old_logprobs", "advantages") + (("ref_logprobs",) if actor.use_kl_loss else ())
        columns += ("correction",) if self.config.algorithm.correction.mode != "none" else ()
        limit = Limit(actor.use_dynamic_bsz, actor.ppo_max_token_len_per_gpu, actor.ppo_micro_batch_size)
        plan = UpdatePlan(
            mini_batch=actor.ppo_mini_batch_size,
            epochs=actor.ppo_epochs,
            limit=limit,
            columns=columns,
            temperature=self.config.actor_rollout_ref.rollout.temperature,
        )
        self._entropy_coeff = actor.entropy_coeff if entropy_coeff is None else entropy_coeff
        with on_device(self.engine) as engine:
            trained = train_pass(engine, samples, plan, self._terms)
        self._dropped = trained.dropped
        return trained.named(self._figures(), "policy") | {"memory/policy": self.peak_memory()}

    def _figures(self) -> tuple[str, ...]:
        actor = self.config.actor_rollout_ref.actor
        optional = (("reference_kl", actor.use_kl_loss), ("displacement", actor.llds_coef > 0))
        return FIGURES + tuple(name for name, used in optional if used)

    def _terms(self, batch: MicroBatch, logprobs: Tensor, entropies: Tensor) -> tuple[Tensor, Tensor]:
        actor = self.config.actor_rollout_ref.actor
        old = batch.columns["old_logprobs"]
        data = PolicyInput(logprobs, old, batch.columns["advantages"], batch.counts, clip_of(actor))
        terms = POLICY_LOSSES[actor.policy_loss](data)
        per_token_loss = terms.loss * batch.columns["correction"] if "correction" in batch.columns else terms.loss
        totals = Totals(batch.total_tokens, batch.total_sequences, self._scale())
        weights = AGGREGATIONS[actor.loss_agg](batch.counts, totals).to(logprobs.device)
        loss = total = (per_token_loss * weights).sum()
        if self._entropy_coeff != 0.0:
            total = total - self._entropy_coeff * (entropies * weights).sum()
        # A figure only: bounded, so that one token cannot make it infinite.
        ratio = torch.exp((logprobs.detach() - old).clamp(max=20.0))
        per_token = [terms.clipped, k1(old, logprobs.detach()), ratio, entropies.detach()]
        if actor.use_kl_loss:
            divergence = ESTIMATORS[actor.kl_loss_type](logprobs, batch.columns["ref_logprobs"])
            total = total + actor.kl_loss_coef * (divergence * weights).sum()
            per_token.append(divergence.detach())
        if actor.llds_coef > 0:
            displacement = likelihood_displacement(data)
            total = total + actor.llds_coef * (displacement * weights).sum()
            per_token.append(displacement.detach())
        means = [values.sum() / batch.total_tokens for values in per_token]
        return total, torch.stack([loss.detach(), total.detach(), *means])

    def _scale(self) -> float:
        """Return the tokens by which ``loss_agg=constant`` divides a trajectory's sum."""
        scale = self.config.actor_rollout_ref.actor.loss_scale_factor
        return float(self.config.data.max_response_length if scale is None else scale)

    # -- weights and checkpoints -------------------------------------------------------------------------------------

    def named_full_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, whole tensor), gathering one at a time."""
        return self.engine.named_full_tensors()

    def publish(self, version: int, directory: str) -> WeightManifest:
        """Write the weights for the rollout engines into ``directory``; rank 0's manifest is the real one."""
        if directory not in self._channels:
            checksums = self.config.actor_rollout_ref.rollout.check_weights
            self._channels[directory] = WeightChannel(directory, checksums)
        with on_device(self.engine):
            return self._channels[directory].publish(
                self.named_full_tensors(),
                version,
                dtype=devices.dtype_of(self.config.actor_rollout_ref.rollout.dtype),
                write=self.device.is_main,
            )

    def export(self, directory: str | Path) -> None:
        """Write a Hugging Face folder with the tokenizer."""
        self.engine.export(directory)

    def close(self) -> None:
        """Remove published weights and leave the process group."""
        for channel in self._channels.values():
            channel.close()
        super().close()
