"""What every engine keeps of itself: how much it has done, and which weights it holds."""

from __future__ import annotations

from dataclasses import dataclass

from verl.errors import EngineError


@dataclass
class EngineStats:
    """Running totals since the engine was built."""

    generated_tokens: int = 0
    prefilled_tokens: int = 0
    reused_tokens: int = 0
    """Context tokens that were not read again because their keys and values were kept or shared."""
    decode_steps: int = 0
    decode_rows: int = 0
    """Sum over decode steps of the rows in the batch: divided by the steps it is the mean batch size."""

    def as_dict(self) -> dict[str, float]:
        """Return the totals by name."""
        return {name: float(value) for name, value in vars(self).items()}


@dataclass(frozen=True)
class HeldWeights:
    """Which weights an engine holds."""

    version: int
    """-1 before the first publish."""
    reason: str | None = None
    """Why nothing may be generated with them; None when all is well."""
    digest: int | None = None
    """Checksum of the publish they came from, as it arrived; None when checksums are off."""

    def check(self) -> None:
        """Raise EngineError when nothing may be generated with these weights."""
        if self.reason is not None:
            raise EngineError(f"the rollout engine cannot generate: {self.reason}")

    def spoiled(self, version: int, written: int, error: object) -> HeldWeights:
        """Return the state after a publish that broke off in the middle."""
        reason = f"publishing weights version {version} failed after {written} weights were written: {error}"
        return HeldWeights(self.version, reason)


AWAITING = HeldWeights(-1, "no weights were published yet")
