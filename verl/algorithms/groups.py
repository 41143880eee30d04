"""Estimators that compare the trajectories of one prompt: no critic, gamma, lambda and (but for one) no whitening.

Groups are keyed by id. Where nothing can be compared (equal scores, or a group of which one trajectory is left) the
advantage is exactly 0 and the group is counted as dead.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

import numpy as np

from verl.algorithms.estimator import AdvantageInput, AdvantageOutput, Row, whiten

GROUP_EPS = 1e-6


def grpo(data: AdvantageInput) -> AdvantageOutput:
    """Group-relative advantages (Shao et al. 2024): (score - mean) / (sample std + 1e-6) on every model token."""
    return _on_every_token(data, *_compare(data, data.scores, _standardised))


def dr_grpo(data: AdvantageInput) -> AdvantageOutput:
    """Dr. GRPO (Liu et al. 2025, "Understanding R1-Zero-like training"): score - mean, not divided by the deviation.

    The paper also divides the loss by a constant instead of by lengths: ``loss_agg=constant``.
    """
    return _on_every_token(data, *_compare(data, data.scores, lambda scores: scores - scores.mean()))


def rloo(data: AdvantageInput) -> AdvantageOutput:
    """REINFORCE leave-one-out (Kool et al. 2019; Ahmadian et al. 2024): score - mean of the others of the group."""

    def leave_one_out(scores: Row) -> Row:
        apart: Row = (scores - scores.mean()) * (len(scores) / (len(scores) - 1))
        return apart

    return _on_every_token(data, *_compare(data, data.scores, leave_one_out))


def reinforce_plus_plus_baseline(data: AdvantageInput) -> AdvantageOutput:
    """REINFORCE++-baseline (Hu et al. 2025): score - group mean, then whitened over all model tokens of the step.

    ``whiten=false`` leaves out the second step, which is ``dr_grpo``'s estimate.
    """
    values, metrics = _compare(data, data.scores, lambda scores: scores - scores.mean())
    output = _on_every_token(data, values, metrics)
    return AdvantageOutput(whiten(output.advantages), None, metrics) if data.whiten else output


def turn_grpo(data: AdvantageInput) -> AdvantageOutput:
    """GRPO with credit for single turns (Zeng et al. 2025, "Turn-level credit assignment", MT-GRPO).

    Rewards placed on turns before a trajectory's last one (``intent_placement=turn``) are compared among the group's
    trajectories at that turn; what remains of the score is the outcome, compared as in ``grpo``. A token of turn k gets
    A_outcome + turn_coef * A_turn_k, the last turn A_outcome alone. Without such rewards it is ``grpo``.
    """
    own = [_turn_rewards(data, index) for index in range(len(data.scores))]
    outcomes = [score - float(sum(rewards)) for score, rewards in zip(data.scores, own, strict=True)]
    outcome, metrics = _compare(data, outcomes, _standardised)
    rows = [np.full(len(row), value) for row, value in zip(data.rewards, outcome, strict=True)]
    for turn in range(max(map(len, own), default=0)):
        present = [index for index in range(len(own)) if turn < len(own[index])]
        compared = _by_group(data, present, [own[index][turn] for index in present])
        for index, value in zip(present, compared, strict=True):
            rows[index][data.turn_slices(index)[turn]] += data.turn_coef * value
    return AdvantageOutput(tuple(rows), None, metrics)


def _turn_rewards(data: AdvantageInput, index: int) -> list[float]:
    """Return the reward of every turn but the last."""
    return [float(data.rewards[index][turn].sum()) for turn in data.turn_slices(index)[:-1]]


def _standardised(scores: Row) -> Row:
    centred: Row = (scores - scores.mean()) / (scores.std(ddof=1) + GROUP_EPS)
    return centred


def _by_group(data: AdvantageInput, indices: Sequence[int], values: Sequence[float]) -> list[float]:
    """Standardise values of some trajectories within their groups; 0 where nothing can be compared."""
    part = AdvantageInput((), tuple(values), tuple(data.group_ids[i] for i in indices), None, 1.0, 1.0, False)
    return _compare(part, values, _standardised)[0]


def _compare(
    data: AdvantageInput, scores: Sequence[float], rule: Callable[[Row], Row]
) -> tuple[list[float], dict[str, float]]:
    """Apply ``rule`` to the scores of every group that has something to compare; return values [N] and figures."""
    groups: dict[str, list[int]] = defaultdict(list)
    for index, group in enumerate(data.group_ids):
        groups[group].append(index)
    values = [0.0] * len(scores)
    dead = single = 0
    for members in groups.values():
        own = np.array([scores[index] for index in members])
        if len(members) == 1 or own.min() == own.max():
            dead += 1
            single += len(members) == 1
            continue
        for index, value in zip(members, rule(own), strict=True):
            values[index] = float(value)
    n = max(1, len(groups))
    return values, {"advantage/dead_groups": dead / n, "advantage/single_groups": single / n}


def _on_every_token(data: AdvantageInput, values: Sequence[float], metrics: dict[str, float]) -> AdvantageOutput:
    rows = tuple(np.full(len(row), value) for row, value in zip(data.rewards, values, strict=True))
    return AdvantageOutput(rows, None, metrics)
