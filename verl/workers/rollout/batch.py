"""The rows that are being decoded: admission, one step for all of them, departure. Runs on the engine's model thread."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from verl.types import Completion, Sampling
from verl.workers.rollout.sampling import SamplingBatch, sample, uniforms
from verl.workers.rollout.slots import SlotModel
from verl.workers.rollout.stopping import StopRule

if TYPE_CHECKING:
    from verl.workers.rollout.hf import EngineStats, Session

_PREFILL_TOKENS = 8192
"""Padded tokens read in one forward pass at most: bounds the memory of activations."""
_KEPT_BYTES = 2**31
"""Keys and values kept for sessions between turns, all together; beyond it a turn reads its context again."""


@dataclass(eq=False)
class Request:
    """One generation that waits or runs."""

    session: Session
    context: list[int]
    sampling: Sampling
    limit: int
    """New tokens at most: what was asked for and fits the model."""
    policy_version: int
    future: asyncio.Future[Completion]
    generated: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    uniforms: np.ndarray = field(init=False)
    """[limit] one number per token to sample."""

    def __post_init__(self) -> None:
        self.uniforms = uniforms(self.sampling.seed, len(self.context), self.limit)

    @property
    def cached_length(self) -> int:
        """Tokens whose keys and values are in the slot: all but the newest generated one."""
        return len(self.context) + max(0, len(self.generated) - 1)


Finished = list[tuple[Request, Completion]]


class Batch:
    """The active rows; row i owns slot i of the model's buffer."""

    def __init__(self, model: SlotModel, stop: StopRule, stats: EngineStats) -> None:
        self._model, self._stop, self._stats = model, stop, stats
        self.rows: list[Request] = []
        self._sampling: SamplingBatch | None = None
        self._tokens = torch.empty(0, dtype=torch.int64, device=model.device)
        self._kept_bytes = 0

    # -- admission ----------------------------------------------------------------------------------------------

    def add(self, requests: list[Request]) -> Finished:
        """Read the contexts of ``requests`` into new slots and sample each one's first token.

        Contexts that are equal are read once (the samples of a group share their prompt); a session's kept keys and
        values are put back and only the rest is read. Returns the requests that are finished already.
        """
        first = len(self.rows)
        unique, copies = _split_duplicates(requests)
        ordered = sorted(unique, key=lambda r: (r.session.states is not None, len(r.context) - len(r.session.tokens)))
        slot_of = {id(request): first + i for i, request in enumerate(ordered)}
        logits: list[Tensor] = []
        for group in _prefill_groups(ordered):
            logits.append(self._prefill(slot_of[id(group[0])], group))
        for copy, original in copies:
            slot_of[id(copy)] = first + len(ordered)
            self._model.cache.reserve_rows(first + len(ordered) + 1)
            self._model.cache.copy_row(slot_of[id(original)], first + len(ordered), len(copy.context))
            self._stats.reused_tokens += len(copy.context)
            ordered.append(copy)
        every = torch.cat(logits)
        rows = [slot_of[id(original)] - first for _, original in copies]
        if rows:
            every = torch.cat([every, every[rows]])
        self.rows.extend(ordered)
        return self._sample(every, first)

    def _prefill(self, first: int, group: Sequence[Request]) -> Tensor:
        """Read one group of contexts into slots ``first ..``; return the logits after each: [n, V]."""
        starts, suffixes = [], []
        for offset, request in enumerate(group):
            session = request.session
            if session.states is not None:
                self._model.cache.reserve_rows(first + len(group), session.states.shape[3])
                self._model.cache.put(first + offset, session.states)
            starts.append(len(session.tokens))
            suffixes.append(request.context[len(session.tokens) :])
            self._forget(session)
        self._stats.prefilled_tokens += sum(map(len, suffixes))
        self._stats.reused_tokens += sum(starts)
        return self._model.prefill(first, suffixes, starts)

    # -- decoding -----------------------------------------------------------------------------------------------

    def step(self) -> Finished:
        """Decode one token for every row; return the requests that finished with it."""
        positions = [request.cached_length for request in self.rows]
        where = torch.tensor(positions, device=self._model.device)
        logits = self._model.decode(self._tokens, where, max(positions))
        self._stats.decode_steps += 1
        self._stats.decode_rows += len(self.rows)
        return self._sample(logits, 0)

    def _sample(self, logits: Tensor, first: int) -> Finished:
        """Sample a token for the rows ``first ..`` from their logits and let the finished ones go."""
        rows = self.rows[first:]
        if first > 0 or self._sampling is None:
            parameters = SamplingBatch.build([r.sampling for r in rows], logits.shape[1], self._model.device)
            self._sampling = parameters if first == 0 else None
        else:
            parameters = self._sampling
        numbers = np.fromiter((r.uniforms[len(r.generated)] for r in rows), np.float64, len(rows))
        tokens, logprobs, cut = sample(logits, parameters, torch.from_numpy(numbers).to(logits.device))
        self._tokens = torch.cat([self._tokens[:first], tokens])
        self._stats.cut_mass += cut
        self._stats.generated_tokens += len(rows)
        done: list[tuple[int, str]] = []
        for i, (row, token, logprob) in enumerate(zip(rows, tokens.tolist(), logprobs.tolist(), strict=True), first):
            row.generated.append(token)
            row.logprobs.append(logprob)
            if row.session.on_token is not None:
                row.session.on_token(token)
            reason = self._stop.finish(row.generated, row.sampling)
            if reason is None and len(row.generated) >= row.limit:
                reason = "length"
            if reason is not None:
                done.append((i, reason))
        return self._release(done)

    # -- departure ----------------------------------------------------------------------------------------------

    def _release(self, done: list[tuple[int, str]]) -> Finished:
        """Take finished rows out, keeping their keys and values for the session's next turn."""
        finished: Finished = []
        for index, reason in done:
            row = self.rows[index]
            if reason != "length":
                self._keep(row, index)
            finished.append(
                (row, Completion(tuple(row.generated), tuple(row.logprobs), reason, row.policy_version))
            )
        self._remove([index for index, _ in done])
        return finished

    def _remove(self, indices: Sequence[int]) -> None:
        """Close the gaps in the slots: each freed slot takes over the last row."""
        for index in sorted(indices, reverse=True):
            last = len(self.rows) - 1
            if index != last:
                self._model.cache.copy_row(last, index, self.rows[last].cached_length)
                self.rows[index] = self.rows[last]
                self._tokens[index] = self._tokens[last]
            self.rows.pop()
        if indices:
            self._tokens = self._tokens[: len(self.rows)]
            self._sampling = None

    def _keep(self, row: Request, slot: int) -> None:
        """Copy a row's keys and values out for the next turn of its session, if there is a next turn and room."""
        length = row.cached_length
        size = self._model.cache.row_bytes(length)
        if row.session.closed or self._kept_bytes + size > _KEPT_BYTES:
            return
        row.session.tokens = (row.context + row.generated)[:length]
        row.session.states = self._model.cache.take(slot, length)
        self._kept_bytes += size

    def _forget(self, session: Session) -> None:
        session.forget()

    def drop_cancelled(self) -> None:
        """Take out the rows whose caller has gone."""
        self._remove([i for i, row in enumerate(self.rows) if row.future.done()])

    def clear(self) -> list[Request]:
        """Take out all rows and forget every slot; return the rows."""
        rows, self.rows = self.rows, []
        self._tokens, self._sampling = self._tokens[:0], None
        self._model.clear()
        return rows


def _split_duplicates(requests: Sequence[Request]) -> tuple[list[Request], list[tuple[Request, Request]]]:
    """Return the requests to read, and (copy, original) for those whose equal context is read already."""
    seen: dict[tuple[int, ...], Request] = {}
    unique, copies = [], []
    for request in requests:
        session = request.session
        if request.context[: len(session.tokens)] != session.tokens or len(request.context) <= len(session.tokens):
            session.forget()
        if session.states is not None:
            unique.append(request)
            continue
        key = tuple(request.context)
        if key in seen:
            copies.append((request, seen[key]))
        else:
            seen[key] = request
            unique.append(request)
    return unique, copies


def _prefill_groups(requests: Sequence[Request]) -> Iterator[list[Request]]:
    """Cut requests, sorted by length, into groups that share a forward pass with little padding."""
    group: list[Request] = []
    for request in requests:
        new = len(request.context) - len(request.session.tokens)
        if group:
            head = group[0]
            shortest = len(head.context) - len(head.session.tokens)
            mixed = (head.session.states is None) != (request.session.states is None)
            if mixed or new * (len(group) + 1) > _PREFILL_TOKENS or new > 64 + 3 * shortest // 2:
                yield group
                group = []
        group.append(request)
    if group:
        yield group
