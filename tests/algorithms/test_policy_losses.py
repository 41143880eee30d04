"""Policy losses by hand, and their gradients against formulas written down anew."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from verl.algorithms.policy_losses import (
    POLICY_LOSSES,
    Clip,
    PolicyInput,
    cispo,
    clip_of,
    gspo,
    likelihood_displacement,
    ppo,
)
from verl.config import algorithm_schema as schema


def given(
    logprobs: Tensor,
    old: Tensor,
    advantages: Tensor,
    counts: tuple[int, ...] | None = None,
    clip: Clip = Clip(0.2, 0.2),  # noqa: B008 - frozen
) -> PolicyInput:
    return PolicyInput(logprobs, old, advantages, counts or (len(logprobs),), clip)


def test_policy_loss_by_hand() -> None:
    ratios = torch.tensor([1.5, 1.5, 0.5, 0.5, 1.1])
    advantages = torch.tensor([2.0, -2.0, 2.0, -2.0, 1.0])
    terms = ppo(given(ratios.log(), torch.zeros(5), advantages))
    # Clipped where the surrogate would be too good: r too large with A > 0, r too small with A < 0.
    assert terms.loss.tolist() == pytest.approx([-2.4, 3.0, -1.0, 1.6, -1.1])
    assert terms.clipped.tolist() == [1, 0, 0, 1, 0]


def test_policy_loss_at_equal_policies_is_minus_the_advantage() -> None:
    logprobs = torch.tensor([-1.0, -2.0], requires_grad=True)
    terms = ppo(given(logprobs, logprobs.detach(), torch.tensor([0.5, -3.0])))
    assert terms.loss.tolist() == [-0.5, 3.0]
    terms.loss.sum().backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [-0.5, 3.0]  # d(-A r)/d log p = -A: a good token's log-prob rises on descent


def test_clipped_tokens_have_no_gradient() -> None:
    logprobs = torch.tensor([math.log(1.5)], requires_grad=True)
    ppo(given(logprobs, torch.zeros(1), torch.ones(1))).loss.sum().backward()
    assert logprobs.grad is not None
    assert logprobs.grad.item() == 0.0


def test_clip_higher_lets_a_good_token_rise_further() -> None:
    ratios = torch.tensor([1.27, 1.3, 0.75])
    terms = ppo(given(ratios.log(), torch.zeros(3), torch.tensor([1.0, 1.0, -1.0]), clip=Clip(0.2, 0.28)))
    assert terms.loss.tolist() == pytest.approx([-1.27, -1.28, 0.8])
    assert terms.clipped.tolist() == [0, 1, 1]


def test_dual_clip_bounds_what_a_bad_token_costs() -> None:
    ratios = torch.tensor([5.0, 5.0, 2.0])
    data = given(ratios.log(), torch.zeros(3), torch.tensor([-1.0, 1.0, -1.0]), clip=Clip(0.2, 0.2, 3.0))
    terms = ppo(data)
    assert terms.loss.tolist() == pytest.approx([3.0, -1.2, 2.0])
    assert terms.clipped.tolist() == [1, 1, 0]
    assert ppo(given(*(data.logprobs, data.old_logprobs, data.advantages))).loss[0].item() == pytest.approx(5.0)


def test_gspo_by_hand() -> None:
    # Trajectories of 2 and 1 tokens: s = sqrt(2 * 1) = 1.414 and 0.5.
    log_ratio = torch.tensor([math.log(2.0), 0.0, math.log(0.5)])
    terms = gspo(given(log_ratio, torch.zeros(3), torch.tensor([1.0, 1.0, -1.0]), (2, 1)))
    assert terms.loss.tolist() == pytest.approx([-1.2, -1.2, 0.8])
    assert terms.clipped.tolist() == [1, 1, 1]
    wide = gspo(given(log_ratio, torch.zeros(3), torch.tensor([1.0, 1.0, -1.0]), (2, 1), Clip(0.9, 0.9)))
    assert wide.loss.tolist() == pytest.approx([-math.sqrt(2), -math.sqrt(2), 0.5])


def test_gspo_has_the_gradient_of_its_definition() -> None:
    old, advantages, counts = torch.zeros(5), torch.tensor([1.0, 1.0, 1.0, -2.0, -2.0]), (3, 2)
    start = torch.tensor([0.1, -0.2, 0.05, 0.3, -0.1])
    logprobs = start.clone().requires_grad_()
    weights = torch.tensor([1 / 6, 1 / 6, 1 / 6, 1 / 4, 1 / 4])  # loss_agg=sequence
    (gspo(given(logprobs, old, advantages, counts, Clip(0.9, 0.9))).loss * weights).sum().backward()
    direct = start.clone().requires_grad_()
    ratios = [torch.exp(part.mean()) for part in direct.split(counts)]
    (-(ratios[0] * 1.0 + ratios[1] * -2.0) / 2).backward()
    assert logprobs.grad is not None and direct.grad is not None
    assert logprobs.grad.tolist() == pytest.approx(direct.grad.tolist())


def test_gspo_of_single_tokens_is_ppo() -> None:
    data = given(torch.tensor([0.5, -0.4]), torch.zeros(2), torch.tensor([1.0, -1.0]), (1, 1))
    assert gspo(data).loss.tolist() == pytest.approx(ppo(data).loss.tolist())


def test_cispo_keeps_the_gradient_of_a_clipped_token() -> None:
    old = torch.tensor([-1.0 - math.log(1.5), -2.0])
    logprobs = torch.tensor([-1.0, -2.0], requires_grad=True)
    terms = cispo(given(logprobs, old, torch.tensor([2.0, -1.0])))
    assert terms.loss.tolist() == pytest.approx([1.2 * 2.0 * 1.0, -2.0])
    assert terms.clipped.tolist() == [1, 0]
    terms.loss.sum().backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx([-2.4, 1.0])


def test_displacement_acts_on_lost_tokens_of_good_trajectories_that_lost() -> None:
    # Lost: (0.5, -0.2) good and lower in sum; (0.2, -0.5) good and higher; 0.5 bad; 0.3 with advantage 0.
    old = torch.full((6,), -1.0)
    logprobs = (old - torch.tensor([0.5, -0.2, 0.2, -0.5, 0.5, 0.3])).requires_grad_()
    advantages = torch.tensor([1.0, 1.0, 1.0, 1.0, -1.0, 0.0])
    penalty = likelihood_displacement(given(logprobs, old, advantages, (2, 2, 1, 1)))
    assert penalty.tolist() == pytest.approx([0.5, 0.0, 0.0, 0.0, 0.0, 0.3])
    penalty.sum().backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [-1.0, 0.0, 0.0, 0.0, 0.0, -1.0]


def test_bounds_fall_back_on_the_one_epsilon() -> None:
    actor = SimpleNamespace(clip_ratio=0.2, clip_ratio_low=None, clip_ratio_high=0.28, clip_ratio_c=None)
    assert clip_of(actor) == Clip(0.2, 0.28, None)


def test_the_schema_names_the_table() -> None:
    assert sorted(schema.POLICY_LOSSES) == POLICY_LOSSES.names()
