"""The critic worker: reads values and fits them to returns. One process per rank of the group.

The critic is a network of its own, started from the same language model, with a scalar head whose value at a position
is the estimate before the next token.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from verl.algorithms.losses import Totals, token_weights, value_terms
from verl.data.batch import MicroBatch
from verl.data.samples import ScoredRows
from verl.types import Sample
from verl.workers.engine import EngineSpec
from verl.workers.passes import Limit, UpdatePlan, score_rows, train_pass
from verl.workers.trained_model import TrainedModel, on_device, optim_spec


class CriticWorker(TrainedModel):
    """The value network of PPO."""

    def spec(self) -> EngineSpec:
        """Return the model with a scalar head, as ``critic`` describes it."""
        config = self.config.critic
        return EngineSpec(
            model_path=config.model.path,
            seed=self.config.trainer.seed,
            value_head=True,
            dtype=config.model.dtype,
            trust_remote_code=config.model.trust_remote_code,
            gradient_checkpointing=config.model.enable_gradient_checkpointing,
            max_grad_norm=config.grad_clip,
            param_offload=config.model.fsdp_config.param_offload,
            optimizer_offload=config.model.fsdp_config.optimizer_offload,
            optim=optim_spec(config.optim, self.total_steps),
        )

    def values(self, samples: Sequence[Sample]) -> ScoredRows:
        """Return this rank's share of the values: at each model token, read at the position that predicts it."""
        config = self.config.critic
        limit = Limit(config.use_dynamic_bsz, config.ppo_max_token_len_per_gpu, config.forward_micro_batch_size)
        with on_device(self.engine) as engine:
            rows, _ = score_rows(engine, samples, limit)
        return ScoredRows(rows)

    def update(self, samples: Sequence[Sample]) -> dict[str, float]:
        """Make one trainer step on samples with values and returns; return ``critic/*`` figures.

        A mini-batch whose gradient is not finite is left out: ``critic/dropped_updates`` counts them,
        ``dropped_prompts`` names what they held.
        """
        config = self.config.critic
        limit = Limit(config.use_dynamic_bsz, config.ppo_max_token_len_per_gpu, config.ppo_micro_batch_size)
        plan = UpdatePlan(config.ppo_mini_batch_size, config.ppo_epochs, limit, ("values", "returns"))
        with on_device(self.engine) as engine:
            trained = train_pass(engine, samples, plan, self._terms)
        self._dropped = trained.dropped
        return trained.named(("loss", "clip_fraction"), "critic") | {
            "critic/explained_variance": explained_variance(samples),
            "memory/critic": self.peak_memory(),
        }

    def _terms(self, batch: MicroBatch, values: Tensor, _: Tensor) -> tuple[Tensor, Tensor]:
        terms = value_terms(
            values, batch.columns["values"], batch.columns["returns"], self.config.critic.cliprange_value
        )
        weights = token_weights(batch.counts, Totals(batch.total_tokens, batch.total_sequences)).to(values.device)
        loss = (terms.loss * weights).sum()
        return loss, torch.stack([loss.detach(), (terms.clipped * weights).sum()])


def explained_variance(samples: Sequence[Sample]) -> float:
    """Return 1 - Var(returns - values) / Var(returns) over the model tokens; 0.0 when the returns are all equal."""
    returns = np.array([r for s in samples for r, trained in zip(s.returns or (), s.loss_mask, strict=True) if trained])
    values = np.array([v for s in samples for v, trained in zip(s.values or (), s.loss_mask, strict=True) if trained])
    spread = returns.var()
    return float(1.0 - (returns - values).var() / spread) if spread > 0 else 0.0
