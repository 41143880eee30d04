"""Sampling one token for every row of a batch at once.

Axes: n rows, V vocabulary. Each row brings its own uniform number, so that a row's choice depends on its own seed and
logits alone, whoever shares the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from verl.errors import EngineError
from verl.types import Sampling


def uniforms(seed: int | None, context_length: int, count: int) -> np.ndarray:
    """Return ``count`` float64 numbers in [0, 1) for one request.

    The context length is part of the key: the turns of an episode share a seed and must not share their numbers.
    ``seed=None`` draws from the operating system.
    """
    generator = np.random.default_rng() if seed is None else np.random.default_rng([seed, context_length])
    return generator.random(count)


@dataclass(frozen=True)
class SamplingBatch:
    """The sampling parameters of n rows as tensors; rebuilt only when the set of rows changes."""

    temperature: Tensor
    """[n, 1] float32; 1 for greedy rows, whose log-probs are those of temperature 1."""
    greedy: Tensor
    """[n] bool."""
    all_greedy: bool
    any_greedy: bool
    filtered: Tensor | None
    """[f] indices of the rows that use top-p or top-k; None when there are none."""
    top_p: Tensor
    """[f, 1] float32."""
    top_k: Tensor
    """[f, 1] int64, V where all are kept."""

    @classmethod
    def build(cls, rows: Sequence[Sampling], vocabulary: int, device: torch.device) -> SamplingBatch:
        """Gather the parameters of ``rows`` in row order."""
        greedy = [row.temperature == 0 for row in rows]
        temperature = [1.0 if is_greedy else row.temperature for row, is_greedy in zip(rows, greedy, strict=True)]
        cut = [i for i, row in enumerate(rows) if not greedy[i] and (row.top_p < 1.0 or 0 < row.top_k < vocabulary)]
        top_k = [rows[i].top_k if 0 < rows[i].top_k < vocabulary else vocabulary for i in cut]
        return cls(
            temperature=torch.tensor(temperature, dtype=torch.float32, device=device).unsqueeze(1),
            greedy=torch.tensor(greedy, device=device),
            all_greedy=all(greedy),
            any_greedy=any(greedy),
            filtered=torch.tensor(cut, device=device) if cut else None,
            top_p=torch.tensor([rows[i].top_p for i in cut], dtype=torch.float32, device=device).unsqueeze(1),
            top_k=torch.tensor(top_k, dtype=torch.int64, device=device).unsqueeze(1),
        )


def kept_tokens(weights: Tensor, top_p: Tensor, top_k: Tensor) -> Tensor:
    """Return the mask [f, V] of the tokens that top-k and then top-p keep.

    ``weights`` [f, V] are unnormalised probabilities. Top-p keeps the smallest set of most probable tokens whose mass
    reaches p (Holtzman et al. 2020), measured inside what top-k left; the most probable token is always kept.
    """
    ordered, order = weights.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(weights.shape[-1], device=weights.device)
    ordered = ordered.masked_fill(rank >= top_k, 0.0)
    before = ordered.cumsum(-1, dtype=torch.float64) - ordered
    keep = (before < top_p * ordered.sum(-1, keepdim=True, dtype=torch.float64)) & (rank < top_k)
    keep[:, 0] = True
    return torch.zeros_like(keep).scatter_(-1, order, keep)


def sample(logits: Tensor, batch: SamplingBatch, uniform: Tensor) -> tuple[Tensor, Tensor, float]:
    """Choose one token per row.

    ``logits`` [n, V] float32; ``uniform`` [n] float64. Returns the token ids [n] int64, their log-probs [n] float32 of
    softmax(logits / T) before top-p and top-k, and the summed probability that top-p and top-k cut away. Sampling
    inverts the cumulative distribution in float64, so a token of probability zero is never chosen.
    Raises EngineError when a row's logits are not finite.
    """
    scaled = logits / batch.temperature
    peak = scaled.amax(-1, keepdim=True)
    weights = (scaled - peak).exp_()
    if batch.all_greedy:
        total = weights.sum(-1, dtype=torch.float64)
        tokens = scaled.argmax(-1)
        cut = 0.0
    else:
        cumulative = weights.cumsum(-1, dtype=torch.float64)
        total = cumulative[:, -1].clone()
        cut = _cut(weights, cumulative, total, batch)
        tokens = _invert(cumulative, uniform)
        if batch.any_greedy:
            tokens = torch.where(batch.greedy, scaled.argmax(-1), tokens)
    if not bool(torch.isfinite(total).all()):
        raise EngineError("the model returned logits that are not finite; the weights are probably damaged (NaN)")
    chosen = scaled.gather(-1, tokens.unsqueeze(-1)) - peak
    return tokens, (chosen.squeeze(-1).double() - total.log()).float(), cut


def _cut(weights: Tensor, cumulative: Tensor, total: Tensor, batch: SamplingBatch) -> float:
    """Overwrite the cumulative rows that top-p or top-k filter; return the probability mass cut, summed over rows."""
    if batch.filtered is None:
        return 0.0
    subset = weights[batch.filtered]
    kept = subset * kept_tokens(subset, batch.top_p, batch.top_k)
    filtered = kept.cumsum(-1, dtype=torch.float64)
    cumulative[batch.filtered] = filtered
    return float((1.0 - filtered[:, -1] / total[batch.filtered]).sum())


def _invert(cumulative: Tensor, uniform: Tensor) -> Tensor:
    """Return the first index whose cumulative weight exceeds uniform * total: [n]."""
    total = cumulative[:, -1]
    # Rounding may lift the product to the total itself, which no index exceeds.
    target = torch.minimum(uniform * total, torch.nextafter(total, torch.zeros_like(total)))
    index = torch.searchsorted(cumulative, target.unsqueeze(-1), right=True).squeeze(-1)
    return index.clamp_(max=cumulative.shape[-1] - 1)
