"""Watches over a run's health: which figure each looks at, when it is out of bounds, what fires, what is still good.

Everything here is a function of the rows of ``metrics.jsonl``, so that a resumed run judges as if it had never stopped,
and a finished run can be judged again. A row holds ``health/<watch>`` for every watch that is out of bounds in it: the
number of steps in a row, this one included.
"""

from __future__ import annotations

import logging
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from verl.config.health_schema import HealthConfig, WatchConfig

logger = logging.getLogger(__name__)

Row = Mapping[str, Any]

SPIKE_WINDOW, SPIKE_LEAST = 20, 5
FALL_WINDOW = 5
PREFIX = "health/"


@dataclass(frozen=True, slots=True)
class Watch:
    """One row of the table."""

    metrics: tuple[str, ...]
    """The figure it looks at: the first of these that a run has."""
    remedy: str
    """What to do when it fires; docs/metrics.md says more."""


_SEE_EPISODES = "read the step's episodes under rollouts/"

WATCHES: Mapping[str, Watch] = {
    "entropy": Watch(("policy/entropy",), "lower the learning rate, or set entropy_ctrl.target or a KL term"),
    "kl": Watch(("kl/reference", "policy/reference_kl"), "lower the learning rate or raise the KL coefficient"),
    "update_kl": Watch(("policy/update_kl",), "lower the learning rate, ppo_epochs or the number of mini-batches"),
    "ratio": Watch(("policy/ratio",), "lower the learning rate or ppo_epochs; check staleness"),
    "clip_fraction": Watch(("policy/clip_fraction",), "lower the learning rate, ppo_epochs or staleness"),
    "correct_logprob": Watch(("policy/correct_logprob",), "set llds_coef, or lower the learning rate"),
    "dead_groups": Watch(("advantage/dead_groups",), "turn on algorithm.filter_groups, or change the difficulty"),
    "invalid_actions": Watch(
        ("episode/invalid_actions",), f"{_SEE_EPISODES}; reward the format, lower the learning rate"
    ),
    "invented_information": Watch(
        ("episode/invented_information",), f"{_SEE_EPISODES}; the reward must not pay for blocks that the model wrote"
    ),
    "repetition": Watch(("length/repetition",), f"{_SEE_EPISODES}; lower the learning rate, raise the KL coefficient"),
    "length_cap": Watch(("turn/length",), "raise data.max_response_length, or shape lengths (algorithm.shaping)"),
    "searches": Watch(("episode/searches",), "reward searching or the retrieved passages; check the retrieval service"),
    "search_limit": Watch(("episode/search_limit",), "set a search cost (algorithm.shaping), or raise max_turns"),
    "search_failures": Watch(
        ("stop/search_failed",), "look at the retrieval service: service/trouble_* names the kind"
    ),
    "non_finite": Watch(
        ("policy/dropped_updates", "critic/dropped_updates"),
        "lower the learning rate; look at the prompts that are named",
    ),
    "grad_norm": Watch(("policy/grad_norm",), f"{_SEE_EPISODES}; lower grad_clip or the learning rate"),
}
"""By the name of its section in ``health``."""


@dataclass(frozen=True, slots=True)
class Fired:
    """A watch that has been out of bounds for long enough."""

    name: str
    metric: str
    value: float
    reason: str
    """Such as ``below health.entropy.below=0.01``."""
    steps: int
    """In a row, this one included."""
    action: str

    def message(self) -> str:
        """Return one line: what, its value, for how long, and the remedy."""
        return (
            f"health.{self.name}: {self.metric} is {self.value:.4g}, {self.reason}, for {self.steps} step(s); "
            f"{WATCHES[self.name].remedy}"
        )


def action_of(health: HealthConfig, name: str) -> str:
    """Return ``off``, ``warn`` or ``stop``."""
    own: WatchConfig = getattr(health, name)
    return own.action or health.action


def breach(limits: WatchConfig, name: str, value: float, before: Sequence[float]) -> str | None:
    """Return which limit ``value`` is beyond, None when all is well. ``before``: earlier values, oldest first."""
    key = f"health.{name}"
    if limits.above is not None and value > limits.above:
        return f"above {key}.above={limits.above:g}"
    if limits.below is not None and value < limits.below and any(earlier >= limits.below for earlier in before):
        return f"below {key}.below={limits.below:g}"
    if limits.spike is not None and len(before) >= SPIKE_LEAST:
        median = statistics.median(before[-SPIKE_WINDOW:])
        if value > limits.spike * median > 0:
            return f"above {key}.spike={limits.spike:g} times its median of {median:.4g}"
    if limits.fall is not None and len(before) >= FALL_WINDOW:
        best = max(statistics.fmean(before[i : i + FALL_WINDOW]) for i in range(len(before) - FALL_WINDOW + 1))
        if value < best - limits.fall:
            return f"more than {key}.fall={limits.fall:g} below its best of {best:.4g}"
    return None


def judge(health: HealthConfig, row: Row, earlier: Sequence[Row]) -> tuple[dict[str, float], list[Fired]]:
    """Judge a step by its figures and the rows before it, oldest first.

    Returns ``health/<watch>`` of every watch that is out of bounds, and those that have been for long enough.
    """
    out_of_bounds: dict[str, float] = {}
    fired = []
    for name, watch in WATCHES.items():
        action, limits = action_of(health, name), getattr(health, name)
        metric = next((metric for metric in watch.metrics if row.get(metric) is not None), None)
        if action == "off" or metric is None:
            continue
        before = [past[metric] for past in earlier if past.get(metric) is not None]
        reason = breach(limits, name, row[metric], before)
        if reason is None:
            continue
        steps = 1 + int((earlier[-1].get(PREFIX + name) if earlier else None) or 0)
        out_of_bounds[PREFIX + name] = float(steps)
        if steps >= limits.steps:
            fired.append(Fired(name, metric, row[metric], reason, steps, action))
    return out_of_bounds, fired


def is_clean(row: Row) -> bool:
    """True when no watch was out of bounds that speaks of the weights; a dropped step or a lost search does not."""
    harmless = {PREFIX + "non_finite", PREFIX + "search_failures"}
    return not any(name.startswith(PREFIX) and name not in harmless and row[name] for name in row)


def last_good(checkpoints: Iterable[int], rows: Sequence[Row]) -> int | None:
    """Return the newest checkpoint that the step after it has shown to be good; None when there is none.

    What a step does to the policy shows in the figures of the next one: a checkpoint is good when neither has a watch
    out of bounds.
    """
    clean = {row["step"] for row in rows if is_clean(row)}
    return max((step for step in checkpoints if {step, step + 1} <= clean), default=None)


def protects(health: HealthConfig, row: Row) -> bool:
    """True when the last good checkpoint must outlive newer ones: in trouble, or when trouble would stop the run."""
    return not is_clean(row) or any(action_of(health, name) == "stop" for name in WATCHES)


def episodes_of_trouble(health: HealthConfig, rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return, for summary and report, each stretch of steps in which a watch fired: watch, first and last step."""
    found: list[dict[str, Any]] = []
    for name in WATCHES:
        least, last = getattr(health, name).steps, None
        for row in rows:
            if (row.get(PREFIX + name) or 0) < least:
                continue
            if last is not None and last["last_step"] == row["step"] - 1:
                last["last_step"] = row["step"]
            else:
                last = {"watch": name, "first_step": row["step"], "last_step": row["step"]}
                found.append(last)
    return sorted(found, key=lambda one: (one["first_step"], one["watch"]))


def dropped_in_a_row(rows: Sequence[Row]) -> int:
    """Return how many steps up to the last one had a gradient that was not finite."""
    count = 0
    for row in reversed(rows):
        if not (row.get("policy/dropped_updates") or row.get("critic/dropped_updates")):
            break
        count += 1
    return count


class Watchman:
    """The watches of one run, step by step: the rows so far, and what has just fired."""

    def __init__(self, health: HealthConfig) -> None:
        self._health = health
        self._rows: list[Row] = []
        self.stops: list[str] = []
        """Why the run must end after the step that was observed last; empty when it need not."""

    def remember(self, rows: Sequence[Row]) -> None:
        """Take over the rows of an earlier session."""
        self._rows = list(rows)

    def observe(self, step: int, figures: Mapping[str, float]) -> dict[str, float]:
        """Judge a step and log what fires; return its ``health/*`` figures."""
        row: dict[str, Any] = {name: value for name, value in figures.items() if math.isfinite(value)} | {"step": step}
        out_of_bounds, fired = judge(self._health, row, self._rows)
        self._rows.append(row | out_of_bounds)
        for one in fired:
            logger.warning("step %d: %s", step, one.message())
        self.stops = [one.message() for one in fired if one.action == "stop"]
        dropped, limit = dropped_in_a_row(self._rows), self._health.max_dropped_steps
        if dropped > limit:
            self.stops.append(
                f"{dropped} steps in a row had a gradient that is not finite, health.max_dropped_steps={limit} are "
                f"allowed; {WATCHES['non_finite'].remedy}"
            )
        return out_of_bounds

    def last_good(self, checkpoints: Iterable[int]) -> int | None:
        """Return the newest of these steps that is known to be good."""
        return last_good(checkpoints, self._rows)

    def protected(self, checkpoints: Iterable[int]) -> int | None:
        """Return the checkpoint that must outlive newer ones, None when retention may do as it is told."""
        if not self._rows or not protects(self._health, self._rows[-1]):
            return None
        return self.last_good(checkpoints)

    def history(self) -> list[dict[str, Any]]:
        """Return what has fired so far, for summary and report."""
        return episodes_of_trouble(self._health, self._rows)
