"""The driver's side of rollout: deals episodes to the workers, keeps their order, watches how many fail."""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Sequence
from typing import Any, Protocol

from verl.errors import EngineDeadError, EngineError, HealthError, ResourceError
from verl.types import Prompt, StopReason, Trajectory, WorkerGroup
from verl.workers.rollout.figures import engine_figures, episode_figures, kept_tokens
from verl.workers.rollout.work import RolloutWork, WorkerReport
from verl.workers.weight_sync import WeightManifest

logger = logging.getLogger(__name__)


class DealingGroup(WorkerGroup, Protocol):
    """A group whose single calls can be waited for in the order in which they end."""

    def wait_any(self, handles: Sequence[Any]) -> int:
        """Return the index of a handle that is finished."""
        ...


class Rollouts:
    """Runs the episodes of a step, or of an evaluation, on a group of rollout workers.

    A worker whose process or engine dies is left out from then on, and the episodes it had are run by the others; they
    have the same seeds there. The last one's death ends the run.
    """

    def __init__(self, group: DealingGroup, config: Any) -> None:
        self._group = group
        self._rollout = config.actor_rollout_ref.rollout
        self._live = list(range(group.size))
        self._lost = 0
        self._setup: Any = None
        self._published: WeightManifest | None = None
        self._figures: dict[str, float] = {}

    def begin_setup(self) -> None:
        """Start loading engines and tasks in all workers; ``setup`` waits for it."""
        self._setup = self._group.submit("setup")

    def setup(self) -> None:
        """Load engines and tasks in all workers; raises what stops them."""
        if self._setup is None:
            self.begin_setup()
        self._group.wait(self._setup)

    def publish(self, manifest: WeightManifest) -> None:
        """Bring published weights to every engine. Raises EngineError when they do not fit or break off."""
        self._published = manifest
        self._ask("load_weights", manifest)

    def sleep(self) -> None:
        """Let the engines leave their devices to training until the next ``publish``."""
        self._ask("sleep")

    def generate(
        self,
        prompts: Sequence[Prompt],
        step: int,
        n: int,
        *,
        temperature: float,
        top_p: float = 1.0,
        top_k: int = -1,
        mode: str = "policy",
    ) -> list[Trajectory]:
        """Run ``n`` episodes for each prompt and return them in (prompt, sample) order: [P * n].

        Raises HealthError when more than ``rollout.max_failure_rate`` of them failed, naming the most common cause;
        EngineError when no worker is left, or when one holds other weights than were published last.
        """
        work = [
            RolloutWork(prompt, step, sample, temperature, top_p, top_k, mode)
            for prompt in prompts
            for sample in range(n)
        ]
        self._check_weights()
        lost, started = self._lost, time.perf_counter()
        trajectories = self._deal(work)
        figures = episode_figures(trajectories, time.perf_counter() - started)
        reports: list[WorkerReport] = list(self._ask("stats").values())
        self._figures = figures | engine_figures(reports) | {"rollout/lost_workers": float(self._lost)}
        # What a dead worker had generated is not known, and fixed pipelines write turns of their own.
        if lost == self._lost and mode == "policy":
            made = self._figures["rollout/generated_tokens"]
            self._figures["rollout/discarded_tokens"] = made - kept_tokens(trajectories)
        self._check_health(trajectories, reports)
        self._check_rewards(trajectories)
        return trajectories

    def figures(self) -> dict[str, float]:
        """Return figures of the last ``generate``: the engines' under ``rollout/``, services' under ``service/``."""
        return dict(self._figures)

    def close(self) -> None:
        """End the workers."""
        self._group.close()

    def _deal(self, work: Sequence[RolloutWork]) -> list[Trajectory]:
        """Give every worker a chunk, and the next one as soon as it comes back: slow chunks hold nobody up.

        Chunks are cut in order whoever runs them, so that deterministic batches do not depend on timing.
        """
        size = self._rollout.chunk_size
        chunks = [work[start : start + size] for start in range(0, len(work), size)]
        results: dict[int, list[Trajectory]] = {}
        running: list[tuple[Any, int, int]] = []  # handle, rank, chunk
        free, upcoming = list(self._live), deque(range(len(chunks)))
        while len(results) < len(chunks):
            while free and upcoming:
                rank, chunk = free.pop(0), upcoming.popleft()
                running.append((self._group.submit_one(rank, "run", chunks[chunk]), rank, chunk))
            done = self._group.wait_any([handle for handle, _, _ in running])
            handle, rank, chunk = running.pop(done)
            try:
                (results[chunk],) = self._group.wait(handle)
            except (EngineDeadError, ResourceError) as error:
                self._lose(rank, error)
                upcoming.appendleft(chunk)
            else:
                free.append(rank)
        return [trajectory for chunk in range(len(chunks)) for trajectory in results[chunk]]

    def _ask(self, method: str, *args: Any) -> dict[int, Any]:
        """Call a method on every live worker and return the answers by rank; a worker that is dead is left out."""
        handles = {rank: self._group.submit_one(rank, method, *args) for rank in self._live}
        answers: dict[int, Any] = {}
        for rank, handle in handles.items():
            try:
                (answers[rank],) = self._group.wait(handle)
            except (EngineDeadError, ResourceError) as error:
                self._lose(rank, error)
        return answers

    def _lose(self, rank: int, error: Exception) -> None:
        """Go on without a worker; raises EngineError when it was the last."""
        self._live.remove(rank)
        self._lost += 1
        if not self._live:
            raise EngineError(f"no rollout worker is left; the last one, {rank}: {error}") from error
        logger.warning(
            "rollout worker %d is lost, its episodes are run by the others (%d left): %s", rank, len(self._live), error
        )

    def _check_weights(self) -> None:
        """Raise EngineError when an engine missed the last publish."""
        if self._published is None:
            return
        version, digest = self._published.version, self._published.digest
        for rank, held in self._ask("weights").items():
            if held.version != version or held.digest != digest:
                raise EngineError(
                    f"rollout worker {rank} holds weights version {held.version} (checksum {held.digest}), published "
                    f"was version {version} (checksum {digest}); start again, the run goes on from its last checkpoint"
                )

    def _check_health(self, trajectories: Sequence[Trajectory], reports: Sequence[WorkerReport]) -> None:
        failed = Counter(trajectory.stop for trajectory in trajectories if trajectory.stop.failed)
        if not failed:
            return
        reason, cause = _most_common_cause(failed, reports)
        summary = (
            f"{failed.total()} of {len(trajectories)} episodes failed ("
            + ", ".join(f"{count} {stop.value}" for stop, count in failed.most_common())
            + f"); most common cause ({reason.value}): {cause}"
        )
        if failed.total() > self._rollout.max_failure_rate * len(trajectories):
            raise HealthError(
                f"{summary}. The limit is actor_rollout_ref.rollout.max_failure_rate={self._rollout.max_failure_rate}"
            )
        logger.warning("%s", summary)

    def _check_rewards(self, trajectories: Sequence[Trajectory]) -> None:
        """The same limit for episodes whose reward could not be computed (a judge that does not answer)."""
        causes = Counter(t.reward.failure for t in trajectories if t.reward is not None and t.reward.failure)
        if not causes:
            return
        summary = (
            f"{causes.total()} of {len(trajectories)} episodes have no reward; "
            f"most common cause: {causes.most_common(1)[0][0]}"
        )
        if causes.total() > self._rollout.max_failure_rate * len(trajectories):
            raise HealthError(
                f"{summary}. The limit is actor_rollout_ref.rollout.max_failure_rate={self._rollout.max_failure_rate}"
            )
        logger.warning("%s", summary)


def _most_common_cause(failed: Counter[StopReason], reports: Sequence[WorkerReport]) -> tuple[StopReason, str]:
    reason = failed.most_common(1)[0][0]
    causes = sum((report.causes[reason] for report in reports if reason in report.causes), Counter[str]())
    return reason, causes.most_common(1)[0][0] if causes else "no cause given"
