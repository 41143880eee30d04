"""Advantage estimators against hand-computed values and independent recomputation."""

from __future__ import annotations

import statistics
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.algorithms.advantages import ADVANTAGES, estimate
from verl.algorithms.estimator import AdvantageInput
from verl.algorithms.groups import grpo
from verl.algorithms.temporal import gae
from verl.errors import ConfigError
from verl.types import Sample


def config(**overrides: object) -> SimpleNamespace:
    values: dict[str, object] = {"adv_estimator": "gae", "gamma": 1.0, "lam": 1.0, "whiten": False, "kl_penalty": "kl"}
    values |= {"turn_gamma": 0.8, "turn_lam": 0.6, "turn_coef": 0.5}
    return SimpleNamespace(**(values | overrides))


def sample(
    mask: list[int], rewards: list[float], values: list[float] | None = None, prompt: str = "p", index: int = 0
) -> Sample:
    return Sample(
        sample_id=f"{prompt}#{index}",
        prompt_id=prompt,
        token_ids=tuple(range(len(mask))),
        loss_mask=tuple(map(bool, mask)),
        rewards=tuple(rewards),
        score=sum(rewards),
        rollout_logprobs=(0.0,) * len(mask),
        policy_version=0,
        values=None if values is None else tuple(values),
    )


def group(scores: list[float], prompt: str = "p") -> list[Sample]:
    return [sample([0, 1, 1], [0, 0, score], prompt=prompt, index=i) for i, score in enumerate(scores)]


def test_gae_by_hand() -> None:
    # deltas: t0 = 0 + 0.9*0.5 - 0.2 = 0.25, t1 = 1 - 0.5 = 0.5; A1 = 0.5, A0 = 0.25 + 0.9*0.8*0.5 = 0.61
    data = AdvantageInput(
        (np.array([0.0, 1.0]),), (1.0,), ("p",), (np.array([0.2, 0.5]),), gamma=0.9, lam=0.8, whiten=False
    )
    output = gae(data)
    assert output.advantages[0] == pytest.approx([0.61, 0.5])
    assert output.returns is not None
    assert output.returns[0] == pytest.approx([0.81, 1.0])


def test_gae_steps_over_observations() -> None:
    # The published loop would discount twice between the two model tokens; here they are neighbours.
    (filled,), _ = estimate([sample([0, 1, 0, 1], [0, 0, 0, 1], [0, 0.2, 9.0, 0.5])], config(gamma=0.5), 0.0)
    assert filled.advantages == pytest.approx((0.0, 0.5 * 1.0 - 0.2, 0.0, 1.0 - 0.5))
    assert filled.returns == pytest.approx((0.0, 0.5, 0.0, 1.0))


def test_undiscounted_gae_is_return_minus_value() -> None:
    (filled,), _ = estimate([sample([0, 1, 1, 1], [0, 0.5, 0, 1], [0, 0.1, 0.2, 0.3])], config(), 0.0)
    assert filled.returns == pytest.approx((0, 1.5, 1.0, 1.0))
    assert filled.advantages == pytest.approx((0, 1.4, 0.8, 0.7))


def test_whitening_is_over_all_model_tokens_of_the_step() -> None:
    rows = [sample([0, 1, 1], [0, 0, 1], [0, 0.5, 0.1]), sample([0, 0, 1], [0, 0, 0], [0, 0, 0.4], "q")]
    raw, _ = estimate(rows, config(), 0.0)
    white, _ = estimate(rows, config(whiten=True), 0.0)
    tokens = [a for s in raw for a, m in zip(s.advantages or (), s.loss_mask, strict=True) if m]
    mean, deviation = statistics.fmean(tokens), statistics.pstdev(tokens)
    for before, after in zip(raw, white, strict=True):
        for b, a, trained in zip(before.advantages or (), after.advantages or (), before.loss_mask, strict=True):
            assert a == (pytest.approx((b - mean) / deviation, rel=1e-6) if trained else 0.0)
        assert before.returns == after.returns


def test_whitening_equal_advantages_gives_zero() -> None:
    rows = [sample([0, 1], [0, 1.0], [0, 0.0], str(i)) for i in range(3)]
    white, _ = estimate(rows, config(whiten=True), 0.0)
    assert [s.advantages for s in white] == [(0.0, 0.0)] * 3


def test_grpo_by_hand() -> None:
    # scores 0, 0, 1, 1: mean 0.5, sample std sqrt(1/3)
    filled, metrics = estimate(group([0, 0, 1, 1]), config(adv_estimator="grpo"), 0.0)
    expected = 0.5 / ((1 / 3) ** 0.5 + 1e-6)
    assert [s.advantages for s in filled] == [
        pytest.approx((0.0, sign * expected, sign * expected)) for sign in (-1, -1, 1, 1)
    ]
    assert metrics == {"advantage/dead_groups": 0.0, "advantage/single_groups": 0.0}
    assert all(s.returns is None for s in filled)


@pytest.mark.parametrize("score", [0.0, 1.0, 0.1 + 0.2])
def test_grpo_equal_scores_give_exactly_zero_and_a_dead_group(score: float) -> None:
    filled, metrics = estimate(group([score] * 3) + group([0, 1], "q"), config(adv_estimator="grpo"), 0.0)
    assert [s.advantages for s in filled[:3]] == [(0.0, 0.0, 0.0)] * 3
    assert metrics["advantage/dead_groups"] == 0.5


def test_grpo_group_of_one_left_over_teaches_nothing() -> None:
    filled, metrics = estimate(group([0.7]), config(adv_estimator="grpo"), 0.0)
    assert filled[0].advantages == (0.0, 0.0, 0.0)
    assert metrics == {"advantage/dead_groups": 1.0, "advantage/single_groups": 1.0}


def test_groups_follow_prompt_ids_not_position_or_text() -> None:
    """Two prompts with the same tokens, their trajectories interleaved."""
    first, second = group([0, 1], "a"), group([5, 9], "b")
    mixed, _ = estimate([first[0], second[0], first[1], second[1]], config(adv_estimator="grpo"), 0.0)
    apart, _ = estimate(first + second, config(adv_estimator="grpo"), 0.0)
    assert [mixed[i].advantages for i in (0, 2, 1, 3)] == [s.advantages for s in apart]
    # Each pair is centred on its own mean; one group of four would give -0.91, 0.30, -0.67, 1.28.
    half = 0.5**0.5
    assert [(s.advantages or ())[1] for s in mixed] == pytest.approx([-half, -half, half, half], rel=1e-5)


def test_kl_in_the_reward_is_charged_per_model_token() -> None:
    row = replace(
        sample([0, 1, 0, 1], [0, 0, 0, 1], [0, 0, 0, 0]),
        old_logprobs=(0.0, -1.0, 0.0, -2.0),
        ref_logprobs=(0.0, -1.5, 7.0, -1.0),
    )
    (filled,), metrics = estimate([row], config(), 0.1)
    # k1: 0.5 and -1.0, so rewards -0.05 and 1.1
    assert filled.returns == pytest.approx((0, 1.05, 0, 1.1))
    assert metrics["kl/penalty"] == pytest.approx(-0.05)


def test_kl_penalty_enters_the_score_that_groups_compare() -> None:
    rows = [
        replace(row, old_logprobs=(0.0, -1.0, -1.0), ref_logprobs=(0.0, -1.0 - shift, -1.0))
        for row, shift in zip(group([1.0, 1.0]), (0.0, 1.0), strict=True)
    ]
    filled, metrics = estimate(rows, config(adv_estimator="grpo"), 0.1)
    assert metrics["advantage/dead_groups"] == 0.0
    assert filled[0].advantages is not None and filled[0].advantages[1] > 0


def test_missing_columns_are_named() -> None:
    with pytest.raises(ValueError, match="ref_logprobs is needed"):
        estimate([replace(sample([0, 1], [0, 1], [0, 0]), old_logprobs=(0.0, 0.0))], config(), 0.1)
    with pytest.raises(ValueError, match="gae needs values"):
        estimate([sample([0, 1], [0, 1])], config(), 0.0)


def test_unknown_estimator_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"did you mean 'grpo'.*known: bi_level_gae, dr_grpo, gae, grpo"):
        estimate([sample([0, 1], [0, 1], [0, 0])], config(adv_estimator="grp"), 0.0)


def spread(rewards: list[float], values: list[float], gaps: list[int], index: int) -> Sample:
    """A sample with that many masked tokens before each model token."""
    mask, all_rewards, all_values = [0], [0.0], [0.0]
    for reward, value, gap in zip(rewards, values, gaps, strict=True):
        mask += [0] * gap + [1]
        all_rewards += [0.0] * gap + [reward]
        all_values += [5.0] * gap + [value]
    return sample(mask, all_rewards, all_values, "g", index)


@pytest.mark.parametrize("name", ADVANTAGES.names())
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_inserting_masked_tokens_changes_no_other_advantage(name: str, data: st.DataObject) -> None:
    """Between turns; where there is one turn, also inside it, but for the estimators that look at turns."""
    by_turn = name in ("turn_gae", "bi_level_gae", "turn_grpo")
    number = st.floats(-3, 3, allow_nan=False, width=32)
    rows, padded = [], []
    for index in range(data.draw(st.integers(2, 4))):
        length = data.draw(st.integers(1, 5))
        rewards, values = ([data.draw(number) for _ in range(length)] for _ in range(2))
        breaks = [data.draw(st.integers(0, 1)) for _ in range(length)]
        gaps = [data.draw(st.integers(0, 3)) if at or not by_turn else 0 for at in breaks]
        rows.append(spread(rewards, values, breaks, index))
        padded.append(spread(rewards, values, [at + gap for at, gap in zip(breaks, gaps, strict=True)], index))
    settings_ = config(adv_estimator=name, gamma=0.9, lam=0.7, whiten=True)
    plain, _ = estimate(rows, settings_, 0.0)
    wide, _ = estimate(padded, settings_, 0.0)
    for a, b in zip(plain, wide, strict=True):
        assert [x for x, m in zip(a.advantages or (), a.loss_mask, strict=True) if m] == [
            x for x, m in zip(b.advantages or (), b.loss_mask, strict=True) if m
        ]


@settings(max_examples=30, deadline=None)
@given(
    rewards=st.lists(st.floats(-2, 2, width=32), min_size=1, max_size=8),
    gamma=st.floats(0.5, 1.0),
    lam=st.floats(0.0, 1.0),
)
def test_gae_equals_its_definition_as_a_double_sum(rewards: list[float], gamma: float, lam: float) -> None:
    values = [0.3 * i - 0.5 for i in range(len(rewards))]
    data = AdvantageInput(
        (np.array(rewards, dtype=float),), (0.0,), ("p",), (np.array(values),), gamma=gamma, lam=lam, whiten=False
    )
    following = [*values[1:], 0.0]
    deltas = [r + gamma * n - v for r, n, v in zip(rewards, following, values, strict=True)]
    wanted = [sum((gamma * lam) ** (k - t) * deltas[k] for k in range(t, len(deltas))) for t in range(len(deltas))]
    assert gae(data).advantages[0] == pytest.approx(wanted, abs=1e-9)


def test_estimators_do_not_change_their_input() -> None:
    rewards, values = np.array([0.0, 1.0]), np.array([0.1, 0.2])
    data = AdvantageInput((rewards, rewards), (1.0, 0.0), ("p", "p"), (values, values), 1.0, 0.5, True)
    gae(data)
    grpo(data)
    assert rewards.tolist() == [0.0, 1.0]
    assert values.tolist() == [0.1, 0.2]
