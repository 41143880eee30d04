"""Loss terms, their aggregation and divergence estimators, by hand and by independent recomputation."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from verl.algorithms.kl import ESTIMATORS, AdaptiveKl, FixedKl, kl_controller
from verl.algorithms.losses import AGGREGATIONS, Totals, value_terms


def test_value_loss_by_hand() -> None:
    values, old, returns = torch.tensor([2.0, 0.3]), torch.tensor([0.0, 0.0]), torch.tensor([1.0, 1.0])
    terms = value_terms(values, old, returns, clip_range=0.5)
    # 2.0 is clipped to 0.5 but (2 - 1)^2 is larger; 0.3 is not clipped.
    assert terms.loss.tolist() == pytest.approx([0.5, 0.5 * 0.49])
    assert terms.clipped.tolist() == [0, 0]
    moved = value_terms(torch.tensor([1.0]), torch.zeros(1), torch.ones(1), 0.5)
    assert moved.loss.tolist() == pytest.approx([0.5 * 0.25])
    assert moved.clipped.tolist() == [1]


def test_aggregations_divide_by_the_whole_mini_batch() -> None:
    # Two micro-batches of one mini-batch: trajectories of 2 and 1 tokens, then one of 3.
    first, second = torch.tensor([1.0, 2.0, 6.0]), torch.tensor([3.0, 3.0, 3.0])
    totals = Totals(tokens=6.0, sequences=3.0, scale=4.0)
    sums = {"token": 18.0 / 6, "sequence": (1.5 + 6.0 + 3.0) / 3, "constant": 18.0 / (3 * 4)}
    assert set(sums) == set(AGGREGATIONS)
    for name, wanted in sums.items():
        weights = AGGREGATIONS[name]
        total = (first * weights((2, 1), totals)).sum() + (second * weights((3,), totals)).sum()
        assert total.item() == pytest.approx(wanted)


def test_divergence_estimators_by_hand() -> None:
    p, q = np.array([-1.0, -2.0]), np.array([-1.5, -1.0])
    assert ESTIMATORS["kl"](p, q).tolist() == pytest.approx([0.5, -1.0])
    assert ESTIMATORS["abs"](p, q).tolist() == pytest.approx([0.5, 1.0])
    assert ESTIMATORS["mse"](p, q).tolist() == pytest.approx([0.125, 0.5])
    assert ESTIMATORS["low_var_kl"](p, q).tolist() == pytest.approx([math.exp(-0.5) - 0.5, math.e - 2])


@pytest.mark.parametrize("name", ESTIMATORS.names())
def test_divergence_estimators_take_tensors_and_vanish_at_equality(name: str) -> None:
    p = torch.tensor([-1.0, -4.0], dtype=torch.float64)
    q = torch.tensor([-2.0, -3.5], dtype=torch.float64)
    assert ESTIMATORS[name](p, q).tolist() == pytest.approx(ESTIMATORS[name](p.numpy(), q.numpy()).tolist())
    assert ESTIMATORS[name](p, p).tolist() == [0.0, 0.0]


def test_k1_and_k3_estimate_the_divergence_of_two_distributions() -> None:
    """Exact expectation over a small vocabulary, against the definition of KL(p || q)."""
    generator = np.random.default_rng(0)
    p, q = generator.dirichlet(np.full(6, 5.0)), generator.dirichlet(np.full(6, 5.0))
    exact = float((p * np.log(p / q)).sum())
    for name in ("kl", "low_var_kl"):
        assert float((p * ESTIMATORS[name](np.log(p), np.log(q))).sum()) == pytest.approx(exact)


def test_k3_is_bounded_with_a_finite_gradient() -> None:
    p = torch.tensor([-200.0], requires_grad=True)
    value = ESTIMATORS["low_var_kl"](p, torch.tensor([-1.0]))
    value.sum().backward()
    assert value.item() == 10.0
    assert p.grad is not None
    assert p.grad.item() == 0.0


def test_adaptive_controller_moves_towards_its_target() -> None:
    controller = AdaptiveKl(0.1, target=0.05, horizon=1000)
    controller.update(0.5, 100)  # far above: error bounded at 0.2
    assert controller.value == pytest.approx(0.1 * 1.02)
    controller.update(0.0, 100)
    assert controller.value == pytest.approx(0.1 * 1.02 * 0.98)
    other = AdaptiveKl(0.1, 0.05, 1000)
    other.restore(controller.state())
    assert other.value == controller.value


def test_controllers_by_config() -> None:
    fixed = kl_controller(SimpleNamespace(type="fixed", kl_coef=0.001, target_kl=None, horizon=None))
    fixed.update(5.0, 10)
    assert fixed == FixedKl(0.001)
    adaptive = kl_controller(SimpleNamespace(type="adaptive", kl_coef=0.01, target_kl=0.1, horizon=10))
    assert isinstance(adaptive, AdaptiveKl)
