"""Plans cover everything exactly once, within their limits, in step on every rank."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.data.packing import balance, pack, plan_micro_batches, split_evenly

LENGTHS = st.lists(st.integers(1, 60), min_size=0, max_size=40)


@settings(max_examples=150, deadline=None)
@given(lengths=LENGTHS, ranks=st.integers(1, 5), tokens=st.integers(1, 120))
def test_plan_by_tokens(lengths: list[int], ranks: int, tokens: int) -> None:
    plan = plan_micro_batches(lengths, ranks, max_tokens=tokens)
    assert len(plan) == ranks
    assert len({len(micros) for micros in plan}) == 1, "every rank runs the same number of micro-batches"
    assert sorted(i for micros in plan for micro in micros for i in micro) == list(range(len(lengths)))
    for micros in plan:
        for micro in micros:
            assert len(micro) <= 1 or sum(lengths[i] for i in micro) <= tokens


@settings(max_examples=80, deadline=None)
@given(lengths=LENGTHS, ranks=st.integers(1, 5), size=st.integers(1, 9))
def test_plan_by_sequences(lengths: list[int], ranks: int, size: int) -> None:
    plan = plan_micro_batches(lengths, ranks, max_sequences=size)
    assert sorted(i for micros in plan for micro in micros for i in micro) == list(range(len(lengths)))
    assert len({len(micros) for micros in plan}) == 1
    assert all(len(micro) <= size for micros in plan for micro in micros)


@settings(max_examples=80, deadline=None)
@given(lengths=st.lists(st.integers(1, 60), min_size=1, max_size=40), ranks=st.integers(1, 4))
def test_ranks_are_balanced_within_the_longest_sequence(lengths: list[int], ranks: int) -> None:
    loads = [sum(lengths[i] for i in rank) for rank in balance(lengths, ranks)]
    assert max(loads) - min(loads) <= max(lengths)


def test_next_fit_decreasing_by_hand() -> None:
    assert pack([3, 9, 5, 2, 2], range(5), max_tokens=8) == [(1,), (2, 0), (3, 4)]


@pytest.mark.parametrize(
    ("count", "size", "sizes"),
    [(64, 32, [32, 32]), (62, 32, [31, 31]), (65, 32, [21, 22, 22]), (5, 8, [5]), (0, 4, [])],
)
def test_mini_batches_are_of_nearly_equal_size(count: int, size: int, sizes: list[int]) -> None:
    parts = split_evenly(count, size)
    assert [len(part) for part in parts] == sizes
    assert [i for part in parts for i in part] == list(range(count))


def test_exactly_one_limit() -> None:
    with pytest.raises(ValueError, match="not both"):
        plan_micro_batches([1], 1, max_tokens=1, max_sequences=1)
