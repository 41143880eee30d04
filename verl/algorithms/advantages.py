"""The table of advantage estimators, and its use on the samples of one step.

Estimators see model tokens only: observations, hints and prompts are taken out before, so no estimator can pass credit
through them or whiten over them, and inserting masked tokens changes nothing.

Axes: N trajectories, m model tokens of one trajectory, L all its tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from verl.algorithms.estimator import AdvantageInput, Estimator, Row, Turns
from verl.algorithms.groups import dr_grpo, grpo, reinforce_plus_plus_baseline, rloo, turn_grpo
from verl.algorithms.kl import ESTIMATORS
from verl.algorithms.temporal import bi_level_gae, gae, reinforce_plus_plus, turn_gae
from verl.data.batch import unpack
from verl.registry import Registry
from verl.types import Sample

ADVANTAGES: Registry[Estimator] = Registry(
    "advantage estimator",
    {
        "gae": gae,
        "turn_gae": turn_gae,
        "bi_level_gae": bi_level_gae,
        "grpo": grpo,
        "dr_grpo": dr_grpo,
        "turn_grpo": turn_grpo,
        "rloo": rloo,
        "reinforce_plus_plus": reinforce_plus_plus,
        "reinforce_plus_plus_baseline": reinforce_plus_plus_baseline,
    },
)
"""``algorithm.adv_estimator`` -> function; ``verl.config.algorithm_schema`` says which need a critic or groups."""


def estimate(samples: Sequence[Sample], config: Any, kl_coef: float) -> tuple[list[Sample], dict[str, float]]:
    """Fill in ``advantages`` (and ``returns``) of all samples of a step; return them with the step's figures.

    ``config`` is the section ``algorithm`` (adv_estimator, gamma, lam, whiten, turn_*, kl_penalty). ``kl_coef`` above 0
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
            turns=tuple(turns_of(sample) for sample in samples),
            turn_gamma=config.turn_gamma,
            turn_lam=config.turn_lam,
            turn_coef=config.turn_coef,
        )
    )
    filled = []
    for index, sample in enumerate(samples):
        returns = None if output.returns is None else unpack(sample.loss_mask, output.returns[index])
        filled.append(replace(sample, advantages=unpack(sample.loss_mask, output.advantages[index]), returns=returns))
    return filled, metrics | output.metrics


def turns_of(sample: Sample) -> Turns:
    """Return [m] the turn of every model token: stretches of the loss mask, since the environment speaks between turns.

    Mask (0, 1, 1, 0, 1) gives (0, 0, 1).
    """
    mask = np.asarray(sample.loss_mask, dtype=bool)
    begins = mask & ~np.concatenate([[False], mask[:-1]])
    turns: Turns = (np.cumsum(begins) - 1)[mask]
    return turns


def _model_tokens(sample: Sample, name: str) -> Row:
    """Return the column at the sample's model tokens."""
    column = getattr(sample, name)
    if column is None:
        raise ValueError(f"sample {sample.sample_id}: {name} is needed for advantages and not filled in")
    chosen: Row = np.asarray(column, dtype=np.float64)[np.asarray(sample.loss_mask, dtype=bool)]
    return chosen
