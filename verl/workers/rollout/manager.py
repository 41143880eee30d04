"""The driver's side of rollout: deals episodes to the workers, keeps their order, watches how many fail."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from typing import Any, Protocol

from verl.errors import HealthError
from verl.types import Prompt, StopReason, Trajectory, WorkerGroup
from verl.workers.rollout.work import RolloutWork, WorkerReport

logger = logging.getLogger(__name__)


class DealingGroup(WorkerGroup, Protocol):
    """A group whose single calls can be waited for in the order in which they end."""

    def wait_any(self, handles: Sequence[Any]) -> int:
        """Return the index of a handle that is finished."""
        ...


class Rollouts:
    """Runs the episodes of a step, or of an evaluation, on a group of rollout workers."""

    def __init__(self, group: DealingGroup, config: Any) -> None:
        self._group = group
        self._rollout = config.actor_rollout_ref.rollout
        self._figures: dict[str, float] = {}

    def setup(self) -> None:
        """Load engines and tasks in all workers; raises what stops them."""
        self._group.wait(self._group.submit("setup"))

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
        ResourceError when a worker died.
        """
        work = [
            RolloutWork(prompt, step, sample, temperature, top_p, top_k, mode)
            for prompt in prompts
            for sample in range(n)
        ]
        trajectories = self._deal(work)
        reports: list[WorkerReport] = self._group.wait(self._group.submit("stats"))
        self._figures = _figures(reports)
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
        free = list(range(self._group.size))
        upcoming = iter(range(len(chunks)))
        while len(results) < len(chunks):
            while free and (chunk := next(upcoming, None)) is not None:
                rank = free.pop(0)
                running.append((self._group.submit_one(rank, "run", chunks[chunk]), rank, chunk))
            done = self._group.wait_any([handle for handle, _, _ in running])
            handle, rank, chunk = running.pop(done)
            (results[chunk],) = self._group.wait(handle)
            free.append(rank)
        return [trajectory for chunk in range(len(chunks)) for trajectory in results[chunk]]

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


def _figures(reports: Sequence[WorkerReport]) -> dict[str, float]:
    """Add up the workers' totals and derive the ratios that are worth reading."""
    totals: Counter[str] = Counter()
    services: Counter[str] = Counter()
    for report in reports:
        totals.update(report.figures)
        services.update(report.service)
    steps, tokens = max(1.0, totals["decode_steps"]), max(1.0, totals["generated_tokens"])
    context = max(1.0, totals["prefilled_tokens"] + totals["reused_tokens"])
    return {
        "rollout/generated_tokens": float(totals["generated_tokens"]),
        "rollout/prefilled_tokens": float(totals["prefilled_tokens"]),
        "rollout/reused_context": totals["reused_tokens"] / context,
        "rollout/batch_rows": totals["decode_rows"] / steps,
        "rollout/decode_s": float(totals["decode_s"]),
        "rollout/prefill_s": float(totals["prefill_s"]),
        "rollout/cut_mass": totals["cut_mass"] / tokens,
        **{f"service/{name}": float(value) for name, value in services.items()},
    }
