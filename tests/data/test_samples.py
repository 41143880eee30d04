"""Trajectories become samples, and samples become packed tensors, without losing or moving a token."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from training_cases import make_samples, make_trajectory

from verl.data.batch import Scored, pack_batch, scored, unpack
from verl.data.samples import ScoredRows, assemble, fill, permute_rewards
from verl.errors import HealthError
from verl.types import Origin, Reward, Segment, StopReason, Trajectory


def model(*tokens: int, version: int = 0) -> Segment:
    return Segment(Origin.MODEL, tokens, tuple(-0.1 * token for token in tokens), version)


def episode(*segments: Segment, reward: Reward | None = None, stop: StopReason = StopReason.ANSWERED) -> Trajectory:
    return Trajectory("p#0", "p", segments, stop, reward=reward or Reward(1.0))


PROMPT, ENV = Segment(Origin.PROMPT, (7, 8)), Segment(Origin.ENV, (9, 9))


def test_terminal_reward_is_on_the_last_model_token() -> None:
    """An observation after the last model token does not move it."""
    (sample,) = assemble([episode(PROMPT, model(1, 2), ENV, model(3), ENV, reward=Reward(0.75))]).samples
    assert sample.token_ids == (7, 8, 1, 2, 9, 9, 3, 9, 9)
    assert sample.loss_mask == (False, False, True, True, False, False, True, False, False)
    assert sample.rewards == (0, 0, 0, 0, 0, 0, 0.75, 0, 0)
    assert sample.rollout_logprobs == pytest.approx((0, 0, -0.1, -0.2, 0, 0, -0.3, 0, 0))
    assert sample.score == 0.75


def test_turn_rewards_are_on_the_last_token_of_their_turn() -> None:
    reward = Reward(1.0, turn_rewards={0: 0.2, 2: 0.1})
    (sample,) = assemble([episode(PROMPT, model(1, 2), ENV, model(3), ENV, model(4, 5), reward=reward)]).samples
    assert sample.rewards == pytest.approx((0, 0, 0, 0.2, 0, 0, 0, 0, 0, 0, 0.8))
    assert sum(sample.rewards) == pytest.approx(1.0)


def test_the_share_of_a_turn_without_tokens_goes_to_the_last_token() -> None:
    reward = Reward(1.0, turn_rewards={0: 0.2, 1: 0.3})
    (sample,) = assemble([episode(PROMPT, model(), ENV, model(3), ENV, model(4), reward=reward)]).samples
    assert sample.rewards == pytest.approx((0, 0, 0, 0, 0.3, 0, 0, 0.7))


def test_policy_version_is_the_oldest_that_sampled_a_token() -> None:
    (sample,) = assemble([episode(PROMPT, model(1, version=5), model(version=1), model(2, version=4))]).samples
    assert sample.policy_version == 4


def test_what_does_not_reach_the_loss_is_counted_by_reason() -> None:
    broken = Segment(Origin.MODEL, (1,), (-math.inf,), 0)
    result = assemble(
        [
            episode(PROMPT, model(1), stop=StopReason.SEARCH_FAILED),
            episode(PROMPT, model(1), stop=StopReason.ABORTED),
            episode(PROMPT, model()),
            episode(PROMPT, broken),
            episode(PROMPT, model(1), reward=Reward(0.3, failure="the judge is silent")),
            episode(PROMPT, model(1)),
        ]
    )
    assert len(result.samples) == 1
    assert result.drops == {"failed": 2, "reward_failed": 1, "no_model_tokens": 1, "non_finite": 1}


def test_masks_come_from_origin_not_from_token_values() -> None:
    """The pad id, sampled or retrieved, changes nothing."""
    zero = episode(Segment(Origin.PROMPT, (0, 8)), model(0, 2), Segment(Origin.ENV, (0,)), model(0))
    (sample,) = assemble([zero]).samples
    assert sample.loss_mask == (False, False, True, True, False, True)


def test_packed_batch_by_hand() -> None:
    first = Scored((7, 8, 1, 2, 9, 3, 9), (False, False, True, True, False, True, False), {"x": range(7)})
    second = Scored((4, 5), (False, True), {"x": (0.0, 10.0)})
    batch = pack_batch([first, second], ("x",), total_tokens=4, total_sequences=2)
    assert batch.token_ids.tolist() == [7, 8, 1, 2, 9, 4], "fed up to the last predicting position"
    assert batch.position_ids.tolist() == [0, 1, 2, 3, 4, 0]
    assert batch.lengths == (5, 1)
    assert batch.predictors.tolist() == [1, 2, 4, 5]
    assert batch.targets.tolist() == [1, 2, 3, 5]
    assert batch.columns["x"].tolist() == [2, 3, 5, 10]
    assert batch.counts == (3, 1)
    assert first.cost == 5


def test_packing_keeps_every_scored_token_of_every_sample() -> None:
    samples = make_samples(9)
    batch = pack_batch([scored(sample, ("advantages",)) for sample in samples], ("advantages",))
    start = 0
    for sample, count in zip(samples, batch.counts, strict=True):
        wanted = [i for i, trained in enumerate(sample.loss_mask) if trained]
        assert batch.targets[start : start + count].tolist() == [sample.token_ids[i] for i in wanted]
        assert batch.columns["advantages"][start : start + count].tolist() == pytest.approx(
            [(sample.advantages or ())[i] for i in wanted]
        )
        start += count
    assert start == sum(sample.n_model_tokens for sample in samples)


def test_dummy_has_the_columns_of_a_batch_and_counts_for_nothing() -> None:
    dummy = pack_batch([], ("advantages",))
    assert dummy.dummy
    assert dummy.n_scored == 0
    assert dummy.columns["advantages"].tolist() == [0.0]


def test_unpack_inverts_the_selection() -> None:
    assert unpack((False, True, False, True), np.array([1.5, 2.5])) == (0.0, 1.5, 0.0, 2.5)


def test_a_column_that_is_missing_is_named() -> None:
    (sample,) = assemble([make_trajectory(0, 0)]).samples
    with pytest.raises(ValueError, match="advantages is not filled in"):
        scored(sample, ("advantages",))


def test_fill_wants_every_sample_exactly_once() -> None:
    samples = make_samples(2)
    rows = [(i, sample.values or ()) for i, sample in enumerate(samples)]
    assert fill(samples, "values", [ScoredRows((rows[1],)), ScoredRows((rows[0],))]) == samples
    with pytest.raises(ValueError, match="1 of 2"):
        fill(samples, "values", [ScoredRows((rows[0],))])
    with pytest.raises(ValueError, match="twice"):
        fill(samples, "values", [ScoredRows((rows[0],)), ScoredRows((rows[0],))])


def test_permuted_rewards_come_from_other_prompts_and_keep_their_distribution() -> None:
    made = [
        replace(episode(PROMPT, model(1), reward=Reward(10.0 * prompt + sample)), prompt_id=f"p{prompt}")
        for prompt in range(5)
        for sample in range(2)
    ]
    failed = replace(made[0], stop=StopReason.ABORTED, prompt_id="p9")
    permuted = permute_rewards([*made, failed], seed=3)
    totals = [trajectory.reward.total for trajectory in permuted[:-1] if trajectory.reward is not None]
    assert sorted(totals) == [0, 1, 10, 11, 20, 21, 30, 31, 40, 41]
    assert all(total // 10 != index // 2 for index, total in enumerate(totals))
    assert permuted[-1] is failed
    assert permuted == permute_rewards([*made, failed], seed=3) != permute_rewards([*made, failed], seed=4)


def test_rewards_of_a_single_prompt_cannot_be_permuted() -> None:
    with pytest.raises(HealthError, match="has 2 of 2 usable episodes"):
        permute_rewards([episode(PROMPT, model(1))] * 2, seed=0)
