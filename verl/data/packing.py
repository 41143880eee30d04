"""Which sequence is computed where: ranks, micro-batches, mini-batches. Pure functions over lengths.

A plan is ``plan[rank][micro] = (sample index, ...)``. Every rank has the same number of micro-batches, because sharded
training runs its collectives in step; an empty micro-batch stands for a dummy. Nothing that is computed depends on the
plan, only where and when: losses are divided by counts of the whole mini-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

Plan = tuple[tuple[tuple[int, ...], ...], ...]
"""[rank][micro-batch][sequence] index into the lengths the plan was made from."""


def split_evenly(count: int, size: int) -> list[range]:
    """Cut ``range(count)`` into consecutive mini-batches of at most ``size``, whose sizes differ by at most one.

    A step that lost a few trajectories so never ends with a tiny mini-batch whose gradient is mostly noise.
    """
    if size < 1:
        raise ValueError(f"mini-batch size must be positive, got {size}")
    parts = -(-count // size)
    bounds = [count * part // parts for part in range(parts + 1)] if parts else [0]
    return [range(start, end) for start, end in pairwise(bounds)]


def balance(lengths: Sequence[int], n_ranks: int) -> list[list[int]]:
    """Deal sequences to ranks, longest first, each to the rank with the fewest tokens so far (ties: fewest sequences,
    then lowest rank). Returns the indices per rank in the order dealt."""
    ranks: list[list[int]] = [[] for _ in range(n_ranks)]
    loads = [0] * n_ranks
    for index in _longest_first(lengths):
        rank = min(range(n_ranks), key=lambda r: (loads[r], len(ranks[r]), r))
        ranks[rank].append(index)
        loads[rank] += lengths[index]
    return ranks


def pack(lengths: Sequence[int], indices: Sequence[int], max_tokens: int) -> list[tuple[int, ...]]:
    """Fill bins of at most ``max_tokens`` by next-fit-decreasing; a longer sequence gets a bin of its own."""
    bins: list[tuple[int, ...]] = []
    current: list[int] = []
    used = 0
    for index in sorted(indices, key=lambda i: (-lengths[i], i)):
        if current and used + lengths[index] > max_tokens:
            bins.append(tuple(current))
            current, used = [], 0
        current.append(index)
        used += lengths[index]
    if current:
        bins.append(tuple(current))
    return bins


def plan_micro_batches(
    lengths: Sequence[int], n_ranks: int, max_tokens: int | None = None, max_sequences: int | None = None
) -> Plan:
    """Return the plan for one mini-batch, filled by tokens or by sequences (exactly one limit is given, per rank)."""
    if (max_tokens is None) == (max_sequences is None):
        raise ValueError("give max_tokens or max_sequences, not both")
    per_rank: list[list[tuple[int, ...]]] = []
    for indices in balance(lengths, n_ranks):
        if max_tokens is not None:
            per_rank.append(pack(lengths, indices, max_tokens))
        else:
            assert max_sequences is not None
            per_rank.append([tuple(indices[i : i + max_sequences]) for i in range(0, len(indices), max_sequences)])
    depth = max((len(bins) for bins in per_rank), default=0)
    return tuple(tuple(bins) + ((),) * (depth - len(bins)) for bins in per_rank)


def _longest_first(lengths: Sequence[int]) -> list[int]:
    return sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
