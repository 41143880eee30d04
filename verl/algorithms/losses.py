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


def value_terms(values: Tensor, old_values: Tensor, returns: Tensor, clip_range: float) -> Terms:
    """Return 0.5 max((v - R)^2, (v_clip - R)^2), where v_clip stays within ``clip_range`` of the old value."""
    near = torch.clamp(values, old_values - clip_range, old_values + clip_range)
    plain, bounded = (values - returns) ** 2, (near - returns) ** 2
    return Terms(0.5 * torch.maximum(plain, bounded), (bounded > plain).detach().float())


@dataclass(frozen=True)
class Totals:
    """What a mini-batch's loss is divided by; counted over all ranks and micro-batches before the first backward."""

    tokens: float
    """Model tokens."""
    sequences: float
    """Trajectories."""
    scale: float = 1.0
    """Tokens that stand for a trajectory's length (``constant``)."""


def token_weights(counts: Sequence[int], totals: Totals) -> Tensor:
    """Return [M] weights 1 / total tokens: every model token of the mini-batch counts the same."""
    return torch.full((sum(counts),), 1.0 / totals.tokens)


def sequence_weights(counts: Sequence[int], totals: Totals) -> Tensor:
    """Return [M] weights 1 / (tokens of the trajectory * trajectories): every trajectory counts the same."""
    per_sequence = torch.tensor([1.0 / (max(count, 1) * totals.sequences) for count in counts])
    return per_sequence.repeat_interleave(torch.tensor(list(counts)))


def constant_weights(counts: Sequence[int], totals: Totals) -> Tensor:
    """Return [M] weights 1 / (scale * trajectories): no length matters (Dr. GRPO, Liu et al. 2025)."""
    return torch.full((sum(counts),), 1.0 / (totals.scale * totals.sequences))


AGGREGATIONS: Registry[Callable[[Sequence[int], Totals], Tensor]] = Registry(
    "loss aggregation", {"token": token_weights, "sequence": sequence_weights, "constant": constant_weights}
)
"""``loss_agg`` -> weights [M]; a micro-batch's share of the loss is sum(terms * weights)."""
