"""The figures of one rollout phase: what its engines did, how its episodes went in time."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from verl.types import Trajectory
from verl.workers.rollout.work import WorkerReport


def engine_figures(reports: Sequence[WorkerReport]) -> dict[str, float]:
    """Add up what the workers report and derive the ratios that are worth reading: ``rollout/`` and ``service/``.

    Figures that only some engines can tell are left out for the others.
    """
    totals: Counter[str] = Counter()
    services: Counter[str] = Counter()
    for report in reports:
        totals.update(report.figures)
        services.update(report.service)
    steps, tokens = max(1.0, totals["decode_steps"]), max(1.0, totals["generated_tokens"])
    context = max(1.0, totals["prefilled_tokens"] + totals["reused_tokens"])
    running = totals["run_s"] or 1.0
    figures = {
        "rollout/generated_tokens": float(totals["generated_tokens"]),
        "rollout/prefilled_tokens": float(totals["prefilled_tokens"]),
        "rollout/reused_context": totals["reused_tokens"] / context,
        "rollout/batch_rows": totals["decode_rows"] / steps,
        "rollout/engine_busy": totals["busy_s"] / running,
        "rollout/in_flight": totals["in_flight_s"] / running,
        **{f"service/{name}": float(value) for name, value in services.items()},
    }
    figures |= {f"rollout/{name}": float(totals[name]) for name in ("decode_s", "prefill_s") if name in totals}
    if "cut_mass" in totals:
        figures["rollout/cut_mass"] = totals["cut_mass"] / tokens
    return figures


def episode_figures(trajectories: Sequence[Trajectory], wall_s: float) -> dict[str, float]:
    """Return throughput, the tail of the episodes' durations, and what they waited for searches."""
    if not trajectories or wall_s <= 0:
        return {}
    seconds = sorted(trajectory.seconds for trajectory in trajectories)
    waited = math.fsum(call.seconds for trajectory in trajectories for call in trajectory.searches)
    return {
        "rollout/episodes_per_s": len(trajectories) / wall_s,
        "rollout/model_tokens_per_s": kept_tokens(trajectories) / wall_s,
        "rollout/search_wait_s": waited / len(trajectories),
        "rollout/episode_s/p50": _quantile(seconds, 0.5),
        "rollout/episode_s/p95": _quantile(seconds, 0.95),
        "rollout/episode_s/max": seconds[-1],
    }


def kept_tokens(trajectories: Sequence[Trajectory]) -> int:
    """Return the model tokens of the episodes that did not fail."""
    return sum(sum(trajectory.loss_mask) for trajectory in trajectories if not trajectory.stop.failed)


def _quantile(ordered: Sequence[float], share: float) -> float:
    """Return the smallest value that at least ``share`` of the values do not exceed."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]
