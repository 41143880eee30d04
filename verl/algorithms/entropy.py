"""The weight of the entropy bonus, fixed or steered towards a target."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass
class EntropyController:
    """Adaptive entropy control (He et al. 2025, Skywork-OR1, section 4): keeps the entropy from falling below a target.

    After every step the coefficient moves by ``delta``, up when the entropy is below ``target`` and down when it is
    above, within 0 and ``limit``; it is used only while the entropy is at or below the target. Without a target it
    stays as it is.
    """

    coefficient: float
    target: float | None
    """nats/token"""
    delta: float
    limit: float

    def value(self, entropy: float) -> float:
        """Return the weight for a step whose policy has this entropy (nats/token, before its update)."""
        return self.coefficient if self.target is None or entropy <= self.target else 0.0

    def update(self, entropy: float) -> None:
        """Learn the entropy of a step."""
        if self.target is not None:
            moved = self.coefficient + (self.delta if entropy < self.target else -self.delta)
            self.coefficient = min(max(moved, 0.0), self.limit)

    def state(self) -> dict[str, Any]:
        """Return the coefficient as JSON values."""
        return {"coefficient": self.coefficient}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state; a fixed coefficient stays the configured one."""
        if self.target is not None:
            self.coefficient = float(state["coefficient"])


def entropy_controller(actor: Any) -> EntropyController:
    """Build the controller of the config section ``actor``."""
    control = actor.entropy_ctrl
    return EntropyController(actor.entropy_coeff, control.target, control.delta, control.max_coeff)
