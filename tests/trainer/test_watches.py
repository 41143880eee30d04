"""When a watch is out of bounds, when it fires, and which checkpoint is still good: every case by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from verl.config.health_schema import HealthConfig, WatchConfig
from verl.metrics import find
from verl.trainer.watches import (
    PREFIX,
    WATCHES,
    Watchman,
    breach,
    dropped_in_a_row,
    episodes_of_trouble,
    judge,
    last_good,
)

ROOT = Path(__file__).resolve().parents[2]


def test_every_watch_has_a_section_a_limit_a_figure_in_the_table_and_a_paragraph() -> None:
    sections = {name for name, field in HealthConfig.model_fields.items() if field.annotation is WatchConfig}
    assert sections == set(WATCHES)
    manual = (ROOT / "docs" / "metrics.md").read_text()
    for name, watch in WATCHES.items():
        limits = getattr(HealthConfig(), name)
        assert any(getattr(limits, kind) is not None for kind in ("above", "below", "spike", "fall")), name
        assert all(find(metric) is not None for metric in watch.metrics)
        assert f"| `{name}` |" in manual, name


@pytest.mark.parametrize(
    ("limits", "value", "before", "out"),
    [
        ({"above": 0.5}, 0.5, [], False),
        ({"above": 0.5}, 0.51, [], True),
        ({"below": 0.1}, 0.05, [0.02, 0.03], False),  # it never was where it should be: no fall
        ({"below": 0.1}, 0.05, [0.02, 0.1], True),
        ({"below": 0.1}, 0.1, [0.5], False),
        ({"spike": 10.0}, 11.0, [1.0] * 4, False),  # four values are no median to go by
        ({"spike": 10.0}, 11.0, [1.0] * 5, True),
        ({"spike": 10.0}, 10.0, [1.0] * 5, False),
        ({"spike": 10.0}, 11.0, [0.0] * 5, False),  # ten times nothing
        ({"spike": 10.0}, 30.0, [1.0] * 30 + [5.0] * 20, False),  # the median of the last 20 counts
        ({"fall": 1.0}, -3.1, [-2.0] * 5, True),
        ({"fall": 1.0}, -3.0, [-2.0] * 5, False),
        ({"fall": 1.0}, -3.1, [-2.0] * 4, False),
        ({"fall": 1.0}, -3.1, [-9.0, -2.0, -2.0, -2.0, -9.0, -9.0], False),  # best five: mean -4.8
        ({}, 1e9, [0.0] * 9, False),
    ],
)
def test_limits(limits: dict[str, Any], value: float, before: list[float], out: bool) -> None:
    reason = breach(WatchConfig(**limits), "kl", value, before)
    assert (reason is not None) is out
    if reason is not None:
        assert f"health.kl.{next(iter(limits))}=" in reason


def run(watchman: Watchman, name: str, values: list[float | None]) -> list[float | None]:
    """Feed values of a figure from step 1 on; return the steps in a row, None where all was well."""
    metric, seen = WATCHES[name].metrics[0], []
    for step, value in enumerate(values, start=1):
        seen.append(watchman.observe(step, {} if value is None else {metric: value}).get(f"health/{name}"))
    return seen


def test_a_watch_counts_steps_in_a_row_and_begins_anew_after_a_good_one() -> None:
    watchman = Watchman(HealthConfig(clip_fraction=WatchConfig(above=0.4, steps=2, action="stop")))
    assert run(watchman, "clip_fraction", [0.5, 0.1, 0.5]) == [1, None, 1] and watchman.stops == []
    watchman.observe(4, {"policy/clip_fraction": 0.6})
    assert len(watchman.stops) == 1
    assert watchman.stops[0].startswith("health.clip_fraction: policy/clip_fraction is 0.6, above health.clip_fraction")
    assert "for 2 step(s); lower the learning rate" in watchman.stops[0]


def test_a_figure_that_is_missing_or_not_a_number_is_not_out_of_bounds() -> None:
    assert run(Watchman(HealthConfig()), "clip_fraction", [None, float("nan"), 0.9, None, 0.9]) == [
        None, None, 1, None, 1,
    ]  # fmt: skip


def test_a_watch_follows_the_common_action_unless_it_has_its_own() -> None:
    row = {"step": 1, "policy/clip_fraction": 0.9, "policy/update_kl": 0.9}
    one = WatchConfig(above=0.4, steps=1)
    health = HealthConfig(action="stop", clip_fraction=one, update_kl=one.model_copy(update={"action": "warn"}))
    assert {fired.name: fired.action for fired in judge(health, row, [])[1]} == {
        "clip_fraction": "stop",
        "update_kl": "warn",
    }
    assert judge(HealthConfig(action="off"), row, []) == ({}, [])


def test_a_resumed_run_judges_as_if_it_had_never_stopped() -> None:
    health = HealthConfig(entropy=WatchConfig(below=0.1, steps=3, action="stop"))
    values: list[float | None] = [0.5, 0.4, 0.05, 0.05, 0.05]
    whole = Watchman(health)
    expected = run(whole, "entropy", values)
    first, second = Watchman(health), Watchman(health)
    run(first, "entropy", values[:4])
    second.remember(first._rows)
    assert second.observe(5, {"policy/entropy": 0.05}) == {"health/entropy": expected[-1]} == {"health/entropy": 3.0}
    assert second.stops == whole.stops != []


def row(step: int, *out: str) -> dict[str, Any]:
    return {"step": step} | {f"{PREFIX}{name}": 1.0 for name in out}


def test_a_checkpoint_is_good_once_the_step_after_it_was_well() -> None:
    rows = [row(1), row(2), row(3), row(4, "kl"), row(5)]
    assert last_good([1, 2, 3, 4, 5], rows) == 2  # 3 was measured in step 4; of 5 nothing is known yet
    assert last_good([3, 4], rows) is None
    assert last_good([2, 3], [row(1), row(2), row(3, "search_failures"), row(4, "non_finite")]) == 3


def test_the_good_checkpoint_is_protected_in_trouble_and_when_trouble_would_stop_the_run() -> None:
    watchman = Watchman(HealthConfig())
    run(watchman, "clip_fraction", [0.0, 0.0, 0.0])
    assert watchman.protected([1, 2]) is None
    run_on = watchman.observe(4, {"policy/clip_fraction": 0.9})
    assert run_on == {"health/clip_fraction": 1} and watchman.protected([1, 2, 3]) == 2
    careful = Watchman(HealthConfig(kl=WatchConfig(above=1.0, action="stop")))
    run(careful, "clip_fraction", [0.0, 0.0])
    assert careful.protected([1]) == 1


def test_steps_without_a_finite_gradient_are_counted_to_the_end() -> None:
    lost = {"policy/dropped_updates": 1.0}
    assert dropped_in_a_row([lost, {}, lost, {"critic/dropped_updates": 2.0}]) == 2
    watchman = Watchman(HealthConfig(max_dropped_steps=1))
    watchman.observe(1, lost)
    assert watchman.stops == []
    watchman.observe(2, lost)
    assert "2 steps in a row" in watchman.stops[0] and "health.max_dropped_steps=1" in watchman.stops[0]


def test_stretches_of_trouble_are_those_that_fired() -> None:
    streaks = [None, 1, 2, 3, 4, None, 1, 2, None, 3]
    rows = [{"step": n, "health/kl": streak} for n, streak in enumerate(streaks)]
    assert episodes_of_trouble(HealthConfig(), rows) == [
        {"watch": "kl", "first_step": 3, "last_step": 4},
        {"watch": "kl", "first_step": 9, "last_step": 9},
    ]
