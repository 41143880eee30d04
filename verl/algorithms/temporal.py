"""Estimators that follow a trajectory through time: with a critic token by token or turn by turn, and without one.

Axes: m model tokens of one trajectory, K its turns.
"""

from __future__ import annotations

import numpy as np

from verl.algorithms.estimator import AdvantageInput, AdvantageOutput, Row, whiten


def gae(data: AdvantageInput) -> AdvantageOutput:
    """Generalised advantage estimation (Schulman et al. 2016), gamma and lambda per model token.

    delta_t = r_t + gamma V_{t+1} - V_t, A_t = delta_t + gamma lam A_{t+1}, return_t = A_t + V_t, with V = A = 0 after
    the last model token. Whitening uses mean and population variance over all model tokens of the step (eps 1e-8);
    returns are those before whitening. Groups play no role: a group of one or equal rewards are nothing special.
    """
    rows = [
        _discounted_deltas(rewards, values, data.gamma, data.lam)
        for rewards, values in zip(data.rewards, _values(data, "gae"), strict=True)
    ]
    return _with_returns(data, rows, _values(data, "gae"))


def turn_gae(data: AdvantageInput) -> AdvantageOutput:
    """GAE with a turn as the action (turn-level PPO, e.g. Li et al. 2025, "Turn-PPO"), gamma and lambda per turn.

    A turn's reward R_k is the sum over its tokens, its value V_k is read before its first token:
    delta_k = R_k + gamma V_{k+1} - V_k, A_k = delta_k + gamma lam A_{k+1}. Every token of turn k gets A_k and the value
    target A_k + V_k. Whitening and observations as in ``gae``; with one turn of one token it is ``gae``.
    """
    rows, returns = [], []
    for index, values in enumerate(_values(data, "turn_gae")):
        turns = data.turn_slices(index)
        rewards = np.array([data.rewards[index][turn].sum() for turn in turns])
        starts = np.array([values[turn.start] for turn in turns])
        per_turn = _discounted_deltas(rewards, starts, data.gamma, data.lam)
        lengths = [turn.stop - turn.start for turn in turns]
        rows.append(np.repeat(per_turn, lengths))
        returns.append(np.repeat(per_turn + starts, lengths))
    return AdvantageOutput(whiten(rows) if data.whiten else tuple(rows), tuple(returns))


def bi_level_gae(data: AdvantageInput) -> AdvantageOutput:
    """GAE on two levels (Wang et al. 2025, "VAGEN", bi-level GAE): first over turns, then inside each turn.

    Over turns, with turn_gamma and turn_lam, a turn stands for its last token e_k:
    delta_k = r_{e_k} + turn_gamma V_{e_{k+1}} - V_{e_k}, A_{e_k} = delta_k + turn_gamma turn_lam A_{e_{k+1}}. Inside a
    turn, with gamma and lam, backwards from A_{e_k}: A_t = r_t + gamma V_{t+1} - V_t + gamma lam A_{t+1}. So a reward
    reaches the tokens of earlier turns through the turn level alone. Returns are A + V before whitening.
    """
    rows = []
    for index, values in enumerate(_values(data, "bi_level_gae")):
        rewards = data.rewards[index]
        turns = data.turn_slices(index)
        ends = [turn.stop - 1 for turn in turns]
        row = np.empty_like(rewards)
        row[ends] = _discounted_deltas(rewards[ends], values[ends], data.turn_gamma, data.turn_lam)
        for turn in turns:
            for t in range(turn.stop - 2, turn.start - 1, -1):
                delta = rewards[t] + data.gamma * values[t + 1] - values[t]
                row[t] = delta + data.gamma * data.lam * row[t + 1]
        rows.append(row)
    return _with_returns(data, rows, _values(data, "bi_level_gae"))


def reinforce_plus_plus(data: AdvantageInput) -> AdvantageOutput:
    """REINFORCE++ (Hu 2025): the discounted sum of rewards from each token on, whitened over all tokens of the step.

    A_t = sum_{k >= t} gamma^(k - t) r_k over model tokens, observations skipped; ``whiten=false`` leaves it as it is.
    No critic and no groups: a group of one is nothing special, and when all rewards of a step are equal all are 0.
    """
    rows = [_discounted_deltas(rewards, np.zeros_like(rewards), data.gamma, 1.0) for rewards in data.rewards]
    return AdvantageOutput(whiten(rows) if data.whiten else tuple(rows))


def _values(data: AdvantageInput, name: str) -> tuple[Row, ...]:
    if data.values is None:
        raise ValueError(f"{name} needs values")
    return data.values


def _with_returns(data: AdvantageInput, rows: list[Row], values: tuple[Row, ...]) -> AdvantageOutput:
    returns = tuple(row + value for row, value in zip(rows, values, strict=True))
    return AdvantageOutput(whiten(rows) if data.whiten else tuple(rows), returns)


def _discounted_deltas(rewards: Row, values: Row, gamma: float, lam: float) -> Row:
    """Return A_t = r_t + gamma V_{t+1} - V_t + gamma lam A_{t+1}, with V = A = 0 after the end."""
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
