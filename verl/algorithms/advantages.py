"""Advantages and value targets of one step, from rewards, values and groups.

Estimators see model tokens only: observations, hints and prompts are taken out before, so no estimator can pass credit
through them or whiten over them, and inserting masked tokens changes nothing.

Axes: N trajectories, m model tokens of one trajectory, L all its tokens.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from verl.algorithms.kl import ESTIMATORS
from verl.data.batch import unpack
from verl.registry import Registry
from verl.types import Sample

Row = NDArray[np.float64]
"""[m]"""
WHITEN_EPS = 1e-8
GROUP_EPS = 1e-6


@dataclass(frozen=True)
class AdvantageInput:
    """What an estimator may look at. Example of one trajectory: rewards (0, 1), values (0.2, 0.5), score 1."""

    rewards: tuple[Row, ...]
    """[N][m] reward per model token, KL penalty included."""
    scores: tuple[float, ...]
    """[N] whole reward of the trajectory, KL penalty included."""
    group_ids: tuple[str, ...]
    """[N] trajectories of one prompt share one."""
    values: tuple[Row, ...] | None
    """[N][m] the critic's estimate before each token; None without a critic."""
    gamma: float
    lam: float
    whiten: bool


@dataclass(frozen=True)
class AdvantageOutput:
    """What an estimator returns."""

    advantages: tuple[Row, ...]
    """[N][m]"""
    returns: tuple[Row, ...] | None = None
    """[N][m] value targets; None without a critic."""
    metrics: dict[str, float] = field(default_factory=dict)


def gae(data: AdvantageInput) -> AdvantageOutput:
    """Generalised advantage estimation (Schulman et al. 2016), gamma and lambda per model token.

    delta_t = r_t + gamma V_{t+1} - V_t, A_t = delta_t + gamma lam A_{t+1}, return_t = A_t + V_t, with V = A = 0 after
    the last model token. Whitening uses mean and population variance over all model tokens of the step (eps 1e-8);
    returns are those before whitening. Groups play no role: a group of one or equal rewards are nothing special.
    """
    if data.values is None:
        raise ValueError("gae needs values")
    advantages, returns = [], []
    for rewards, values in zip(data.rewards, data.values, strict=True):
        row = _gae_row(rewards, values, data.gamma, data.lam)
        advantages.append(row)
        returns.append(row + values)
    shown = tuple(_whiten(advantages)) if data.whiten else tuple(advantages)
    return AdvantageOutput(shown, tuple(returns))


def _gae_row(rewards: Row, values: Row, gamma: float, lam: float) -> Row:
    deltas = rewards - values
    deltas[:-1] += gamma * values[1:]
    decay = gamma * lam
    if decay == 1.0:
        return np.cumsum(deltas[::-1])[::-1].copy()
    result, running = np.empty_like(deltas), 0.0
    for index in range(len(deltas) - 1, -1, -1):
        running = deltas[index] + decay * running
        result[index] = running
    return result


def _whiten(rows: Sequence[Row]) -> list[Row]:
    everything = np.concatenate(rows)
    mean, deviation = everything.mean(), np.sqrt(everything.var() + WHITEN_EPS)
    return [(row - mean) / deviation for row in rows]


def grpo(data: AdvantageInput) -> AdvantageOutput:
    """Group-relative advantages (Shao et al. 2024): (score - mean) / (sample std + 1e-6) on every model token.

    Groups are keyed by id. Equal scores give exactly 0, and the group is counted as dead; so does a group of which only
    one trajectory is left, since nothing can be compared with it. Gamma, lambda and whitening play no role.
    """
    groups: dict[str, list[int]] = defaultdict(list)
    for index, group in enumerate(data.group_ids):
        groups[group].append(index)
    per_trajectory = [0.0] * len(data.scores)
    dead = single = 0
    for members in groups.values():
        scores = np.array([data.scores[index] for index in members])
        if len(members) == 1 or scores.min() == scores.max():
            dead += 1
            single += len(members) == 1
            continue
        centred = (scores - scores.mean()) / (scores.std(ddof=1) + GROUP_EPS)
        for index, value in zip(members, centred, strict=True):
            per_trajectory[index] = float(value)
    advantages = tuple(np.full(len(row), value) for row, value in zip(data.rewards, per_trajectory, strict=True))
    metrics = {"advantage/dead_groups": dead / len(groups), "advantage/single_groups": single / len(groups)}
    return AdvantageOutput(advantages, None, metrics)


ADVANTAGES: Registry[Callable[[AdvantageInput], AdvantageOutput]] = Registry(
    "advantage estimator", {"gae": gae, "grpo": grpo}
)


def estimate(samples: Sequence[Sample], config: Any, kl_coef: float) -> tuple[list[Sample], dict[str, float]]:
    """Fill in ``advantages`` (and ``returns``) of all samples of a step; return them with the step's figures.

    ``config`` is the section ``algorithm`` (adv_estimator, gamma, lam, whiten, kl_penalty). ``kl_coef`` above 0
    subtracts kl_coef * KL(old || reference) from the reward of every model token; the samples then need old and
    reference log-probs. Pass 0 when the divergence is a loss term instead.
    """
    rewards = [_model_tokens(sample, "rewards") for sample in samples]
    scores = [sample.score for sample in samples]
    metrics: dict[str, float] = {}
    if kl_coef > 0:
        estimator = ESTIMATORS[config.kl_penalty]
        penalties = [
            kl_coef * estimator(_model_tokens(sample, "old_logprobs"), _model_tokens(sample, "ref_logprobs"))
            for sample in samples
        ]
        rewards = [reward - penalty for reward, penalty in zip(rewards, penalties, strict=True)]
        scores = [score - float(penalty.sum()) for score, penalty in zip(scores, penalties, strict=True)]
        metrics["kl/penalty"] = float(sum(penalty.sum() for penalty in penalties)) / len(samples)
    has_values = all(sample.values is not None for sample in samples)
    output = ADVANTAGES[config.adv_estimator](
        AdvantageInput(
            rewards=tuple(rewards),
            scores=tuple(scores),
            group_ids=tuple(sample.prompt_id for sample in samples),
            values=tuple(_model_tokens(sample, "values") for sample in samples) if has_values else None,
            gamma=config.gamma,
            lam=config.lam,
            whiten=config.whiten,
        )
    )
    filled = []
    for index, sample in enumerate(samples):
        returns = None if output.returns is None else unpack(sample.loss_mask, output.returns[index])
        filled.append(replace(sample, advantages=unpack(sample.loss_mask, output.advantages[index]), returns=returns))
    return filled, metrics | output.metrics


def _model_tokens(sample: Sample, name: str) -> Row:
    """Return the column at the sample's model tokens."""
    column = getattr(sample, name)
    if column is None:
        raise ValueError(f"sample {sample.sample_id}: {name} is needed for advantages and not filled in")
    chosen: Row = np.asarray(column, dtype=np.float64)[np.asarray(sample.loss_mask, dtype=bool)]
    return chosen
