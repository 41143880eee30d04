"""The rollout worker: runs episodes as asyncio tasks beside an engine, so that searches overlap with generation."""

from __future__ import annotations

import asyncio
import logging
import os
from collections import Counter
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from typing import Any

from transformers.utils import logging as transformers_logging

from verl.errors import EngineError, RetrievalError
from verl.registry import import_object
from verl.types import (
    Completion,
    EpisodeContext,
    Sampling,
    StopReason,
    Task,
    Trajectory,
    episode_seed,
)
from verl.workers.device import Device, setup_device
from verl.workers.rollout.engines import ENGINES, Engine, EpisodeSession
from verl.workers.rollout.load import Load
from verl.workers.rollout.state import HeldWeights
from verl.workers.rollout.work import RolloutWork, WorkerReport, failed_trajectory
from verl.workers.weight_sync import WeightManifest

logger = logging.getLogger(__name__)

_GRACE_S = 30.0
"""An episode ends itself at its deadline; this much later the worker does it."""


class RolloutWorker:
    """One engine, one task, one event loop. Lives in a worker process or, on the local cluster, in the driver."""

    def __init__(self, config: Any) -> None:
        """``config`` is the validated RunConfig. Nothing heavy happens before ``setup``."""
        self._config = config
        self._rollout = config.actor_rollout_ref.rollout
        self._runner = asyncio.Runner()
        self._causes: dict[StopReason, Counter[str]] = {}
        self._engine_growth, self._service_growth = _Growth(), _Growth()
        self._load = Load()
        self._engine: Engine
        self._task: Task

    def setup(self) -> None:
        """Load the engine and the task and open the task's connections.

        Raises ModelError, ConfigError, or RetrievalError when the task's services are not there.
        """
        transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        self._engine = ENGINES[self._rollout.name](self._config, self._device())
        task = import_object(self._config.task, "task")
        self._task = task.from_config(self._config, self._engine.tokenizer)
        self._runner.run(self._task.start())

    def load_weights(self, manifest: WeightManifest) -> None:
        """Take over published weights. Raises EngineError when they do not fit or break off."""
        self._runner.run(self._engine.take_over(manifest))

    def weights(self) -> HeldWeights:
        """Return which weights the engine holds."""
        return self._engine.weights

    def sleep(self) -> None:
        """Leave the device to training until the next ``load_weights``, where engine and device support it."""
        self._runner.run(self._engine.sleep())

    def run(self, work: Sequence[RolloutWork]) -> list[Trajectory]:
        """Run the episodes and return their trajectories in the order of ``work``.

        At most ``rollout.max_num_seqs`` run at a time. Failures that an episode can meet become its stop reason;
        anything else is a fault of the program and is raised. EngineDeadError: another worker has to run the episodes.
        """
        if self._rollout.deterministic:
            # What is kept from other chunks would change which tokens are computed together.
            self._engine.reset_cache()
        with self._load.running():
            trajectories = self._runner.run(self._run(work))
        if any(trajectory.stop is StopReason.ENGINE_FAILED for trajectory in trajectories):
            self._runner.run(self._engine.check_alive())
        return trajectories

    def stats(self) -> WorkerReport:
        """Return failures and the figures of engine and task since the last call."""
        causes, self._causes = self._causes, {}
        figures = self._engine_growth.since_last({**self._engine.totals(), **self._load.totals()})
        return WorkerReport(causes, figures, self._service_growth.since_last(self._task.totals()))

    def close(self) -> None:
        """Close connections, engine and event loop."""
        if hasattr(self, "_task"):
            self._runner.run(self._task.close())
        if hasattr(self, "_engine"):
            self._engine.close()
        self._runner.close()

    # -----------------------------------------------------------------------------------------------------------

    def _device(self) -> Device:
        # Rollout workers are independent of each other: they form no process group.
        world_size = os.environ.pop("WORLD_SIZE", None)
        try:
            return setup_device(self._config.cluster.threads_per_worker)
        finally:
            if world_size is not None:
                os.environ["WORLD_SIZE"] = world_size

    async def _run(self, work: Sequence[RolloutWork]) -> list[Trajectory]:
        size = min(self._rollout.max_num_seqs, self._engine.max_num_seqs)
        if not self._rollout.deterministic:
            room = asyncio.Semaphore(size)

            async def limited(order: int, item: RolloutWork) -> Trajectory:
                async with room:
                    return await self._episode(item, self._engine.session(order))

            return await _all(limited(order, item) for order, item in enumerate(work))
        finished: list[Trajectory] = []
        for start in range(0, len(work), size):
            part = work[start : start + size]
            # All sessions are open before the first episode begins: batches wait for every open session.
            sessions = [self._engine.session(start + i) for i in range(len(part))]
            pairs = zip(part, sessions, strict=True)
            try:
                finished += await _all(self._episode(item, session) for item, session in pairs)
            finally:
                for session in sessions:
                    session.close()
        return finished

    async def _episode(self, work: RolloutWork, session: EpisodeSession) -> Trajectory:
        """Run one episode; whatever happens its session is closed, since others may wait for it."""
        generate = _Listening(session, self._load)
        deadline = None if self._rollout.deterministic else self._rollout.episode_timeout_s
        context = EpisodeContext(
            sample_index=work.sample_index,
            seed=episode_seed(self._config.trainer.seed, work.step, work.prompt.prompt_id, work.sample_index),
            temperature=work.temperature,
            top_p=work.top_p,
            top_k=work.top_k,
            mode=work.mode,
            deadline_s=deadline,
        )
        cause: str | None = None
        try:
            async with asyncio.timeout(None if deadline is None else deadline + _GRACE_S):
                trajectory = await self._task.episode(work.prompt, generate, context)
        except TimeoutError:
            trajectory = failed_trajectory(work, StopReason.ABORTED)
        except EngineError as error:
            trajectory, cause = failed_trajectory(work, StopReason.ENGINE_FAILED), str(error)
        except RetrievalError as error:
            trajectory, cause = failed_trajectory(work, StopReason.SEARCH_FAILED), str(error)
        finally:
            session.close()
        if trajectory.stop.failed:
            self._count_failure(trajectory, cause or generate.error)
        return trajectory

    def _count_failure(self, trajectory: Trajectory, cause: str | None) -> None:
        if cause is None and trajectory.stop is StopReason.SEARCH_FAILED:
            cause = next((call.error for call in reversed(trajectory.searches) if call.error), None)
        if cause is None and trajectory.stop is StopReason.ABORTED:
            cause = f"not finished within actor_rollout_ref.rollout.episode_timeout_s={self._rollout.episode_timeout_s}"
        self._causes.setdefault(trajectory.stop, Counter())[cause or "no cause given"] += 1


class _Growth:
    """How much running totals have grown since they were looked at last."""

    def __init__(self) -> None:
        self._seen: dict[str, float] = {}

    def since_last(self, totals: Mapping[str, float]) -> dict[str, float]:
        growth = {name: value - self._seen.get(name, 0.0) for name, value in totals.items()}
        self._seen = dict(totals)
        return growth


class _Listening:
    """Passes generations on, counts them, and remembers why one failed: the episode makes a stop reason of it."""

    def __init__(self, session: EpisodeSession, load: Load) -> None:
        self._session = session
        self._load = load
        self.error: str | None = None

    async def generate(self, token_ids: Sequence[int], sampling: Sampling) -> Completion:
        try:
            with self._load.generating():
                return await self._session.generate(token_ids, sampling)
        except EngineError as error:
            self.error = str(error)
            raise


async def _all(episodes: Iterable[Coroutine[Any, Any, Trajectory]]) -> list[Trajectory]:
    """Run coroutines together; when one raises, end the others before the exception goes on (with its own type)."""
    tasks = [asyncio.ensure_future(episode) for episode in episodes]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
