"""A rollout worker that keeps what its engine was given and gave back, beside what the episodes made of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from verl.types import Completion, EpisodeContext, Generate, Prompt, Sampling, Task, Trajectory
from verl.workers.rollout.worker import RolloutWorker


@dataclass(frozen=True, slots=True)
class Generation:
    """One call of the engine. Example: context (7, 8), completion ids (1, 2)."""

    context: tuple[int, ...]
    """[S] what the engine was asked to continue."""
    completion: Completion


class RecordingWorker(RolloutWorker):
    """A RolloutWorker whose task sees the engine through a recorder; works with every engine."""

    def setup(self) -> None:
        """As ``RolloutWorker.setup``; then put the recorder between engine and task."""
        super().setup()
        self._recorder = _RecordingTask(self._task)
        self._task = self._recorder

    def recordings(self) -> dict[str, tuple[Generation, ...]]:
        """Return trajectory id -> its generations in order, since the last call."""
        taken, self._recorder.generations = self._recorder.generations, {}
        return {name: tuple(generations) for name, generations in taken.items()}


class _RecordingTask:
    """Passes everything on to the real task; episodes get an engine that remembers."""

    def __init__(self, task: Task) -> None:
        self._inner = task
        self.generations: dict[str, list[Generation]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def episode(self, prompt: Prompt, generate: Generate, context: EpisodeContext) -> Trajectory:
        kept: list[Generation] = []
        trajectory = await self._inner.episode(prompt, _RecordingEngine(generate, kept), context)
        self.generations[trajectory.trajectory_id] = kept
        return trajectory


class _RecordingEngine:
    def __init__(self, generate: Generate, kept: list[Generation]) -> None:
        self._generate = generate
        self._kept = kept

    async def generate(self, token_ids: Sequence[int], sampling: Sampling) -> Completion:
        context = tuple(token_ids)
        completion = await self._generate.generate(token_ids, sampling)
        self._kept.append(Generation(context, completion))
        return completion
