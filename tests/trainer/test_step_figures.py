"""What a step's figures are read from, against values computed by hand."""

from __future__ import annotations

import pytest

from verl.metrics import StepMetrics
from verl.trainer.step_figures import (
    add_advantage_figures,
    add_episode_figures,
    add_sample_figures,
    repetition,
)
from verl.types import Origin, Reward, Sample, Segment, StopReason, Trajectory


def episode(stop: StopReason, reward: Reward | None, model: int, turns: tuple[str, ...]) -> Trajectory:
    segments = (
        Segment(Origin.PROMPT, (1, 2, 3)),
        Segment(Origin.MODEL, (4,) * model, (-1.0,) * model, 0),
        Segment(Origin.ENV, (5, 5)),
    )
    return Trajectory("p#0", "p", segments, stop, turns=turns, reward=reward, metrics={"searches": float(model)})


def test_failed_episodes_count_as_stops_but_not_in_rewards_or_lengths() -> None:
    figures = StepMetrics()
    add_episode_figures(
        [
            episode(StopReason.ANSWERED, Reward(1.0, {"f1": 0.8, "intent": None}), 2, ("search", "answer")),
            episode(StopReason.TURN_LIMIT, Reward(0.5, {"f1": 0.4, "intent": 0.6}), 4, ("search",)),
            episode(StopReason.SEARCH_FAILED, Reward(9.0, {"f1": 9.0}), 100, ("search",)),
        ],
        figures,
    )
    result = figures.result()
    assert result["data/episodes"] == 3
    assert result["reward/total/mean"] == 0.75 and result["reward/total/max"] == 1.0
    assert result["reward/part/f1"] == pytest.approx(0.6)
    assert result["reward/part/intent"] == 0.6 and result["reward/available/intent"] == 0.5
    assert result["stop/search_failed"] == result["stop/answered"] == pytest.approx(1 / 3)
    assert sum(value for name, value in result.items() if name.startswith("stop/")) == pytest.approx(1)
    assert result["turn/search"] == 0.75 and result["turn/answer"] == 0.25
    assert result["length/prompt/mean"] == 3 and result["length/model/mean"] == 3 and result["length/response/max"] == 6
    assert result["episode/searches"] == 3


def sample(**columns: tuple[float, ...]) -> Sample:
    return Sample(
        "p#0", "p", (1, 2, 3), (False, True, False), (0.0, 1.0, 0.0), 1.0, (0.0, -1.0, 0.0), 2, **columns
    )  # fmt: skip


def test_gaps_are_taken_on_trained_tokens_only() -> None:
    figures = StepMetrics()
    add_sample_figures([sample(old_logprobs=(0.0, -1.25, 7.0), ref_logprobs=(0.0, -1.5, 9.0))], 3, figures)
    result = figures.result()
    assert result["policy/rollout_kl"] == 0.25  # engine -1.0, trainer -1.25
    assert result["policy/rollout_gap/max"] == 0.25
    assert result["kl/reference"] == 0.25  # old -1.25, reference -1.5
    assert result["policy/staleness"] == 1
    assert (result["data/trained_tokens"], result["data/total_tokens"], result["data/trained_episodes"]) == (1, 3, 1)


def test_columns_that_a_step_does_not_have_are_left_out() -> None:
    figures = StepMetrics()
    add_sample_figures([sample()], 2, figures)
    add_advantage_figures([sample(advantages=(0.0, 0.5, 0.0))], figures)
    result = figures.result()
    assert "kl/reference" not in result and "policy/rollout_kl" not in result and "critic/value/mean" not in result
    assert result["advantage/value/mean"] == 0.5


def test_repetition_is_the_share_of_four_grams_seen_before() -> None:
    assert repetition((1, 2, 3)) == 0.0
    assert repetition((1, 2, 3, 4, 5)) == 0.0
    assert repetition((7,) * 8) == pytest.approx(0.8)  # 5 four-grams, 1 distinct
    assert repetition((1, 2, 1, 2, 1, 2, 1)) == pytest.approx(0.5)  # 4 four-grams, 2 distinct


def test_correct_samples_are_those_with_a_positive_advantage() -> None:
    figures = StepMetrics()
    good = sample(old_logprobs=(0.0, -1.5, 0.0), advantages=(0.0, 0.5, 0.0))
    bad = sample(old_logprobs=(0.0, -9.0, 0.0), advantages=(0.0, -0.5, 0.0))
    add_advantage_figures([good, bad], figures)
    assert figures.result()["policy/correct_logprob"] == -1.5
