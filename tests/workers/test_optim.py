"""Learning-rate schedules by hand, and what each optimiser is given."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from training_cases import tiny_config
from transformers import AutoModelForCausalLM

from verl.errors import ConfigError
from verl.workers.models import PackedModel
from verl.workers.muon import Muon, orthogonalise
from verl.workers.optim import OptimSpec, build_optimizers, lr_factor


def factors(**options: object) -> list[float]:
    spec = OptimSpec(**({"lr": 1.0, "total_steps": 10} | options))  # type: ignore[arg-type]
    return [lr_factor(k, spec) for k in range(1, spec.total_steps + 1)]


def test_warm_up_reaches_the_peak_at_its_last_step() -> None:
    """The published run had rate 0 at its first update; here update 1 of 4 has a quarter."""
    assert factors(warmup_ratio=0.4) == [0.25, 0.5, 0.75, 1.0] + [1.0] * 6


def test_published_ratio_gives_142_warm_up_steps() -> None:
    assert OptimSpec(lr=1.0, total_steps=500, warmup_ratio=0.285).warmup_steps == 142


def test_linear_decay() -> None:
    assert factors(total_steps=4, schedule="linear") == pytest.approx([0.8, 0.6, 0.4, 0.2])


def test_cosine_decay_ends_above_its_floor() -> None:
    got = factors(total_steps=6, schedule="cosine", warmup_ratio=0.34, min_lr_ratio=0.1)
    wanted = [0.5, 1.0] + [0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * k / 5)) for k in (1, 2, 3, 4)]
    assert got == pytest.approx(wanted)


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_every_update_of_a_run_moves_weights(schedule: str) -> None:
    for total in (1, 2, 7):
        for ratio in (0.0, 0.5, 1.0):
            assert min(factors(total_steps=total, schedule=schedule, warmup_ratio=ratio)) > 0.0


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ConfigError, match="did you mean 'cosine'"):
        lr_factor(1, OptimSpec(lr=1.0, total_steps=1, schedule="cosin"))


def packed(tie: bool = True) -> PackedModel:
    torch.manual_seed(0)
    return PackedModel(AutoModelForCausalLM.from_config(tiny_config(tie_word_embeddings=tie)), value_head=False)


def test_decay_is_for_matrices_only() -> None:
    (adamw,) = build_optimizers(packed(), OptimSpec(lr=1.0, total_steps=1, weight_decay=0.3)).parts
    for group in adamw.param_groups:
        for parameter in group["params"]:
            assert group["weight_decay"] == (0.3 if parameter.ndim >= 2 else 0.0)


@pytest.mark.parametrize("tie", [True, False])
def test_muon_gets_the_matrices_of_the_layers_and_nothing_else(tie: bool) -> None:
    module = packed(tie)
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    muon, adamw = build_optimizers(module, OptimSpec(lr=1.0, total_steps=1, name="muon")).parts
    with_muon = {names[id(p)] for group in muon.param_groups for p in group["params"]}
    with_adamw = {names[id(p)] for group in adamw.param_groups for p in group["params"]}
    assert with_muon | with_adamw == set(names.values())
    assert with_muon == {n for n in names.values() if n.endswith("proj.weight")}
    assert not with_muon & with_adamw


def test_each_optimiser_keeps_its_own_peak() -> None:
    spec = OptimSpec(lr=1e-3, total_steps=10, name="muon", matrix_lr=0.02, warmup_ratio=0.2)
    optimizers = build_optimizers(packed(), spec)
    assert optimizers.set_update(1) == 0.5
    assert optimizers.parts[0].param_groups[0]["lr"] == pytest.approx(0.01)
    assert optimizers.parts[1].param_groups[0]["lr"] == pytest.approx(5e-4)


def test_one_adamw_step_by_hand(tmp_path: Path) -> None:
    module = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.constant_(module.weight, 2.0)
    optimizers = build_optimizers(module, OptimSpec(lr=0.1, total_steps=1, weight_decay=0.5))
    module.weight.grad = torch.full((1, 1), 3.0)
    optimizers.set_update(1)
    optimizers.step()
    # decoupled decay 2 * (1 - 0.1 * 0.5) = 1.9, then a first Adam step of exactly the rate
    assert module.weight.item() == pytest.approx(1.8, abs=1e-6)
    assert module.weight.grad is None


def test_orthogonalised_matrices_have_singular_values_near_one() -> None:
    torch.manual_seed(0)
    values = torch.linalg.svdvals(orthogonalise(torch.randn(3, 8, 20)))
    assert values.min() > 0.6
    assert values.max() < 1.3


@pytest.mark.parametrize("shape", [(6, 6), (4, 12), (12, 4)])
def test_muon_follows_torchs_up_to_its_bfloat16(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    start = torch.randn(shape)
    mine, theirs = (torch.nn.Parameter(start.clone()) for _ in range(2))
    optimizers = (
        Muon([mine], lr=0.1, weight_decay=0.3),
        torch.optim.Muon([theirs], lr=0.1, weight_decay=0.3),
    )
    for _ in range(4):
        gradient = torch.randn(shape)
        for parameter, optimizer in zip((mine, theirs), optimizers, strict=True):
            parameter.grad = gradient.clone()
            optimizer.step()
    moved = (theirs.detach() - start).norm()
    assert float((mine - theirs).detach().norm() / moved) < 0.02


def test_muon_refuses_vectors() -> None:
    with pytest.raises(ValueError, match=r"shape \(3,\)"):
        Muon([torch.nn.Parameter(torch.zeros(3))], lr=0.1)
