"""The rows that are being decoded: admission, one step for all, departure. Runs on the engine's model thread."""

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
    from verl.workers.rollout.hf import HfStats, Session

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


class KeptStates:
    """Keys and values of sessions between their turns, within a memory budget."""

    def __init__(self, budget: int) -> None:
        self._budget = budget
        self._entries: dict[Session, tuple[list[int], Tensor]] = {}

    def put(self, session: Session, tokens: list[int], states: Tensor) -> None:
        """Keep ``states`` [layers, 2, H, len(tokens), D]; beyond the budget the turn will be read again."""
        self._entries.pop(session, None)
        if sum(kept.nbytes for _, kept in self._entries.values()) + states.nbytes <= self._budget:
            self._entries[session] = (tokens, states)

    def prefix(self, session: Session) -> int:
        """Return how many tokens are kept for the session."""
        return len(self._entries[session][0]) if session in self._entries else 0

    def match(self, session: Session, context: list[int]) -> None:
        """Drop the session's entry unless it is a proper prefix of ``context``."""
        length = self.prefix(session)
        if length and (length >= len(context) or context[:length] != self._entries[session][0]):
            del self._entries[session]

    def pop(self, session: Session) -> Tensor | None:
        """Take the session's states out."""
        entry = self._entries.pop(session, None)
        return None if entry is None else entry[1]

    def retain(self, sessions: set[Session]) -> None:
        """Drop the entries of all other sessions."""
        for session in [kept for kept in self._entries if kept not in sessions]:
            del self._entries[session]

    def clear(self) -> None:
        """Drop everything."""
        self._entries.clear()


class Batch:
    """The active rows; row i owns slot i of the model's buffer."""

    def __init__(self, model: SlotModel, stop: StopRule, stats: HfStats) -> None:
        self._model, self._stop, self._stats = model, stop, stats
        self.rows: list[Request] = []
        self._sampling: SamplingBatch | None = None
        self._tokens = torch.empty(0, dtype=torch.int64, device=model.device)
        self.kept = KeptStates(_KEPT_BYTES)

    # -- admission ----------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def add(self, requests: list[Request]) -> Finished:
        """Read the contexts of ``requests`` into new slots and sample each one's first token.

        Contexts that are equal are read once (the samples of a group share their prompt); a session's kept keys and
        values are put back and only the rest is read. Returns the requests that are finished already.
        """
        first = len(self.rows)
        unique, copies = self._split_duplicates(requests)
        unique.sort(key=lambda request: (self.kept.prefix(request.session) > 0, self._unread(request)))
        slot_of = {request: first + i for i, request in enumerate(unique)}
        logits = [self._prefill(slot_of[group[0]], group) for group in self._prefill_groups(unique)]
        for slot, (copy, original) in enumerate(copies, first + len(unique)):
            self._model.cache.reserve(slot + 1, len(copy.context))
            self._model.cache.copy_row(slot_of[original], slot, len(copy.context))
            self._stats.reused_tokens += len(copy.context)
        read = torch.cat(logits)
        source = [*range(len(unique)), *(slot_of[original] - first for _, original in copies)]
        self.rows.extend([*unique, *(copy for copy, _ in copies)])
        return self._sample(read[source] if copies else read, first)

    def _unread(self, request: Request) -> int:
        """Return the number of context tokens whose keys and values are not kept."""
        return len(request.context) - self.kept.prefix(request.session)

    def _split_duplicates(self, requests: Sequence[Request]) -> tuple[list[Request], list[tuple[Request, Request]]]:
        """Return the requests to read, and (copy, original) for those whose equal context is read already."""
        seen: dict[tuple[int, ...], Request] = {}
        unique, copies = [], []
        for request in requests:
            self.kept.match(request.session, request.context)
            key = tuple(request.context)
            if self.kept.prefix(request.session) or key not in seen:
                unique.append(request)
                if not self.kept.prefix(request.session):
                    seen[key] = request
            else:
                copies.append((request, seen[key]))
        return unique, copies

    def _prefill_groups(self, requests: Sequence[Request]) -> Iterator[list[Request]]:
        """Cut requests, sorted as in ``add``, into groups that share a forward pass with little padding."""
        group: list[Request] = []
        for request in requests:
            if group:
                unread, shortest = self._unread(request), self._unread(group[0])
                mixed = (self.kept.prefix(request.session) > 0) != (self.kept.prefix(group[0].session) > 0)
                if mixed or unread * (len(group) + 1) > _PREFILL_TOKENS or unread > 64 + 3 * shortest // 2:
                    yield group
                    group = []
            group.append(request)
        yield group

    def _prefill(self, first: int, group: Sequence[Request]) -> Tensor:
        """Read one group of contexts into slots ``first ..``; return the logits after each: [n, V]."""
        starts = [self.kept.prefix(request.session) for request in group]
        suffixes = [request.context[start:] for request, start in zip(group, starts, strict=True)]
        self._model.cache.reserve(first + len(group), max(len(request.context) for request in group))
        for slot, request in enumerate(group, first):
            states = self.kept.pop(request.session)
            if states is not None:
                self._model.cache.put(slot, states)
        self._stats.prefilled_tokens += sum(map(len, suffixes))
        self._stats.reused_tokens += sum(starts)
        return self._model.prefill(first, suffixes, starts)

    # -- decoding -----------------------------------------------------------------------------------------------

    @torch.inference_mode()
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
            self._keep(row, index)
            finished.append((row, Completion(tuple(row.generated), tuple(row.logprobs), reason, row.policy_version)))
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
        """Copy a row's keys and values out for the next turn of its session."""
        length = row.cached_length
        self.kept.put(row.session, (row.context + row.generated)[:length], self._model.cache.take(slot, length))

    @torch.inference_mode()
    def drop_cancelled(self) -> None:
        """Take out the rows whose caller has gone."""
        self._remove([i for i, row in enumerate(self.rows) if row.future.done()])

    def clear(self) -> list[Request]:
        """Take out all rows and forget every slot; return the rows."""
        rows, self.rows = self.rows, []
        self._tokens, self._sampling = self._tokens[:0], None
        self.kept.clear()
        self._model.clear()
        return rows
