"""The critic worker: reads values and fits them to returns. One process per rank of the group.

The critic is a network of its own, started from the same language model, with a scalar head whose value at a position
is the estimate before the next token.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verl.algorithms.losses import token_weights, value_terms
from verl.data.batch import MicroBatch
from verl.data.samples import ScoredRows
from verl.types import Sample
from verl.workers import device as devices
from verl.workers.engine import Engine, EngineSpec
from verl.workers.passes import Limit, UpdatePlan, score_rows, train_pass
from verl.workers.policy import optim_spec


class CriticWorker:
    """``setup`` must be called first; all ranks make the same calls in the same order."""

    def __init__(self, config: Any, total_steps: int) -> None:
        self.config = config
        self.total_steps = total_steps
        self._engine: Engine | None = None

    @property
    def engine(self) -> Engine:
        """The training engine; an error before ``setup``."""
        if self._engine is None:
            raise RuntimeError("CriticWorker.setup was not called")
        return self._engine

    def setup(self) -> None:
        """Join the group and load the model. Raises ModelError, ResourceError."""
        config = self.config.critic
        self.device = devices.setup_device(self.config.cluster.threads_per_worker)
        devices.seed_everything(self.config.trainer.seed)
        self._engine = Engine(
            EngineSpec(
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
            ),
            self.device,
        )
        self.engine.offload()

    def values(self, samples: Sequence[Sample]) -> ScoredRows:
        """Return this rank's share of the values: at each model token, read at the position that predicts it."""
        config = self.config.critic
        limit = Limit(config.use_dynamic_bsz, config.ppo_max_token_len_per_gpu, config.forward_micro_batch_size)
        self.engine.load_back()
        try:
            rows, _ = score_rows(self.engine, samples, limit)
        finally:
            self.engine.offload()
        return ScoredRows(rows)

    def update(self, samples: Sequence[Sample]) -> dict[str, float]:
        """Make one trainer step on samples with values and returns; return ``critic/*`` figures.

        Raises HealthError when a gradient is not finite.
        """
        config = self.config.critic
        limit = Limit(config.use_dynamic_bsz, config.ppo_max_token_len_per_gpu, config.ppo_micro_batch_size)
        plan = UpdatePlan(config.ppo_mini_batch_size, config.ppo_epochs, limit, ("values", "returns"))
        self.engine.load_back()
        try:
            (loss, clipped), stepped = train_pass(self.engine, samples, plan, self._terms)
        finally:
            self.engine.offload()
        figures = {
            "critic/loss": loss,
            "critic/clip_fraction": clipped,
            "critic/explained_variance": explained_variance(samples),
            "memory/critic": devices.max_over_ranks(self.device, float(devices.peak_memory_bytes(self.device))),
        }
        return figures | {f"critic/{name}": value for name, value in stepped.items()}

    def _terms(self, batch: MicroBatch, values: Tensor, _: Tensor) -> tuple[Tensor, Tensor]:
        terms = value_terms(
            values, batch.columns["values"], batch.columns["returns"], self.config.critic.cliprange_value
        )
        weights = token_weights(batch.counts, batch.total_tokens, batch.total_sequences).to(values.device)
        loss = (terms.loss * weights).sum()
        return loss, torch.stack([loss.detach(), (terms.clipped * weights).sum()])

    def save(self, directory: str | Path) -> None:
        """Write the trainer state into an empty folder."""
        self.engine.save(directory)

    def load(self, directory: str | Path) -> None:
        """Restore what ``save`` wrote, at any number of ranks. Raises CheckpointError."""
        self.engine.load(directory)

    def close(self) -> None:
        """Leave the process group."""
        devices.close_device()


def explained_variance(samples: Sequence[Sample]) -> float:
    """Return 1 - Var(returns - values) / Var(returns) over the model tokens; 0.0 when the returns are all equal."""
    returns = np.array([r for s in samples for r, trained in zip(s.returns or (), s.loss_mask, strict=True) if trained])
    values = np.array([v for s in samples for v, trained in zip(s.values or (), s.loss_mask, strict=True) if trained])
    spread = returns.var()
    return float(1.0 - (returns - values).var() / spread) if spread > 0 else 0.0
