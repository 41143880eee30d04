"""Importance weights, length shaping and the entropy controller, by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from verl.algorithms.correction import LEVELS, MODES, correct, effective_share
from verl.algorithms.entropy import EntropyController
from verl.algorithms.shaping import overlong_penalty, shape_reward
from verl.types import Origin, Reward, Sample, Segment, StopReason, Trajectory

LOG_RATIO = np.log([2.0, 0.25])


def test_levels_by_hand() -> None:
    assert LEVELS["token"](LOG_RATIO) == pytest.approx([2.0, 0.25])
    assert LEVELS["sequence"](LOG_RATIO) == pytest.approx([0.5, 0.5])
    assert LEVELS["geometric"](LOG_RATIO) == pytest.approx([math.sqrt(0.5)] * 2)
    assert np.isfinite(LEVELS["sequence"](np.full(10_000, 3.0))).all()


def test_modes_by_hand() -> None:
    ratios = np.array([2.0, 0.25, 1.0])
    assert MODES["truncate"](ratios, None, 1.5).tolist() == [1.5, 0.25, 1.0]
    assert MODES["mask"](ratios, 0.5, 1.5).tolist() == [0.0, 0.0, 1.0]
    assert MODES["mask"](ratios, None, 2.0).tolist() == [2.0, 0.25, 1.0]


def test_unbounded_token_weights_turn_one_expectation_into_the_other() -> None:
    engine, trainer = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.3, 0.5])
    quantity = np.array([1.0, -2.0, 5.0])
    weights = MODES["truncate"](LEVELS["token"](np.log(trainer) - np.log(engine)), None, 100.0)
    assert (engine * weights * quantity).sum() == pytest.approx((trainer * quantity).sum())


def test_effective_share_by_hand() -> None:
    assert effective_share([1.0, 1.0, 1.0]) == 1.0
    assert effective_share([1.0, 1.0, 0.0, 0.0]) == 0.5
    assert effective_share([3.0, 1.0]) == pytest.approx(16 / 20)
    assert effective_share([0.0, 0.0]) == 0.0


def sample(old: tuple[float, ...] | None) -> Sample:
    mask = (False, True, False, True)
    return Sample("s", "p", (1, 2, 3, 4), mask, (0.0,) * 4, 0.0, (0.0, -1.0, 0.0, -1.0), 0, old_logprobs=old)


def settings(**changes: Any) -> SimpleNamespace:
    return SimpleNamespace(**({"mode": "truncate", "level": "token", "high": 1.5, "low": None} | changes))


def test_samples_get_their_weights_and_the_step_its_figures() -> None:
    old = (0.0, -1.0 + math.log(2.0), 0.0, -1.0 + math.log(0.25))
    (filled,), figures = correct([sample(old)], settings())
    assert filled.correction == pytest.approx((0.0, 1.5, 0.0, 0.25))
    assert figures == pytest.approx(
        {
            "correction/weight": 0.875,
            "correction/effective_share": 1.75**2 / (2 * (1.5**2 + 0.25**2)),
            "correction/bounded": 0.5,
            "correction/largest_ratio": 2.0,
        }
    )
    assert correct([sample(None)], settings(mode="none")) == ([sample(None)], {})
    with pytest.raises(ValueError, match="needs old_logprobs"):
        correct([sample(None)], settings())


def test_overlong_penalty_by_hand() -> None:
    assert [overlong_penalty(n, 100, 20) for n in (0, 80, 90, 100, 150)] == [0.0, 0.0, -0.5, -1.0, -1.0]
    assert [overlong_penalty(n, 100, 0) for n in (100, 101)] == [0.0, -1.0]


def trajectory(stop: StopReason = StopReason.ANSWERED) -> Trajectory:
    segments = (Segment(Origin.PROMPT, (1,) * 50), Segment(Origin.MODEL, (2,) * 90, (-1.0,) * 90, 0))
    return Trajectory("p#0", "p", segments, stop, reward=Reward(1.0, {"f1": 1.0}, {0: 0.25}))


def shaping(**changes: Any) -> SimpleNamespace:
    values = {"overlong_coef": 0.0, "max_tokens": None, "overlong_buffer": 0, "length_coef": 0.0}
    return SimpleNamespace(**(values | changes))


def test_length_terms_are_added_to_the_reward_and_named() -> None:
    shaped = shape_reward(trajectory(), shaping(overlong_coef=0.4, max_tokens=100, overlong_buffer=20, length_coef=2.0))
    assert shaped.reward == Reward(
        1.0 - 0.4 * 0.5 - 2.0 * 0.09, {"f1": 1.0, "overlong": -0.5, "length": 90.0}, {0: 0.25}
    )
    assert shape_reward(trajectory(), shaping()) == trajectory()
    failed = trajectory(StopReason.SEARCH_FAILED)
    assert shape_reward(failed, shaping(length_coef=2.0)) == failed
    unscored = replace(trajectory(), reward=None)
    assert shape_reward(unscored, shaping(length_coef=2.0)) == unscored


def test_entropy_control_moves_towards_its_target() -> None:
    control = EntropyController(0.0, target=1.0, delta=0.01, limit=0.02)
    seen = []
    for entropy in (0.8, 0.7, 0.6, 0.5, 1.2, 1.2, 0.9):
        seen.append(control.value(entropy))
        control.update(entropy)
    # Up to its limit; off while above the target, and lower when it is back.
    assert seen == pytest.approx([0.0, 0.01, 0.02, 0.02, 0.0, 0.0, 0.0])
    assert control.coefficient == pytest.approx(0.01)
    other = EntropyController(0.0, 1.0, 0.01, 0.02)
    other.restore(control.state())
    assert other == control


def test_a_fixed_bonus_stays_as_configured() -> None:
    control = EntropyController(0.003, None, 0.01, 0.02)
    control.update(0.1)
    control.restore({"coefficient": 0.5})
    assert control.value(0.0) == control.value(9.0) == 0.003
