"""The metrics table: reductions by hand, names, and its page in the manual."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from verl.metrics import METRICS, Reduction, StepMetrics, find, markdown_table


def test_each_reduction_gives_its_hand_computed_figure() -> None:
    figures = StepMetrics()
    figures.extend("policy/entropy", [1.0, 3.0])  # mean
    figures.extend("data/episodes", [2, 3])  # sum
    figures.extend("policy/rollout_gap/max", [0.25, 0.5, 0.125])  # max
    figures.extend("data/epoch", [4, 5])  # last
    figures.extend("reward/total", [0.0, 1.0, 1.0, 0.0])  # histogram
    assert figures.result() == {
        "policy/entropy": 2.0,
        "data/episodes": 5.0,
        "policy/rollout_gap/max": 0.5,
        "data/epoch": 5.0,
        "reward/total/mean": 0.5,
        "reward/total/std": 0.5,
        "reward/total/min": 0.0,
        "reward/total/max": 1.0,
    }


def test_a_name_without_values_is_left_out() -> None:
    figures = StepMetrics()
    figures.extend("reward/total", [])
    assert figures.result() == {}


def test_a_name_outside_the_table_is_refused_with_the_closest() -> None:
    with pytest.raises(KeyError, match="policy/entropy"):
        StepMetrics().add("polcy/entropy", 1.0)


def test_the_longest_pattern_and_the_statistics_of_histograms_are_found() -> None:
    for name, row in (
        ("reward/part/f1", "reward/part/*"),
        ("val/f1", "val/*"),
        ("reward/total/max", "reward/total"),
        ("advantage/dead_groups", "advantage/dead_groups"),
        ("policy/entropy", "policy/entropy"),
    ):
        found = find(name)
        assert found is not None and found.name == row
    assert find("reward/nothing") is None
    # A mean has no statistics of its own.
    assert find("policy/entropy/max") is not None and find("policy/entropy/max").name == "policy/*"  # type: ignore[union-attr]


def test_names_are_paths_and_appear_once() -> None:
    names = [row.name for row in METRICS]
    assert len(names) == len(set(names))
    for row in METRICS:
        assert 2 <= len(row.name.split("/")) <= 4 and row.name == row.name.lower() and row.meaning
        assert row.reduction in Reduction


def test_sums_do_not_lose_small_values() -> None:
    figures = StepMetrics()
    figures.extend("data/trained_tokens", [1e16, 1.0, -1e16])
    assert figures.result()["data/trained_tokens"] == 1.0
    assert math.isfinite(figures.result()["data/trained_tokens"])


def test_the_manual_shows_the_table(root: Path) -> None:
    page = (root / "docs" / "metrics.md").read_text(encoding="utf-8")
    assert markdown_table() in page, "run `python -m verl.metrics` and paste it into docs/metrics.md"
