"""What the trainer adds to a task's reward for the length of an episode; the task's own costs are its business."""

from __future__ import annotations

from typing import Any

from verl.types import Reward, Trajectory


def overlong_penalty(n_tokens: int, max_tokens: int, buffer: int) -> float:
    """Return DAPO's soft penalty for long outputs (Yu et al. 2025, eq. 13), between -1 and 0.

    0 up to max_tokens - buffer, then falling linearly, -1 from max_tokens on. Without a buffer it is a step behind
    max_tokens.
    """
    over = n_tokens - (max_tokens - buffer)
    if over <= 0:
        return 0.0
    return -1.0 if over >= buffer else -over / buffer


def shape_reward(trajectory: Trajectory, config: Any) -> Trajectory:
    """Add the length terms of ``algorithm.shaping`` to a trajectory's reward.

    Lengths are model tokens of the whole episode, observations left out. Parts ``overlong`` and ``length`` (tokens)
    are logged unweighted. A failed episode, or one without a reward, is returned as it is.
    """
    reward = trajectory.reward
    if not (config.overlong_coef or config.length_coef) or trajectory.stop.failed or reward is None:
        return trajectory
    n_tokens = sum(trajectory.loss_mask)
    total, parts = reward.total, dict(reward.parts)
    if config.overlong_coef:
        parts["overlong"] = overlong_penalty(n_tokens, config.max_tokens, config.overlong_buffer)
        total += config.overlong_coef * parts["overlong"]
    if config.length_coef:
        parts["length"] = float(n_tokens)
        total -= config.length_coef * n_tokens / 1000.0
    return trajectory.with_reward(Reward(total, parts, reward.turn_rewards, reward.failure))
