"""Muon for the matrices of a network (Jordan et al. 2024, "Muon: an optimizer for hidden layers").

torch has one, whose orthogonalisation always runs in bfloat16: slow on CPUs without that type, and different on every
kind of CPU. Here it runs in float32, for all matrices of one shape at once, with the same update rule and defaults.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_ITERATIONS = 5
_EPS = 1e-7
_BATCH_ELEMENTS = 2**26
"""Elements orthogonalised at once."""


def orthogonalise(matrices: Tensor) -> Tensor:
    """Return matrices [k, m, n], m <= n, with all singular values moved near 1 (a quintic Newton-Schulz iteration).

    The coefficients trade exactness for speed: the values end between about 0.7 and 1.2.
    """
    a, b, c = _COEFFICIENTS
    x = matrices / torch.linalg.matrix_norm(matrices, keepdim=True).clamp(min=_EPS)
    for _ in range(_ITERATIONS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x


class Muon(torch.optim.Optimizer):
    """Momentum whose update is orthogonalised; two-dimensional parameters only, whole or sharded."""

    def __init__(self, params: Iterable[Tensor], lr: float, weight_decay: float = 0.1, momentum: float = 0.95) -> None:
        """``lr`` is multiplied by sqrt(max(1, rows / columns)) of each matrix; the decay is decoupled."""
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.ndim != 2:
                    raise ValueError(f"Muon is for matrices, got a parameter of shape {tuple(parameter.shape)}")

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            by_shape: dict[tuple[int, int], list[tuple[Tensor, Tensor]]] = defaultdict(list)
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                update = self._momentum(parameter, group["momentum"])
                by_shape[min(update.shape), max(update.shape)].append((parameter, update))
            for (rows, columns), pairs in by_shape.items():
                size = max(1, _BATCH_ELEMENTS // (rows * columns))
                for start in range(0, len(pairs), size):
                    self._apply(pairs[start : start + size], group)
        return None

    def _momentum(self, parameter: Tensor, momentum: float) -> Tensor:
        """Return the Nesterov update before orthogonalisation, whole on every rank."""
        gradient, state = cast(Tensor, parameter.grad), self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        buffer = state["momentum_buffer"]
        buffer.lerp_(gradient, 1.0 - momentum)
        update = gradient.lerp(buffer, momentum)
        return update.full_tensor() if isinstance(update, DTensor) else update

    @staticmethod
    def _apply(pairs: list[tuple[Tensor, Tensor]], group: dict[str, Any]) -> None:
        """Orthogonalise the updates of one shape, tall ones transposed, and take the step."""
        tall = [update.shape[0] > update.shape[1] for _, update in pairs]
        stacked = torch.stack([u.mT if flip else u for (_, u), flip in zip(pairs, tall, strict=True)])
        for (parameter, _), flip, wide in zip(pairs, tall, orthogonalise(stacked), strict=True):
            update = wide.mT if flip else wide
            scale = math.sqrt(max(1.0, update.shape[0] / update.shape[1]))
            if isinstance(parameter, DTensor):
                # Every rank holds the whole update already, so each cuts its own shard without communication.
                update = distribute_tensor(
                    update.contiguous(), parameter.device_mesh, parameter.placements, src_data_rank=None
                )
            parameter.mul_(1.0 - group["lr"] * group["weight_decay"])
            parameter.add_(update, alpha=-group["lr"] * scale)
