"""Passes of a trainable model over a list of samples, the same for policy, reference and critic.

Every rank is handed the same full list and makes the same plan; each computes its share of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from verl.data.batch import MicroBatch, pack_batch, scored, unpack
from verl.data.packing import plan_micro_batches, split_evenly
from verl.types import Sample
from verl.workers import device as devices
from verl.workers.engine import Engine

Row = tuple[int, tuple[float, ...]]
"""(index into the samples, [L] values)"""


@dataclass(frozen=True)
class Limit:
    """How large a micro-batch may be: by tokens per rank, or by sequences over all ranks."""

    dynamic: bool
    tokens: int
    sequences: int

    def plan(self, samples: Sequence[Sample], engine: Engine) -> tuple[tuple[int, ...], ...]:
        """Return this rank's micro-batches as indices into ``samples``."""
        costs = [scored(sample).cost for sample in samples]
        ranks = engine.device.world_size
        if self.dynamic:
            plan = plan_micro_batches(costs, ranks, max_tokens=self.tokens)
        else:
            plan = plan_micro_batches(costs, ranks, max_sequences=max(1, self.sequences // ranks))
        return plan[engine.device.rank]


def score_rows(
    engine: Engine, samples: Sequence[Sample], limit: Limit, temperature: float = 1.0
) -> tuple[tuple[Row, ...], float]:
    """Score this rank's share without gradients.

    Returns its rows (log-probs or values, 0.0 where the mask is false) and the mean over all ranks' model tokens of the
    engine's second output (the entropy).
    """
    rows: list[Row] = []
    second_sum = 0.0
    for indices in limit.plan(samples, engine):
        batch = pack_batch([scored(samples[index]) for index in indices])
        first, second = engine.score(batch, temperature)
        if batch.dummy:
            continue
        second_sum += float(second.double().sum())
        pieces = first.split(batch.counts)
        rows += [
            (index, unpack(samples[index].loss_mask, piece.numpy()))
            for index, piece in zip(indices, pieces, strict=True)
        ]
    total = devices.sum_over_ranks(engine.device, [second_sum])[0]
    return tuple(rows), total / max(1, sum(sample.n_model_tokens for sample in samples))


Terms = Callable[[MicroBatch, Tensor, Tensor], tuple[Tensor, Tensor]]
"""(batch, first output [M], second output [M]) -> (loss, share of the loss's figures [K], no gradient)"""


@dataclass(frozen=True)
class UpdatePlan:
    """How a step's samples are walked through."""

    mini_batch: int
    """Trajectories per optimiser step, over all ranks; the step's mini-batches are of nearly equal size."""
    epochs: int
    limit: Limit
    columns: tuple[str, ...]
    """Sample columns that the loss reads."""
    temperature: float = 1.0


@dataclass(frozen=True)
class Trained:
    """What the optimiser steps of one trainer step were like; equal on every rank."""

    figures: list[float]
    """[K] of the loss, averaged over the optimiser steps that were made; empty when none was."""
    stepped: dict[str, float]
    """``grad_norm`` and ``lr``, averaged likewise, and ``dropped_updates`` when there were any."""
    dropped: tuple[str, ...]
    """Prompt ids of the mini-batches whose gradient was not finite."""

    def named(self, names: Sequence[str], area: str) -> dict[str, float]:
        """Return all figures as ``<area>/<name>``; ``names`` are those of ``figures``."""
        values = dict(zip(names, self.figures, strict=True)) if self.figures else {}
        return {f"{area}/{name}": value for name, value in (values | self.stepped).items()}


def train_pass(engine: Engine, samples: Sequence[Sample], plan: UpdatePlan, terms: Terms) -> Trained:
    """Make the optimiser steps of one trainer step, all at the same learning rate.

    A mini-batch whose gradient is not finite is left out as if it had not been there, its figures included.
    """
    engine.update += 1
    engine.train_mode()
    totals: Tensor | None = None
    norms: list[float] = []
    rates: list[float] = []
    dropped: list[Sequence[Sample]] = []
    for _ in range(plan.epochs):
        for part in split_evenly(len(samples), plan.mini_batch):
            mini_batch = samples[part.start : part.stop]
            figures = _mini_batch(engine, mini_batch, plan, terms)
            stepped = engine.step()
            if stepped is None:
                dropped.append(mini_batch)
                continue
            totals = figures if totals is None else totals + figures
            norms.append(stepped["grad_norm"])
            rates.append(stepped["lr"])
    prompts = tuple(dict.fromkeys(sample.prompt_id for mini_batch in dropped for sample in mini_batch))
    count = {"dropped_updates": float(len(dropped))} if dropped else {}
    if totals is None:
        return Trained([], count, prompts)
    summed = devices.sum_over_ranks(engine.device, totals.double().cpu().tolist())
    means = {"grad_norm": sum(norms) / len(norms), "lr": sum(rates) / len(rates)}
    return Trained([value / len(norms) for value in summed], means | count, prompts)


def _mini_batch(engine: Engine, samples: Sequence[Sample], plan: UpdatePlan, terms: Terms) -> Tensor:
    """Accumulate the gradient of one mini-batch; return this rank's share of its figures [K]."""
    total_tokens = float(sum(sample.n_model_tokens for sample in samples))
    figures: Tensor | None = None
    micros = plan.limit.plan(samples, engine)
    for number, indices in enumerate(micros):
        sequences = [scored(samples[index], plan.columns) for index in indices]
        batch = pack_batch(sequences, plan.columns, total_tokens, float(len(samples)))
        batch = batch.to(engine.device.torch_device)
        first, second = engine.forward(batch, plan.temperature)
        loss, share = terms(batch, first, second)
        if batch.dummy:
            # Ranks must backpropagate in step; the factor keeps the graph and removes the gradient.
            loss, share = loss * 0.0, torch.zeros_like(share)
        engine.backward(loss, last=number == len(micros) - 1)
        figures = share if figures is None else figures + share
    assert figures is not None
    return figures
