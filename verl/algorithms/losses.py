"""Per-token loss terms and how they are summed. Everything is divided by counts of the whole mini-batch, never averaged
over what happens to be in one micro-batch.

Axes: M model tokens of a micro-batch, n its trajectories.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from verl.registry import Registry


@dataclass(frozen=True)
class Terms:
    """A loss per token and which tokens the clipping changed."""

    loss: Tensor
    """[M]"""
    clipped: Tensor
    """[M] 1.0 where the clipped branch decides and cuts the gradient, else 0.0; no gradient."""


def policy_terms(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, clip_ratio: float) -> Terms:
    """Return PPO's clipped surrogate, negated (Schulman et al. 2017): -min(r A, clip(r, 1 - eps, 1 + eps) A)."""
    ratio = torch.exp(logprobs - old_logprobs)
    plain = -advantages * ratio
    bounded = -advantages * ratio.clamp(1.0 - clip_ratio, 1.0 + clip_ratio)
    return Terms(torch.maximum(plain, bounded), (bounded > plain).detach().float())


def value_terms(values: Tensor, old_values: Tensor, returns: Tensor, clip_range: float) -> Terms:
    """Return 0.5 max((v - R)^2, (v_clip - R)^2), where v_clip stays within ``clip_range`` of the old value."""
    near = torch.clamp(values, old_values - clip_range, old_values + clip_range)
    plain, bounded = (values - returns) ** 2, (near - returns) ** 2
    return Terms(0.5 * torch.maximum(plain, bounded), (bounded > plain).detach().float())


def token_weights(counts: Sequence[int], total_tokens: float, total_sequences: float) -> Tensor:
    """Return [M] weights 1 / total_tokens: every model token of the mini-batch counts the same."""
    return torch.full((sum(counts),), 1.0 / total_tokens)


def sequence_weights(counts: Sequence[int], total_tokens: float, total_sequences: float) -> Tensor:
    """Return [M] weights 1 / (tokens of the trajectory * total_sequences): every trajectory counts the same."""
    per_sequence = torch.tensor([1.0 / (max(count, 1) * total_sequences) for count in counts])
    return per_sequence.repeat_interleave(torch.tensor(list(counts)))


AGGREGATIONS: Registry[Callable[[Sequence[int], float, float], Tensor]] = Registry(
    "loss aggregation", {"token": token_weights, "sequence": sequence_weights}
)
"""``loss_agg`` -> weights [M]; a micro-batch's share of the loss is sum(terms * weights)."""
