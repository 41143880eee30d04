"""Estimators of the divergence between two policies from log-probs of sampled tokens, and its weight's controllers.

The estimators take numpy arrays and tensors alike. Given log p and log q at tokens sampled from p they estimate
KL(p || q) per token: ``k1`` is unbiased and signed, ``k2`` is biased and smooth, ``k3`` is unbiased and never negative
(Schulman 2020, "Approximating KL divergence").
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from verl.registry import Registry

Values = TypeVar("Values", "np.ndarray[Any, Any]", Tensor)
_K3_LIMIT = 10.0
"""Bound on one token's k3, as published: e^x explodes on tokens that the other policy nearly excludes."""


def k1(logprobs: Values, other: Values) -> Values:
    """Return log p - log q."""
    result: Values = logprobs - other
    return result


def k_abs(logprobs: Values, other: Values) -> Values:
    """Return |log p - log q|."""
    result: Values = abs(logprobs - other)
    return result


def k2(logprobs: Values, other: Values) -> Values:
    """Return (log p - log q)^2 / 2."""
    difference = logprobs - other
    result: Values = 0.5 * difference * difference
    return result


def k3(logprobs: Values, other: Values) -> Values:
    """Return q/p - 1 - log(q/p), at most 10."""
    # The result is at its bound long before 20; the inner bound keeps exp finite, so the gradient there is 0, not NaN.
    difference: Any = (other - logprobs).clip(max=20.0)
    exponential: Any = torch.exp if isinstance(difference, Tensor) else np.exp
    result: Values = (exponential(difference) - 1.0 - difference).clip(max=_K3_LIMIT)
    return result


ESTIMATORS: Registry[Callable[[Any, Any], Any]] = Registry(
    "KL estimator", {"kl": k1, "abs": k_abs, "mse": k2, "low_var_kl": k3}
)
"""Published config names -> estimators."""


class KlController(Protocol):
    """The weight of the divergence in the reward, step by step."""

    @property
    def value(self) -> float:
        """The weight for the next step."""
        ...

    def update(self, current: float, n: int) -> None:
        """Learn the divergence (nats per token) of a step of ``n`` trajectories."""
        ...

    def state(self) -> dict[str, Any]:
        """Return what ``restore`` needs, as JSON values."""
        ...

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state."""
        ...


@dataclass
class FixedKl:
    """A weight that never moves."""

    value: float

    def update(self, current: float, n: int) -> None:
        """Nothing to learn."""

    def state(self) -> dict[str, Any]:
        """Return the weight."""
        return {"value": self.value}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Keep the configured weight: it is part of the configuration, not of the progress."""


@dataclass
class AdaptiveKl:
    """Steers the divergence towards ``target`` (Ziegler et al. 2019, section 2.2).

    Each step multiplies the weight by 1 + clip(current / target - 1, -0.2, 0.2) * n / horizon.
    """

    value: float
    target: float
    """nats per token"""
    horizon: int
    """trajectories"""

    def update(self, current: float, n: int) -> None:
        """Move the weight by the divergence of a step of ``n`` trajectories."""
        error = min(max(current / self.target - 1.0, -0.2), 0.2)
        self.value *= 1.0 + error * n / self.horizon

    def state(self) -> dict[str, Any]:
        """Return the weight."""
        return {"value": self.value}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take over a saved weight."""
        self.value = float(state["value"])


def kl_controller(config: Any) -> KlController:
    """Build the controller of ``algorithm.kl_ctrl`` (keys type, kl_coef, target_kl, horizon)."""
    if config.type == "fixed":
        return FixedKl(config.kl_coef)
    return AdaptiveKl(config.kl_coef, config.target_kl, config.horizon)
