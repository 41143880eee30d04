"""Estimators by hand: those that compare a group's trajectories, and those that step from turn to turn."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from verl.algorithms.advantages import ADVANTAGES, turns_of
from verl.algorithms.estimator import AdvantageInput
from verl.algorithms.groups import dr_grpo, grpo, reinforce_plus_plus_baseline, rloo, turn_grpo
from verl.algorithms.temporal import bi_level_gae, gae, reinforce_plus_plus, turn_gae
from verl.config import algorithm_schema as schema
from verl.types import Sample


def given(
    rewards: list[list[float]],
    groups: str = "",
    values: list[list[float]] | None = None,
    turns: list[list[int]] | None = None,
    **settings: Any,
) -> AdvantageInput:
    """Rows of rewards per model token; ``groups`` has one letter per trajectory."""
    options: dict[str, Any] = {"gamma": 1.0, "lam": 1.0, "whiten": False} | settings
    return AdvantageInput(
        rewards=tuple(np.array(row, dtype=float) for row in rewards),
        scores=tuple(float(sum(row)) for row in rewards),
        group_ids=tuple(groups or "p" * len(rewards)),
        values=None if values is None else tuple(np.array(row, dtype=float) for row in values),
        turns=None if turns is None else tuple(np.array(row) for row in turns),
        **options,
    )


def firsts(rows: Any) -> list[float]:
    return [float(row[0]) for row in rows]


def test_dr_grpo_and_rloo_by_hand() -> None:
    data = given([[0, 1], [0], [0, 0, 0]])
    assert firsts(dr_grpo(data).advantages) == pytest.approx([2 / 3, -1 / 3, -1 / 3])
    assert firsts(rloo(data).advantages) == pytest.approx([1.0, -0.5, -0.5])
    assert [len(row) for row in rloo(data).advantages] == [2, 1, 3]


@pytest.mark.parametrize("estimator", [grpo, dr_grpo, rloo, turn_grpo])
def test_what_cannot_be_compared_is_exactly_zero_and_counted(estimator: Any) -> None:
    data = given([[0.1], [0.1], [0.7], [1.0], [0.0]], "aabcc")
    output = estimator(data)
    assert firsts(output.advantages)[:3] == [0.0, 0.0, 0.0]
    assert firsts(output.advantages)[3] > 0
    assert output.metrics == pytest.approx({"advantage/dead_groups": 2 / 3, "advantage/single_groups": 1 / 3})


def test_reinforce_plus_plus_baseline_by_hand() -> None:
    # Centred 0.5 (two tokens), -0.5, and a dead group of three tokens: mean 1/12, variance 0.125 - 1/144.
    data = given([[0, 1], [0], [1], [0, 1]], "ppqq", whiten=True)
    deviation = math.sqrt(0.125 - 1 / 144 + 1e-8)
    wanted = [(value - 1 / 12) / deviation for value in (0.5, -0.5, 0.0, 0.0)]
    assert firsts(reinforce_plus_plus_baseline(data).advantages) == pytest.approx(wanted)
    plain = given([[0, 1], [0], [1], [0, 1]], "ppqq")
    assert firsts(reinforce_plus_plus_baseline(plain).advantages) == [0.5, -0.5, 0.0, 0.0]


def test_reinforce_plus_plus_discounts_what_is_still_to_come() -> None:
    output = reinforce_plus_plus(given([[0, 1], [0.5, 0, 2]], gamma=0.5))
    assert [row.tolist() for row in output.advantages] == [[0.5, 1.0], [1.0, 1.0, 2.0]]
    assert output.returns is None
    whitened = np.concatenate(reinforce_plus_plus(given([[0, 1], [0.5, 0, 2]], gamma=0.5, whiten=True)).advantages)
    assert whitened.mean() == pytest.approx(0.0, abs=1e-12) and whitened.std() == pytest.approx(1.0, abs=1e-6)


TWO_TURNS: dict[str, Any] = {"values": [[0.1, 0.3, 0.6]], "turns": [[0, 0, 1]]}


def test_turn_gae_by_hand() -> None:
    # R = (0.2, 1), V before the turns (0.1, 0.6): delta_1 = 0.4, delta_0 = 0.2 + 0.9 * 0.6 - 0.1 = 0.64.
    output = turn_gae(given([[0, 0.2, 1]], gamma=0.9, lam=0.5, **TWO_TURNS))
    assert output.returns is not None
    assert output.advantages[0].tolist() == pytest.approx([0.82, 0.82, 0.4])
    assert output.returns[0].tolist() == pytest.approx([0.92, 0.92, 1.0])


def test_bi_level_gae_by_hand() -> None:
    # Turns: delta_1 = 1 - 0.6 = 0.4, delta_0 = 0.2 + 0.9 * 0.6 - 0.3 = 0.44, A = 0.44 + 0.45 * 0.4 = 0.62 and 0.4.
    # First token: 0 + 0.8 * 0.3 - 0.1 + 0.8 * 0.5 * 0.62 = 0.388.
    output = bi_level_gae(given([[0, 0.2, 1]], gamma=0.8, lam=0.5, turn_gamma=0.9, turn_lam=0.5, **TWO_TURNS))
    assert output.returns is not None
    assert output.advantages[0].tolist() == pytest.approx([0.388, 0.62, 0.4])
    assert output.returns[0].tolist() == pytest.approx([0.488, 0.92, 1.0])


def test_turns_of_one_token_make_all_levels_the_same() -> None:
    settings: dict[str, Any] = {"values": [[0.1, 0.3, 0.6]], "turns": [[0, 1, 2]], "gamma": 0.9, "lam": 0.7}
    token = gae(given([[0, 0.2, 1]], **settings)).advantages[0]
    assert turn_gae(given([[0, 0.2, 1]], **settings)).advantages[0] == pytest.approx(token)
    both = bi_level_gae(given([[0, 0.2, 1]], turn_gamma=0.9, turn_lam=0.7, **settings)).advantages[0]
    assert both == pytest.approx(token)


def test_one_turn_makes_the_inner_level_gae() -> None:
    settings: dict[str, Any] = {"values": [[0.1, 0.3, 0.6]], "turns": [[0, 0, 0]], "gamma": 0.9, "lam": 0.7}
    data = given([[0, 0.2, 1]], turn_gamma=0.1, **settings)
    assert bi_level_gae(data).advantages[0] == pytest.approx(gae(data).advantages[0])


def test_turn_grpo_by_hand() -> None:
    # Turn rewards 0.2 and 0, outcomes 1 and 0; a third trajectory has one turn and joins the outcome alone.
    data = given([[0, 0.2, 1], [0, 0], [0]], turns=[[0, 0, 1], [0, 1], [0]], turn_coef=0.5)
    outcome = [2 / 3 / (math.sqrt(1 / 3) + 1e-6), -1 / 3 / (math.sqrt(1 / 3) + 1e-6)]
    turn = 0.5 * 0.1 / (math.sqrt(0.02) + 1e-6)
    rows = [row.tolist() for row in turn_grpo(data).advantages]
    assert rows[0] == pytest.approx([outcome[0] + turn, outcome[0] + turn, outcome[0]])
    assert rows[1] == pytest.approx([outcome[1] - turn, outcome[1]])
    assert rows[2] == pytest.approx([outcome[1]])


def test_turn_grpo_without_turn_rewards_is_grpo() -> None:
    data = given([[0, 0, 1], [0, 0.4], [0]], turns=[[0, 0, 1], [0, 1], [0]])
    for own, other in zip(turn_grpo(data).advantages, grpo(data).advantages, strict=True):
        assert own.tolist() == pytest.approx(other.tolist())


def test_turns_are_the_stretches_of_the_mask() -> None:
    mask = (False, True, True, False, False, True, True, False)
    zeros = (0.0,) * 8
    assert turns_of(Sample("s", "p", tuple(range(8)), mask, zeros, 0.0, zeros, 0)).tolist() == [0, 0, 1, 1]


@pytest.mark.parametrize("name", schema.CRITIC_ESTIMATORS)
def test_an_estimator_with_a_critic_says_so(name: str) -> None:
    with pytest.raises(ValueError, match=f"^{name} needs values"):
        ADVANTAGES[name](given([[1.0]]))


def test_the_schema_names_the_table() -> None:
    assert sorted(schema.ESTIMATORS) == ADVANTAGES.names()
    flat = given([[0.0], [1.0]])
    for name in set(schema.ESTIMATORS) - set(schema.CRITIC_ESTIMATORS):
        assert ADVANTAGES[name](flat).returns is None
