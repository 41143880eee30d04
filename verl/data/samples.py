"""From finished episodes to training samples, and the columns that workers fill in.

Every episode that does not reach the loss is counted here, by reason, and nowhere else.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from verl.errors import HealthError
from verl.types import Origin, Reward, Sample, Trajectory

FAILED = "failed"
NO_MODEL_TOKENS = "no_model_tokens"
NON_FINITE = "non_finite"
REWARD_FAILED = "reward_failed"
DROP_REASONS = (FAILED, REWARD_FAILED, NO_MODEL_TOKENS, NON_FINITE)


@dataclass(frozen=True)
class Assembled:
    """The samples of a step and how many trajectories did not become one, by reason (all reasons, 0 included)."""

    samples: list[Sample]
    drops: dict[str, int]


@dataclass(frozen=True)
class ScoredRows:
    """One rank's share of a scoring pass over a list of samples."""

    rows: tuple[tuple[int, tuple[float, ...]], ...]
    """(index into the list, [L] values: 0.0 where the loss mask is false)"""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Figures over all ranks, the same on every rank."""


def assemble(trajectories: Sequence[Trajectory]) -> Assembled:
    """Make a sample of every trajectory that can be trained on, in order.

    Failed episodes, episodes whose reward could not be computed, episodes without model tokens and episodes with a
    log-prob that is not finite are dropped and counted. The reward's turn shares go on the last model token of their
    turn, the rest on the last model token.
    """
    samples, drops = [], Counter(dict.fromkeys(DROP_REASONS, 0))
    for trajectory in trajectories:
        reason = _unusable(trajectory)
        if reason is None:
            samples.append(_sample(trajectory))
        else:
            drops[reason] += 1
    return Assembled(samples, dict(drops))


def permute_rewards(trajectories: Sequence[Trajectory], seed: int) -> list[Trajectory]:
    """Give every trajectory the reward of another prompt's: the control in which nothing can be learned.

    The usable trajectories are laid out prompt after prompt, in a seeded order of prompts, and the rewards move on by
    the size of the largest group, so that none stays with its prompt. Rewards keep their distribution; their turn
    shares are gone. Raises HealthError when one prompt has more than half of them.
    """
    by_prompt: dict[str, list[int]] = {}
    for index, trajectory in enumerate(trajectories):
        if usable(trajectory):
            by_prompt.setdefault(trajectory.prompt_id, []).append(index)
    prompts = sorted(by_prompt)
    random.Random(seed).shuffle(prompts)
    order = [index for prompt in prompts for index in by_prompt[prompt]]
    shift = max(map(len, by_prompt.values()), default=0)
    if 2 * shift > len(order):
        raise HealthError(
            f"algorithm.permute_rewards: one of {len(prompts)} prompts has {shift} of {len(order)} usable episodes; "
            "raise data.train_batch_size"
        )
    result = list(trajectories)
    for place, index in enumerate(order):
        reward = trajectories[order[(place + shift) % len(order)]].reward
        assert reward is not None
        result[index] = trajectories[index].with_reward(Reward(reward.total, {"permuted": reward.total}))
    return result


def usable(trajectory: Trajectory) -> bool:
    """True when a trajectory can become a sample."""
    return _unusable(trajectory) is None


def _unusable(trajectory: Trajectory) -> str | None:
    if trajectory.stop.failed:
        return FAILED
    if trajectory.reward is not None and trajectory.reward.failure is not None:
        return REWARD_FAILED
    if not trajectory.turn_ends:
        return NO_MODEL_TOKENS
    if not all(math.isfinite(value) for value in trajectory.logprobs):
        return NON_FINITE
    return None


def _sample(trajectory: Trajectory) -> Sample:
    if trajectory.reward is None:
        raise ValueError(f"trajectory {trajectory.trajectory_id} has no reward")
    versions = [s.policy_version for s in trajectory.segments if s.policy_version is not None and s.token_ids]
    return Sample(
        sample_id=trajectory.trajectory_id,
        prompt_id=trajectory.prompt_id,
        token_ids=trajectory.token_ids,
        loss_mask=trajectory.loss_mask,
        rewards=_place_reward(trajectory),
        score=trajectory.reward.total,
        rollout_logprobs=trajectory.logprobs,
        policy_version=min(versions),
    )


def _place_reward(trajectory: Trajectory) -> tuple[float, ...]:
    """Return [L] rewards that add up to the total."""
    assert trajectory.reward is not None
    ends, position = [], 0
    for segment in trajectory.segments:
        position += len(segment.token_ids)
        if segment.origin is Origin.MODEL:
            ends.append(position - 1 if segment.token_ids else None)
    rewards = [0.0] * position
    rest = trajectory.reward.total
    for turn, share in trajectory.reward.turn_rewards.items():
        end = ends[turn] if 0 <= turn < len(ends) else None
        if end is not None:  # the share of a turn without tokens stays with the rest
            rewards[end] += share
            rest -= share
    rewards[trajectory.turn_ends[-1]] += rest
    return tuple(rewards)


def fill(samples: Sequence[Sample], column: str, shares: Iterable[ScoredRows]) -> list[Sample]:
    """Return the samples with ``column`` set from all ranks' shares; every sample must occur exactly once."""
    rows: dict[int, tuple[float, ...]] = {}
    for share in shares:
        for index, values in share.rows:
            if index in rows:
                raise ValueError(f"{column}: sample {index} was scored twice")
            rows[index] = values
    if len(rows) != len(samples):
        raise ValueError(f"{column}: {len(rows)} of {len(samples)} samples were scored")
    return [replace(sample, **{column: rows[index]}) for index, sample in enumerate(samples)]  # type: ignore[arg-type]
