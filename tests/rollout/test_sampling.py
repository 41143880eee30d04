"""Vectorised sampling against hand-computed values and the exact distribution."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from verl.errors import EngineError
from verl.types import Sampling
from verl.workers.rollout.sampling import SamplingBatch, kept_tokens, sample, uniforms

CPU = torch.device("cpu")
PROBABILITIES = [0.5, 0.3, 0.15, 0.05]


def draw(logits: list[list[float]], parameters: list[Sampling], uniform: list[float]):  # type: ignore[no-untyped-def]
    batch = SamplingBatch.build(parameters, len(logits[0]), CPU)
    tokens, logprobs, cut = sample(torch.tensor(logits), batch, torch.tensor(uniform, dtype=torch.float64))
    return tokens.tolist(), logprobs.tolist(), cut


def log(values: list[float]) -> list[float]:
    return [math.log(value) for value in values]


def test_the_uniform_number_selects_by_cumulative_probability() -> None:
    numbers = [0.0, 0.499, 0.501, 0.799, 0.801, 0.949, 0.951, 0.999999]
    tokens, logprobs, _ = draw([log(PROBABILITIES)] * 8, [Sampling(1)] * 8, numbers)
    assert tokens == [0, 0, 1, 1, 2, 2, 3, 3]
    assert logprobs == pytest.approx([math.log(PROBABILITIES[t]) for t in tokens], abs=1e-6)


def test_the_largest_uniform_number_never_leaves_the_vocabulary_nor_picks_an_impossible_token() -> None:
    below_one = float(np.nextafter(1.0, 0.0))
    tokens, logprobs, _ = draw([[1.0, 0.0, -math.inf, -math.inf]], [Sampling(1)], [below_one])
    assert tokens == [1]
    assert math.isfinite(logprobs[0])


def test_temperature_divides_the_logits_and_the_logprob_is_of_that_distribution() -> None:
    tokens, logprobs, _ = draw([[2.0, 0.0]], [Sampling(1, temperature=0.5)], [0.99])
    assert tokens == [1]
    assert logprobs == pytest.approx([-math.log(1 + math.exp(4.0))], abs=1e-6)


def test_greedy_rows_take_the_peak_with_the_logprob_of_temperature_one() -> None:
    parameters = [Sampling(1, temperature=0.0), Sampling(1)]
    tokens, logprobs, _ = draw([log(PROBABILITIES)] * 2, parameters, [0.99, 0.99])
    assert tokens == [0, 3]
    assert logprobs == pytest.approx([math.log(0.5), math.log(0.05)], abs=1e-6)


@pytest.mark.parametrize(
    ("parameters", "allowed", "cut"),
    [
        (Sampling(1, top_k=2), {0, 1}, 0.2),
        (Sampling(1, top_p=0.7), {0, 1}, 0.2),
        (Sampling(1, top_p=0.81), {0, 1, 2}, 0.05),
        (Sampling(1, top_p=1e-9), {0}, 0.5),
        (Sampling(1, top_k=3, top_p=0.6), {0, 1}, 0.2),
        (Sampling(1, top_k=-1, top_p=1.0), {0, 1, 2, 3}, 0.0),
    ],
)
def test_top_p_and_top_k_limit_the_choice_but_not_the_logprob(
    parameters: Sampling, allowed: set[int], cut: float
) -> None:
    grid = [(i + 0.5) / 200 for i in range(200)]
    order = [2, 0, 3, 1]  # the columns are not sorted by probability
    logits = log([PROBABILITIES[i] for i in order])
    tokens, logprobs, mass = draw([logits] * 200, [parameters] * 200, grid)
    assert {order[t] for t in tokens} == allowed
    assert logprobs == pytest.approx([logits[t] for t in tokens], abs=1e-6)
    assert mass / 200 == pytest.approx(cut, abs=1e-6)


def test_equal_probabilities_at_the_edge_of_top_k_keep_exactly_k() -> None:
    kept = kept_tokens(torch.ones(1, 6), torch.tensor([[1.0]]), torch.tensor([[2]]))
    assert int(kept.sum()) == 2


def test_many_draws_follow_the_softmax() -> None:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(50, generator=generator) * 2
    n = 40_000
    batch = SamplingBatch.build([Sampling(1)] * n, 50, CPU)
    numbers = torch.from_numpy(np.random.default_rng(5).random(n))
    tokens, _, _ = sample(logits.expand(n, -1), batch, numbers)
    expected = logits.double().softmax(-1) * n
    statistic = ((torch.bincount(tokens, minlength=50) - expected) ** 2 / expected).sum()
    assert float(statistic) < 85.4  # 99.9 % point of chi-square with 49 degrees of freedom


def test_logits_that_are_not_finite_are_an_error_not_a_token() -> None:
    with pytest.raises(EngineError, match="not finite"):
        draw([[math.nan, 0.0]], [Sampling(1)], [0.5])
    with pytest.raises(EngineError, match="not finite"):
        draw([[math.nan, 0.0]], [Sampling(1, temperature=0.0)], [0.5])


def test_uniform_numbers_depend_on_seed_and_context_length_only() -> None:
    assert np.array_equal(uniforms(7, 10, 5), uniforms(7, 10, 5))
    assert np.array_equal(uniforms(7, 10, 5), uniforms(7, 10, 9)[:5])
    assert not np.array_equal(uniforms(7, 10, 5), uniforms(7, 11, 5))
    assert not np.array_equal(uniforms(7, 10, 5), uniforms(8, 10, 5))
    assert not np.array_equal(uniforms(None, 10, 5), uniforms(None, 10, 5))
