"""A discrete-event simulation of one step's rollout: engines with continuous batching, one retrieval service.

Every worker runs one chunk of episodes at a time and takes the next when the whole chunk is done, as the driver deals
them (``verl.workers.rollout.manager``). An engine alternates between reading new contexts, one reading for all that
wait, and decode steps for all rows; what arrives during a step joins at its end. The service answers in the order of
arrival: a query leaves it 1 / rate after the one before, and its answer takes a further latency.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from verl.trainer.plan.costs import EngineCosts
from verl.trainer.plan.lengths import Episode


@dataclass(frozen=True)
class Search:
    """The retrieval service as training sees it."""

    rate: float
    """Queries per second it can answer; infinity: at once."""
    latency_s: float
    """Seconds of an answer beyond its place in the queue."""


@dataclass(frozen=True)
class Rollout:
    """What the simulation saw."""

    seconds: float
    """Until the last episode ended."""
    ends: tuple[float, ...]
    """Seconds at which episodes ended, sorted."""
    search_s: float
    """Summed over episodes: seconds between a query and its answer."""
    steps: int
    """Decode steps of all engines."""
    row_steps: int
    """Tokens generated; over ``steps`` it is the mean batch."""

    @property
    def tail_s(self) -> float:
        """Seconds in which the last tenth of the episodes ended."""
        return self.seconds - self.ends[math.ceil(0.9 * len(self.ends)) - 1]


@dataclass
class _Row:
    """An episode on its way."""

    episode: Episode
    turn: int = 0
    context: int = 0
    unread: int = 0


@dataclass
class _Worker:
    """One engine."""

    waiting: deque[_Row] = field(default_factory=deque)
    """Rows whose contexts are to be read."""
    rows: list[tuple[int, int, _Row]] = field(default_factory=list)
    """Heap of (the tick at which the generation is complete, number, row)."""
    context: int = 0
    """Of all rows at ``tick``."""
    tick: int = 0
    open: int = 0
    """Episodes of the chunk that have not ended."""
    busy: bool = False
    burst: int = 0
    """Number of the plan for the burst under way: the end of another number is void."""
    planned: int = 0
    """Steps of that burst."""
    start: float = 0.0
    step_s: float = 0.0


def simulate(
    episodes: Sequence[Episode], workers: int, slots: int, chunk: int, costs: EngineCosts, search: Search
) -> Rollout:
    """Run ``episodes`` on ``workers`` engines of ``slots`` rows each, dealt in chunks of ``chunk``."""
    return _Simulation(episodes, workers, slots, chunk, costs, search).run()


class _Simulation:
    def __init__(
        self, episodes: Sequence[Episode], workers: int, slots: int, chunk: int, costs: EngineCosts, search: Search
    ) -> None:
        self.costs, self.slots, self.search = costs, slots, search
        self.chunks = deque([episodes[start : start + chunk] for start in range(0, len(episodes), chunk)])
        self.workers = [_Worker() for _ in range(workers)]
        self.numbers = itertools.count()
        self.events: list[tuple[float, int, Callable[[float], None]]] = []
        self.ends: list[float] = []
        self.service_free = self.search_s = 0.0
        self.steps = self.row_steps = 0

    def run(self) -> Rollout:
        for worker in self.workers:
            self._next_chunk(worker, 0.0)
        while self.events:
            now, _, happen = heapq.heappop(self.events)
            happen(now)
        return Rollout(max(self.ends), tuple(sorted(self.ends)), self.search_s, self.steps, self.row_steps)

    def _at(self, when: float, happen: Callable[[float], None]) -> None:
        heapq.heappush(self.events, (when, next(self.numbers), happen))

    def _next_chunk(self, worker: _Worker, now: float) -> None:
        if self.chunks:
            chunk = self.chunks.popleft()
            worker.open = len(chunk)
            worker.waiting.extend(_Row(episode, unread=episode.prompt) for episode in chunk)
            self._admit(worker, now)

    def _arrive(self, worker: _Worker, row: _Row, now: float) -> None:
        """An answer is there; a running burst ends with the step under way, so that its row can join."""
        worker.waiting.append(row)
        if not worker.busy:
            self._admit(worker, now)
        elif worker.step_s and len(worker.rows) < self.slots:
            steps = max(1, math.ceil((now - worker.start) / worker.step_s))
            if steps < worker.planned:
                self._plan_burst(worker, steps)

    def _admit(self, worker: _Worker, now: float) -> None:
        """Read the contexts that fit, or else decode."""
        taken = [worker.waiting.popleft() for _ in range(min(len(worker.waiting), self.slots - len(worker.rows)))]
        worker.busy = bool(taken or worker.rows)
        if not taken:
            if worker.rows:
                self._start_burst(worker, now)
            return
        seconds = self.costs.prefill(sum(row.unread for row in taken), len(taken))
        for row in taken:
            row.context += row.unread
            worker.context += row.context
            finish = worker.tick + row.episode.turns[row.turn].generated
            heapq.heappush(worker.rows, (finish, next(self.numbers), row))
        worker.step_s = 0.0
        self._at(now + seconds, lambda then: self._admit(worker, then))

    def _start_burst(self, worker: _Worker, now: float) -> None:
        """Decode until the first row finishes; every step takes what the middle one takes."""
        steps, rows = worker.rows[0][0] - worker.tick, len(worker.rows)
        worker.start = now
        worker.step_s = self.costs.decode(rows, worker.context + rows * steps / 2)
        self._plan_burst(worker, steps)

    def _plan_burst(self, worker: _Worker, steps: int) -> None:
        worker.planned = steps
        worker.burst += 1
        number = worker.burst

        def end(now: float) -> None:
            if number == worker.burst:  # else it was cut short
                self._decoded(worker, now, steps)

        self._at(worker.start + steps * worker.step_s, end)

    def _decoded(self, worker: _Worker, now: float, steps: int) -> None:
        rows = len(worker.rows)
        worker.tick += steps
        worker.context += rows * steps
        self.steps += steps
        self.row_steps += rows * steps
        while worker.rows and worker.rows[0][0] <= worker.tick:
            self._finish(worker, heapq.heappop(worker.rows)[2], now)
        if worker.open:
            self._admit(worker, now)
        else:
            worker.busy = False
            self._next_chunk(worker, now)

    def _finish(self, worker: _Worker, row: _Row, now: float) -> None:
        """A generation is complete: search, go on with other text, or end."""
        turn = row.episode.turns[row.turn]
        row.context += turn.generated
        worker.context -= row.context
        row.turn += 1
        if row.turn == len(row.episode.turns):
            worker.open -= 1
            self.ends.append(now)
            return
        row.unread = turn.observed
        if not turn.searched:
            worker.waiting.append(row)
            return
        self.service_free = max(now, self.service_free) + 1 / self.search.rate
        answered = self.service_free + self.search.latency_s
        self.search_s += answered - now
        self._at(answered, lambda then: self._arrive(worker, row, then))
