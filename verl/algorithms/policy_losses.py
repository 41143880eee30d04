"""Policy losses per token, each a pure function of one signature; ``POLICY_LOSSES`` is the table.

Axes: M model tokens of a micro-batch, n its trajectories. The sum over tokens with its weights is ``losses``' business.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from verl.algorithms.losses import Terms
from verl.registry import Registry


@dataclass(frozen=True)
class Clip:
    """Bounds of the ratio. Example: ``Clip(0.2, 0.28)`` keeps it within 0.8 and 1.28."""

    low: float
    """The ratio stays above 1 - low."""
    high: float
    """The ratio stays below 1 + high."""
    dual: float | None = None
    """With a negative advantage the loss is at most -dual * advantage (above 1); None: no bound."""


@dataclass(frozen=True)
class PolicyInput:
    """What a policy loss may look at."""

    logprobs: Tensor
    """[M] of the policy being trained; carries the gradient."""
    old_logprobs: Tensor
    """[M] of the policy before the first update of the step."""
    advantages: Tensor
    """[M]"""
    counts: Sequence[int]
    """[n] model tokens per trajectory; they sum to M."""
    clip: Clip


def ppo(data: PolicyInput) -> Terms:
    """Clipped surrogate, negated (Schulman et al. 2017): -min(r A, clip(r, 1 - low, 1 + high) A).

    low and high apart are DAPO's clip-higher (Yu et al. 2025); ``dual`` is dual-clip (Ye et al. 2020): a token with
    A < 0 costs at most -dual A, however far its ratio has risen.
    """
    ratio = torch.exp(data.logprobs - data.old_logprobs)
    return _clipped_surrogate(ratio, data.advantages, data.clip)


def gspo(data: PolicyInput) -> Terms:
    """Group sequence policy optimisation (Zheng et al. 2025): the surrogate with one ratio per trajectory.

    s = exp(mean over the trajectory's tokens of log r), clipped as a whole. Written as the paper's GSPO-token (section
    4.3), s_t = sg(s) r_t / sg(r_t), which is the same in value, and in gradient when a trajectory's advantages are
    equal. Needs ``loss_agg=sequence``. A trajectory of one token is PPO.
    """
    log_ratio = data.logprobs - data.old_logprobs
    mean = _trajectory_means(log_ratio.detach(), data.counts)
    ratio = torch.exp(mean + data.logprobs - data.logprobs.detach())
    return _clipped_surrogate(ratio, data.advantages, data.clip)


def cispo(data: PolicyInput) -> Terms:
    """CISPO (MiniMax-M1, 2025): REINFORCE whose importance weight is clipped and has no gradient.

    -sg(clip(r, 1 - low, 1 + high)) A log p: a clipped token keeps its gradient, with a bounded weight. The paper leaves
    the lower bound open (``clip_ratio_low=1``).
    """
    ratio = torch.exp(data.logprobs - data.old_logprobs).detach()
    bounded = ratio.clamp(1.0 - data.clip.low, 1.0 + data.clip.high)
    return Terms(-bounded * data.advantages * data.logprobs, (bounded != ratio).float())


POLICY_LOSSES: Registry[Callable[[PolicyInput], Terms]] = Registry(
    "policy loss", {"ppo": ppo, "gspo": gspo, "cispo": cispo}
)
"""``actor.policy_loss`` -> function."""


def clip_of(actor: Any) -> Clip:
    """Read the bounds of the config section ``actor``; ``clip_ratio`` stands in for what is not set."""
    low = actor.clip_ratio if actor.clip_ratio_low is None else actor.clip_ratio_low
    high = actor.clip_ratio if actor.clip_ratio_high is None else actor.clip_ratio_high
    return Clip(low, high, actor.clip_ratio_c)


def likelihood_displacement(data: PolicyInput) -> Tensor:
    """Penalty [M] on likelihood that good trajectories lose (Deng et al. 2025, LLDS): max(0, log p_old - log p).

    It acts only in trajectories that deserve no loss (mean advantage not negative) and have lost likelihood as a whole,
    and there only on the tokens that lost; elsewhere it is 0, and so is its gradient.
    """
    lost = data.old_logprobs - data.logprobs
    good = _trajectory_means(data.advantages, data.counts) >= 0
    fallen = _trajectory_means(lost.detach(), data.counts) > 0
    return lost.clamp(min=0.0) * (good & fallen)


def _clipped_surrogate(ratio: Tensor, advantages: Tensor, clip: Clip) -> Terms:
    plain = -advantages * ratio
    bounded = -advantages * ratio.clamp(1.0 - clip.low, 1.0 + clip.high)
    loss, cut = torch.maximum(plain, bounded), bounded > plain
    if clip.dual is not None:
        ceiling = -clip.dual * advantages
        over = (advantages < 0) & (loss > ceiling)
        loss, cut = torch.where(over, ceiling, loss), cut | over
    return Terms(loss, cut.detach().float())


def _trajectory_means(values: Tensor, counts: Sequence[int]) -> Tensor:
    """Return [M] the mean over each token's trajectory."""
    sizes = torch.tensor(list(counts), device=values.device)
    owner = torch.repeat_interleave(torch.arange(len(counts), device=values.device), sizes)
    sums = torch.zeros(len(counts), dtype=values.dtype, device=values.device).index_add_(0, owner, values)
    return (sums / sizes)[owner]
