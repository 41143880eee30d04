"""What is watched for while a run trains, from where on it counts as trouble, and what is then done. All of it ours.

Each watch looks at one figure of ``metrics.jsonl`` (named in ``verl.trainer.watches``, explained in docs/metrics.md).
"""

from __future__ import annotations

from typing import Literal

from pydantic import NonNegativeInt, PositiveFloat, PositiveInt

from verl.config.base import Section

Action = Literal["off", "warn", "stop"]


class WatchConfig(Section):
    """One watch. A limit that is null is not looked at; a figure that a run does not have is never out of bounds."""

    action: Action | None = None
    """``off``, ``warn``, or ``stop`` (keep the last good checkpoint, exit with status 3); null: ``health.action``."""
    above: float | None = None
    """Trouble is a value above this."""
    below: float | None = None
    """Trouble is a value below this, once the run has had one that is not."""
    spike: PositiveFloat | None = None
    """Trouble is a value above this many times the median of the 20 steps before (at least 5)."""
    fall: PositiveFloat | None = None
    """Trouble is a value this far below the mean of the best 5 steps in a row."""
    steps: PositiveInt = 3
    """Steps in a row that must be out of bounds before the watch fires."""


class HealthConfig(Section):
    """Watches of every run. Ours."""

    action: Action = "warn"
    """What watches do that have no action of their own."""
    max_dropped_steps: NonNegativeInt = 3
    """Steps in a row whose gradient may be not finite: each is dropped; one more ends the run with exit status 3."""
    entropy: WatchConfig = WatchConfig(below=0.01, above=6.0)
    kl: WatchConfig = WatchConfig(above=0.5)
    update_kl: WatchConfig = WatchConfig(above=0.1)
    ratio: WatchConfig = WatchConfig(below=0.5, above=2.0)
    clip_fraction: WatchConfig = WatchConfig(above=0.4)
    correct_logprob: WatchConfig = WatchConfig(fall=1.0)
    dead_groups: WatchConfig = WatchConfig(above=0.9, steps=10)
    invalid_actions: WatchConfig = WatchConfig(above=1.0, steps=5)
    invented_information: WatchConfig = WatchConfig(above=0.1)
    repetition: WatchConfig = WatchConfig(above=0.5)
    length_cap: WatchConfig = WatchConfig(above=0.3)
    searches: WatchConfig = WatchConfig(below=0.05)
    search_limit: WatchConfig = WatchConfig(above=0.8, steps=5)
    search_failures: WatchConfig = WatchConfig(above=0.05)
    non_finite: WatchConfig = WatchConfig(above=0.0, steps=1)
    grad_norm: WatchConfig = WatchConfig(spike=20.0, steps=1)
