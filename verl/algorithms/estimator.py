"""What an advantage estimator takes and returns. Estimators see model tokens only.

Axes: N trajectories, m model tokens of one trajectory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

Row = NDArray[np.float64]
"""[m]"""
Turns = NDArray[np.int64]
"""[m] index of the model turn that wrote each token, from 0, never falling."""
WHITEN_EPS = 1e-8


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
    turns: tuple[Turns, ...] | None = None
    """[N][m] which turn wrote the token; None: one turn."""
    turn_gamma: float = 1.0
    turn_lam: float = 1.0
    turn_coef: float = 1.0
    """Weight of a turn's own reward beside the outcome's (``turn_grpo``)."""

    def turn_slices(self, index: int) -> list[slice]:
        """Return the stretch of model tokens of each turn of one trajectory, in order."""
        if self.turns is None:
            return [slice(0, len(self.rewards[index]))]
        turns = self.turns[index]
        starts = [0, *(np.flatnonzero(np.diff(turns)) + 1).tolist(), len(turns)]
        return [slice(start, end) for start, end in pairwise(starts)]


@dataclass(frozen=True)
class AdvantageOutput:
    """What an estimator returns."""

    advantages: tuple[Row, ...]
    """[N][m]"""
    returns: tuple[Row, ...] | None = None
    """[N][m] value targets; None without a critic."""
    metrics: dict[str, float] = field(default_factory=dict)


Estimator = Callable[[AdvantageInput], AdvantageOutput]


def whiten(rows: Sequence[Row]) -> tuple[Row, ...]:
    """Return the rows less the mean of all their tokens, over sqrt(population variance + 1e-8)."""
    everything = np.concatenate(rows)
    mean, deviation = everything.mean(), np.sqrt(everything.var() + WHITEN_EPS)
    return tuple((row - mean) / deviation for row in rows)
