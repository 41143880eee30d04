"""Learning-rate schedules and optimisers (AdamW; Muon for matrices with AdamW for the rest)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from verl.errors import ConfigError
from verl.registry import Registry
from verl.workers.muon import Muon


@dataclass(frozen=True)
class OptimSpec:
    """Everything an optimiser and its schedule need; see the config section of the same keys."""

    lr: float
    """Peak learning rate (of AdamW's share, when the optimiser is Muon)."""
    total_steps: int
    """Updates of the whole run: the schedule's end."""
    name: str = "adamw"
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 0.01
    eps: float = 1e-8
    warmup_ratio: float = 0.0
    """Share of ``total_steps`` that warms up linearly."""
    schedule: str = "constant"
    min_lr_ratio: float = 0.0
    """What a decaying schedule falls towards, as a share of the peak."""
    matrix_lr: float = 0.01
    """Peak learning rate of Muon's matrices."""

    @property
    def warmup_steps(self) -> int:
        """Number of warm-up updates: ``int(ratio * total)``."""
        return int(self.warmup_ratio * self.total_steps)


# A decay is a function of the decayed share x in [0, 1) that falls from 1 to 0.
DECAYS: Registry[Callable[[float], float]] = Registry(
    "learning-rate schedule",
    {
        "constant": lambda x: 1.0,
        "linear": lambda x: 1.0 - x,
        "cosine": lambda x: 0.5 * (1.0 + math.cos(math.pi * x)),
    },
)


def lr_factor(update: int, spec: OptimSpec) -> float:
    """Return the factor on the peak rate for update k = 1, 2, ... (design 5.1: ``min(1, k / warm-up)``).

    After the warm-up w of an N-update run the decayed share is x = (k - w) / (N - w + 1), so that no update has rate
    zero. Beyond N the factor stays where it ended.
    """
    if update < 1:
        raise ValueError(f"updates are counted from 1, got {update}")
    warmup = spec.warmup_steps
    if update <= warmup:
        return update / warmup
    update = min(update, max(spec.total_steps, warmup + 1))
    share = (update - warmup) / (max(spec.total_steps, warmup + 1) - warmup + 1)
    return spec.min_lr_ratio + (1.0 - spec.min_lr_ratio) * DECAYS[spec.schedule](share)


class Optimizers:
    """One or two torch optimisers driven as one. ``parts`` is what a checkpoint saves."""

    def __init__(self, parts: list[torch.optim.Optimizer], spec: OptimSpec) -> None:
        self.parts = parts
        self.spec = spec
        self._peaks = [[float(group["lr"]) for group in part.param_groups] for part in parts]

    def set_update(self, update: int) -> float:
        """Set every group's rate for update k (from 1); return the factor on the peaks."""
        factor = lr_factor(update, self.spec)
        for part, peaks in zip(self.parts, self._peaks, strict=True):
            for group, peak in zip(part.param_groups, peaks, strict=True):
                group["lr"] = peak * factor
        return factor

    def step(self) -> None:
        """Update the parameters from their gradients and drop the gradients."""
        for part in self.parts:
            part.step()
            part.zero_grad(set_to_none=True)

    def zero_grad(self) -> None:
        """Drop the gradients."""
        for part in self.parts:
            part.zero_grad(set_to_none=True)

    def to(self, device: torch.device) -> None:
        """Move the state tensors (offload and back)."""
        for part in self.parts:
            for state in part.state.values():
                for key, value in state.items():
                    if isinstance(value, Tensor) and value.ndim > 0:
                        state[key] = value.to(device, non_blocking=True)


def build_optimizers(module: nn.Module, spec: OptimSpec) -> Optimizers:
    """Build the optimisers for every trainable parameter of ``module``.

    Weight decay applies to matrices only: biases, norm weights and other vectors are never decayed.
    """
    return Optimizers(_BUILDERS[spec.name](module, spec), spec)


def _adamw(parameters: Iterable[nn.Parameter], spec: OptimSpec) -> torch.optim.Optimizer:
    trainable = [p for p in parameters if p.requires_grad]
    groups = [
        {"params": [p for p in trainable if p.ndim >= 2], "weight_decay": spec.weight_decay},
        {"params": [p for p in trainable if p.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    return torch.optim.AdamW(groups, lr=spec.lr, betas=spec.betas, eps=spec.eps, fused=True)


def _adamw_only(module: nn.Module, spec: OptimSpec) -> list[torch.optim.Optimizer]:
    return [_adamw(module.parameters(), spec)]


def _muon_and_adamw(module: nn.Module, spec: OptimSpec) -> list[torch.optim.Optimizer]:
    """Muon for the two-dimensional weights inside the layers; embeddings, heads and vectors stay with AdamW."""
    tables = {id(m.weight) for m in module.modules() if isinstance(m, nn.Embedding)}
    heads = {id(p) for name, p in module.named_parameters() if name.endswith(("lm_head.weight", "value_head.weight"))}
    matrices: list[nn.Parameter] = []
    rest: list[nn.Parameter] = []
    for parameter in module.parameters():
        is_matrix = parameter.ndim == 2 and id(parameter) not in tables | heads
        (matrices if is_matrix else rest).append(parameter)
    if not matrices:
        raise ConfigError("optim.name=muon: the model has no two-dimensional weights besides its embeddings")
    muon = Muon(matrices, lr=spec.matrix_lr, weight_decay=spec.weight_decay)
    return [muon, _adamw(rest, spec)]


_BUILDERS: Registry[Callable[[nn.Module, OptimSpec], list[torch.optim.Optimizer]]] = Registry(
    "optimiser", {"adamw": _adamw_only, "muon": _muon_and_adamw}
)
