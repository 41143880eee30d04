"""The whole plan: one simulated step, the memory it needs, and what a run of such steps takes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl.trainer.plan.architecture import Architecture
from verl.trainer.plan.costs import EngineCosts, TrainCosts
from verl.trainer.plan.lengths import Episode
from verl.trainer.plan.memory import MicroBatches, critic_scores, critic_updates, policy_scores, policy_updates
from verl.trainer.plan.simulation import Rollout, Search, simulate


@dataclass(frozen=True)
class Costs:
    """What everything costs on the machine that is planned for."""

    engine: EngineCosts
    policy: TrainCosts
    critic: TrainCosts
    side_by_side: bool
    """Policy and critic compute on cores of their own (a CPU), not in turns on one device."""
    write: float
    """Bytes per second of the disk that checkpoints go to."""
    episode_s: float = 0.0
    """Seconds of a rollout worker's processor per episode outside the engine, where they do not overlap with it."""


@dataclass(frozen=True)
class StepTime:
    """Seconds of a training step by phase, named as ``timing_s/*`` of a run."""

    rollout: float
    score: float
    update: float
    publish: float
    search: float
    """Part of the rollout that a retrieval service which answers at once would save."""
    tail: float
    """Part of the rollout in which only the last tenth of the episodes ends."""
    rows: float
    """Sequences that an engine decodes together, on average."""

    @property
    def step(self) -> float:
        """The whole step, without evaluation and saving."""
        return self.rollout + self.score + self.update + self.publish


def step_time(config: Any, episodes: Sequence[Episode], costs: Costs, search: Search) -> StepTime:
    """Estimate a step of ``episodes`` (all of a step's trajectories)."""
    real = _simulated(config, episodes, costs.engine, search)
    instant = _simulated(config, episodes, costs.engine, Search(math.inf, 0.0))
    return StepTime(
        rollout=real.seconds + costs.episode_s * len(episodes) / config.n_rollout_workers,
        score=_score(config, episodes, costs),
        update=_update(config, episodes, costs),
        publish=costs.policy.publish(),
        search=max(0.0, real.seconds - instant.seconds),
        tail=real.tail_s,
        rows=real.row_steps / max(1, real.steps),
    )


def _simulated(config: Any, episodes: Sequence[Episode], engine: EngineCosts, search: Search) -> Rollout:
    rollout = config.actor_rollout_ref.rollout
    return simulate(episodes, config.n_rollout_workers, rollout.max_num_seqs, rollout.chunk_size, engine, search)


@dataclass(frozen=True)
class _Share:
    """What one rank computes in one pass over the step's episodes."""

    tokens: float
    scored: float
    pairs: float


def _share(config: Any, episodes: Sequence[Episode]) -> _Share:
    ranks = config.world_size
    return _Share(
        sum(episode.length for episode in episodes) / ranks,
        sum(episode.model_tokens for episode in episodes) / ranks,
        sum(episode.pairs for episode in episodes) / ranks,
    )


def _together(config: Any, costs: Costs, policy: float, critic: float) -> float:
    if not config.uses_critic:
        return policy
    return max(policy, critic) if costs.side_by_side else policy + critic


def _score(config: Any, episodes: Sequence[Episode], costs: Costs) -> float:
    share = _share(config, episodes)

    def forward(model: TrainCosts, limit: MicroBatches) -> float:
        passes = limit.count(config, len(episodes), share.tokens)
        return model.forward(share.tokens, share.scored, share.pairs, passes)

    policy = forward(costs.policy, policy_scores(config)) * (2 if config.uses_reference else 1)
    return _together(config, costs, policy, forward(costs.critic, critic_scores(config)))


def _update(config: Any, episodes: Sequence[Episode], costs: Costs) -> float:
    share = _share(config, episodes)

    def train(model: TrainCosts, section: Any, limit: MicroBatches) -> float:
        batches = math.ceil(len(episodes) / section.ppo_mini_batch_size)
        passes = batches * limit.count(config, len(episodes) / batches, share.tokens / batches)
        computed = model.train(share.tokens, share.scored, share.pairs, passes)
        return float(section.ppo_epochs * (computed + batches * model.optimizer()))

    policy = train(costs.policy, config.actor_rollout_ref.actor, policy_updates(config))
    return _together(config, costs, policy, train(costs.critic, config.critic, critic_updates(config)))


@dataclass(frozen=True)
class RunTime:
    """Seconds of a whole run; None where the number of steps or rows is unknown."""

    steps: int | None
    evaluations: int | None
    training: float | None
    evaluating: float | None
    saving: float | None

    @property
    def total(self) -> float | None:
        """All of it."""
        known = [part for part in (self.training, self.evaluating, self.saving) if part is not None]
        return sum(known) if self.training is not None else None


def run_time(config: Any, step: StepTime, episodes: Sequence[Episode], costs: Costs, saved_bytes: float) -> RunTime:
    """Estimate the run: its steps, its evaluations at the speed of its rollouts, its checkpoints."""
    steps = n_steps(config)
    rows = n_rows(config.data.val_files, config.data.val_data_num)
    if steps is None:
        return RunTime(None, None, None, None, None)
    trainer = config.trainer
    evaluations = _count(steps, trainer.test_freq) + trainer.val_before_train
    each = None if rows is None else step.rollout * rows * config.actor_rollout_ref.rollout.val_kwargs.n / len(episodes)
    saves = _count(steps, trainer.save_freq)
    evaluating = None if each is None else evaluations * each
    return RunTime(steps, evaluations, steps * step.step, evaluating, saves * saved_bytes / costs.write)


def _count(steps: int, frequency: int) -> int:
    """Steps that are due, the last one always."""
    due = steps // frequency if frequency > 0 else 0
    return due + (1 if frequency <= 0 or steps % frequency else 0)


def n_steps(config: Any) -> int | None:
    """Return the updates of the run; None when they follow from rows that are not here."""
    if config.trainer.total_training_steps is not None:
        return int(config.trainer.total_training_steps)
    rows = n_rows(config.data.train_files, config.data.train_data_num)
    return None if rows is None else rows // config.data.train_batch_size * config.trainer.total_epochs


def n_rows(files: Sequence[str], limit: int | None) -> int | None:
    """Count the rows of data files, at most ``limit``; None when a file is not here."""
    if not all(Path(file).is_file() for file in files):
        return limit
    total = sum(_rows_of(Path(file)) for file in files)
    return total if limit is None else min(limit, total)


def _rows_of(file: Path) -> int:
    if file.suffix == ".parquet":
        import pyarrow.parquet

        return int(pyarrow.parquet.read_metadata(file).num_rows)
    with file.open("rb") as stream:
        return sum(1 for line in stream if line.strip())


def tokens_per_step(episodes: Sequence[Episode]) -> tuple[int, int]:
    """Return (all tokens, model tokens) of a step."""
    return sum(episode.length for episode in episodes), sum(episode.model_tokens for episode in episodes)


def notes(config: Any, model: Architecture, step: StepTime, memory: float, device_bytes: float | None) -> list[str]:
    """Return what deserves a change before the run is queued; ``memory`` is the largest use of a rank."""
    found = []
    if device_bytes is not None and memory > 0.92 * device_bytes:
        found.append(
            f"memory does not fit: {memory / 2**30:.0f} of {device_bytes / 2**30:.0f} GiB per device; in this order: "
            "enable_gradient_checkpointing=true, smaller ppo_micro_batch_size (or ppo_max_token_len_per_gpu), "
            "param_offload and optimizer_offload, more devices"
        )
    if step.search > 0.2 * step.step:
        found.append(
            f"the retrieval service costs {step.search / step.step:.0%} of a step: more replicas behind its "
            "proxy, or a faster backend"
        )
    if step.tail > 0.3 * step.rollout:
        found.append(
            f"the longest tenth of the episodes takes {step.tail / step.rollout:.0%} of the rollout: a smaller "
            "max_response_length or max_turns shortens it"
        )
    rollout = config.actor_rollout_ref.rollout
    if rollout.chunk_size < rollout.max_num_seqs and step.rows > 0.5 * rollout.chunk_size:
        per_worker = config.data.train_batch_size * rollout.group_size / config.n_rollout_workers
        if per_worker > rollout.chunk_size:
            found.append(
                f"an engine decodes {step.rows:.0f} sequences at once and is dealt {rollout.chunk_size} at a time; "
                f"rollout.chunk_size={math.ceil(per_worker)} would deal all of them"
            )
    return found
