"""Packed tensors of a micro-batch. Tensors begin here.

Only tokens that matter are carried: a sequence ends with the token that predicts its last scored token, and the
per-token columns exist for scored tokens alone, since a conversation is mostly prompt and retrieved text.

Axes: T packed tokens, M scored tokens (of all sequences, in order), n sequences.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from verl.types import Sample


@dataclass(frozen=True)
class Scored:
    """One sequence to be packed: its tokens and which of them are scored.

    Example: tokens (7, 8, 1, 2, 9, 3) with mask (0, 0, 1, 1, 0, 1) are fed as 7 8 1 2 9; positions 1, 2 and 4 predict
    the targets 1, 2 and 3.
    """

    token_ids: Sequence[int]
    """[L]"""
    mask: Sequence[bool]
    """[L] the first is false."""
    columns: Mapping[str, Sequence[float]]
    """Name -> [L] values, of which those at scored tokens are carried."""

    @property
    def cost(self) -> int:
        """Tokens fed to the model (at least 1)."""
        return max(1, _last_true(self.mask))


@dataclass(frozen=True)
class MicroBatch:
    """Several sequences in one row of T tokens."""

    token_ids: Tensor
    """[T] int64"""
    position_ids: Tensor
    """[T] int64, from 0 in every sequence."""
    lengths: tuple[int, ...]
    """[n] tokens per sequence; they sum to T."""
    predictors: Tensor
    """[M] int64 index into T of the position that predicts scored token m."""
    targets: Tensor
    """[M] int64 token id of scored token m."""
    counts: tuple[int, ...]
    """[n] scored tokens per sequence; they sum to M."""
    columns: Mapping[str, Tensor]
    """Name -> [M] float32."""
    total_tokens: float = 1.0
    """Scored tokens (SFT: their weight) of the whole mini-batch, over all ranks and micro-batches."""
    total_sequences: float = 1.0
    """Sequences of the whole mini-batch, over all ranks and micro-batches."""
    dummy: bool = False
    """True for a stand-in that keeps a rank in step; its losses are multiplied by 0."""

    @property
    def n_scored(self) -> int:
        """M, or 0 for a dummy."""
        return 0 if self.dummy else int(self.targets.shape[0])

    def to(self, device: torch.device) -> MicroBatch:
        """Move the tensors."""
        if self.token_ids.device == device:
            return self
        return replace(
            self,
            token_ids=self.token_ids.to(device, non_blocking=True),
            position_ids=self.position_ids.to(device, non_blocking=True),
            predictors=self.predictors.to(device, non_blocking=True),
            targets=self.targets.to(device, non_blocking=True),
            columns={name: column.to(device, non_blocking=True) for name, column in self.columns.items()},
        )


def scored(sample: Sample, names: Sequence[str] = ()) -> Scored:
    """View a training sample as a sequence to pack, with the named columns of it (each must be filled in)."""
    columns = {}
    for name in names:
        column = getattr(sample, name)
        if column is None:
            raise ValueError(f"sample {sample.sample_id}: {name} is not filled in yet")
        columns[name] = column
    return Scored(sample.token_ids, sample.loss_mask, columns)


def pack_batch(
    sequences: Sequence[Scored],
    names: Sequence[str] = (),
    total_tokens: float = 1.0,
    total_sequences: float = 1.0,
) -> MicroBatch:
    """Pack sequences in the given order; an empty list gives the dummy (two tokens, one scored, columns 0)."""
    if not sequences:
        dummy = Scored((0, 0), (False, True), dict.fromkeys(names, (0.0, 0.0)))
        return replace(pack_batch([dummy], names, total_tokens, total_sequences), dummy=True)
    tokens, positions, predictors, targets, lengths, counts = [], [], [], [], [], []
    columns: dict[str, list[np.ndarray]] = {name: [] for name in names}
    offset = 0
    for sequence in sequences:
        ids = np.asarray(sequence.token_ids, dtype=np.int64)
        where = np.flatnonzero(np.asarray(sequence.mask, dtype=bool))
        length = int(where[-1]) if len(where) else 1
        tokens.append(ids[:length])
        positions.append(np.arange(length, dtype=np.int64))
        predictors.append(where - 1 + offset)
        targets.append(ids[where])
        lengths.append(length)
        counts.append(len(where))
        for name in names:
            columns[name].append(np.asarray(sequence.columns[name], dtype=np.float32)[where])
        offset += length
    return MicroBatch(
        token_ids=torch.from_numpy(np.concatenate(tokens)),
        position_ids=torch.from_numpy(np.concatenate(positions)),
        lengths=tuple(lengths),
        predictors=torch.from_numpy(np.concatenate(predictors)),
        targets=torch.from_numpy(np.concatenate(targets)),
        counts=tuple(counts),
        columns={name: torch.from_numpy(np.concatenate(parts)) for name, parts in columns.items()},
        total_tokens=total_tokens,
        total_sequences=total_sequences,
    )


def unpack(sample_mask: Sequence[bool], values: np.ndarray) -> tuple[float, ...]:
    """Spread the values [m] of a sequence's scored tokens over its L tokens, 0.0 elsewhere."""
    mask = np.asarray(sample_mask, dtype=bool)
    spread = np.zeros(len(mask), dtype=np.float64)
    spread[mask] = values
    return tuple(spread.tolist())


def _last_true(mask: Sequence[bool]) -> int:
    """Return the index of the last true entry, 0 when there is none."""
    for index in range(len(mask) - 1, -1, -1):
        if mask[index]:
            return index
    return 0
