"""Importance weights for tokens that another policy has sampled: the rollout engine's numerics, or older weights.

The loss is an expectation under the trainer's policy before the step (log-probs ``old``), the tokens came from the
engine's (``rollout``). The weight w = p_old / p_rollout mends that, bounded so that no token or trajectory dominates.

Axes: N trajectories, m model tokens of one trajectory, L all its tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from verl.algorithms.estimator import Row
from verl.data.batch import unpack
from verl.registry import Registry
from verl.types import Sample

_LOG_LIMIT = 20.0
"""Bound on |log w| before exponentiation: a trajectory's sum may exceed what a float64 holds."""


def token_ratios(log_ratio: Row) -> Row:
    """Return [m] w_t = exp(log p_old - log p_rollout) of each token on its own (biased, little variance)."""
    ratios: Row = np.exp(np.clip(log_ratio, -_LOG_LIMIT, _LOG_LIMIT))
    return ratios


def sequence_ratios(log_ratio: Row) -> Row:
    """Return [m] the product over the trajectory, the same on every token (unbiased, much variance)."""
    return np.full(len(log_ratio), np.exp(np.clip(log_ratio.sum(), -_LOG_LIMIT, _LOG_LIMIT)))


def geometric_ratios(log_ratio: Row) -> Row:
    """Return [m] the geometric mean over the trajectory: does not grow with its length."""
    return np.full(len(log_ratio), np.exp(np.clip(log_ratio.mean(), -_LOG_LIMIT, _LOG_LIMIT)))


LEVELS: Registry[Callable[[Row], Row]] = Registry(
    "level of the importance correction",
    {"token": token_ratios, "sequence": sequence_ratios, "geometric": geometric_ratios},
)


def truncate(ratios: Row, low: float | None, high: float) -> Row:
    """Return min(w, high): truncated importance sampling (Ionides 2008; Yao et al. 2025). ``low`` plays no role."""
    return np.minimum(ratios, high)


def mask(ratios: Row, low: float | None, high: float) -> Row:
    """Return w where low <= w <= high, else 0: masked importance sampling (IcePop, 2025; Liu et al. 2025).

    Masked tokens stay in the counts that losses are divided by, so that a mask never makes the others heavier.
    """
    inside = (ratios <= high) & (ratios >= (0.0 if low is None else low))
    return np.where(inside, ratios, 0.0)


MODES: Registry[Callable[[Row, float | None, float], Row]] = Registry(
    "importance correction", {"truncate": truncate, "mask": mask}
)


def effective_share(weights: Sequence[float] | Row) -> float:
    """Return Kish's effective sample size over the number: (sum w)^2 / (n sum w^2); 0 when all weights are 0."""
    values = np.asarray(weights, dtype=np.float64)
    squares = float((values**2).sum())
    return float(values.sum()) ** 2 / (len(values) * squares) if squares > 0 else 0.0


def correct(samples: Sequence[Sample], config: Any) -> tuple[list[Sample], dict[str, float]]:
    """Fill in ``correction`` of samples with old log-probs; return them with ``correction/*`` figures.

    ``config`` is the section ``algorithm.correction`` (mode, level, low, high); mode ``none`` changes nothing.
    """
    if config.mode == "none":
        return list(samples), {}
    filled, raw, used = [], [], []
    for sample in samples:
        if sample.old_logprobs is None:
            raise ValueError(f"sample {sample.sample_id}: the correction needs old_logprobs")
        chosen = np.asarray(sample.loss_mask, dtype=bool)
        log_ratio = np.asarray(sample.old_logprobs)[chosen] - np.asarray(sample.rollout_logprobs)[chosen]
        ratios = LEVELS[config.level](log_ratio)
        weights = MODES[config.mode](ratios, config.low, config.high)
        filled.append(replace(sample, correction=unpack(sample.loss_mask, weights)))
        raw.append(ratios)
        used.append(weights)
    ratios, weights = np.concatenate(raw), np.concatenate(used)
    return filled, {
        "correction/weight": float(weights.mean()),
        "correction/effective_share": effective_share(weights),
        "correction/bounded": float((weights != ratios).mean()),
        "correction/largest_ratio": float(ratios.max()),
    }
