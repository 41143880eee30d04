"""The table of metrics, and how values of one step become one figure each.

A name is ``<area>/<quantity>[/<statistic>]``. The table says for each what it means, its unit and how several values of
one step are reduced; ``*`` stands for names that the task, the data or the phases bring. ``docs/metrics.md`` is written
from this table (``python -m verl.metrics``), and a test keeps the two equal.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from verl.registry import closest


class Reduction(StrEnum):
    """How the values of one step become figures."""

    MEAN = "mean"
    SUM = "sum"
    MAX = "max"
    LAST = "last"
    HISTOGRAM = "histogram"
    """Becomes four figures: ``/mean``, ``/std`` (population), ``/min`` and ``/max``."""


STATISTICS = ("mean", "std", "min", "max")


@dataclass(frozen=True, slots=True)
class Metric:
    """One row of the table."""

    name: str
    """May end in ``/*``."""
    reduction: Reduction
    unit: str
    """Empty for a ratio or a pure number."""
    meaning: str
    """What it is and how to read it, in one sentence."""


def _rows(reduction: Reduction, *rows: tuple[str, str, str]) -> tuple[Metric, ...]:
    return tuple(Metric(name, reduction, unit, meaning) for name, unit, meaning in rows)


METRICS: tuple[Metric, ...] = (
    # -- rewards ------------------------------------------------------------------------------------------------
    *_rows(
        Reduction.HISTOGRAM,
        ("reward/total", "", "what is trained on, over the episodes that did not fail; the curve to watch first"),
        ("length/prompt", "tokens", "first context of the model"),
        ("length/response", "tokens", "everything after the prompt, observations included"),
        ("length/model", "tokens", "tokens the model wrote: what is trained on"),
        ("length/turns", "", "generations per episode"),
        ("advantage/value", "", "advantage per model token after whitening"),
        ("advantage/return", "", "value target per model token (gae)"),
        ("critic/value", "", "the critic's estimate per model token before its update"),
    ),
    *_rows(
        Reduction.MEAN,
        ("reward/part/*", "", "one unweighted part of the reward, over the rows that have its supervision"),
        ("reward/available/*", "", "share of rows that have the supervision for this part of the reward"),
        ("episode/*", "", "per-episode figures of the task: searches, invalid actions, truncated observations ..."),
        ("stop/*", "", "share of episodes that ended for this reason; the shares add up to 1"),
        (
            "length/repetition",
            "",
            "share of 4-grams of model tokens that their turn has had before; near 1 the policy repeats itself",
        ),
        ("turn/*", "", "share of model turns with this outcome (search, answer, malformed ...)"),
        # -- algorithm ------------------------------------------------------------------------------------------
        ("advantage/dead_groups", "", "share of groups whose scores are all equal: they teach nothing (grpo)"),
        ("advantage/*", "", "other figures of the advantage estimator"),
        ("correction/weight", "", "mean importance weight of trained tokens; 1 when engine and trainer agree"),
        ("correction/effective_share", "", "effective sample size over the number of tokens: 1 is no loss"),
        ("correction/bounded", "", "share of trained tokens whose weight was truncated or masked"),
        ("correction/largest_ratio", "", "largest trainer over engine probability before the bound"),
        ("kl/reference", "nats/token", "old policy from the reference (k1), before it is weighted"),
        ("kl/coefficient", "", "weight of the divergence; moves only with the adaptive controller"),
        ("kl/*", "", "other figures of the divergence in the reward"),
    ),
    *_rows(
        Reduction.MEAN,
        ("policy/loss", "", "clipped policy loss per model token"),
        ("policy/total_loss", "", "policy loss with its entropy and divergence terms"),
        ("policy/entropy", "nats/token", "before the update; a fall to zero is a collapse"),
        ("policy/entropy_coeff", "", "weight of the entropy bonus in this step"),
        ("policy/displacement", "nats/token", "likelihood that good trajectories have lost (llds_coef)"),
        ("policy/clip_fraction", "", "share of model tokens whose ratio was clipped"),
        ("policy/ratio", "", "mean ratio of updated over old probability; should stay near 1"),
        (
            "policy/correct_logprob",
            "nats/token",
            "old policy's log-prob of trajectories with a positive advantage; a fall precedes collapse (LLDS)",
        ),
        ("policy/update_kl", "nats/token", "old policy from the updated one (k1), seen during the update"),
        ("policy/reference_kl", "nats/token", "divergence from the reference as a loss term"),
        ("policy/grad_norm", "", "before clipping"),
        ("policy/lr", "", "learning rate of this step"),
        ("policy/rollout_kl", "nats/token", "engine from trainer (k1): should be near zero on fresh weights"),
        ("policy/dropped_updates", "", "optimiser steps that were left out: their gradient was not finite"),
        ("policy/*", "", "other figures of the policy update"),
        ("critic/loss", "", "clipped squared error per model token"),
        ("critic/clip_fraction", "", "share of values that were clipped"),
        ("critic/explained_variance", "", "1 is a perfect critic, 0 no better than a constant"),
        ("critic/grad_norm", "", "before clipping"),
        ("critic/lr", "", "learning rate of this step"),
        ("critic/dropped_updates", "", "optimiser steps that were left out: their gradient was not finite"),
        ("critic/*", "", "other figures of the critic update"),
    ),
    *_rows(
        Reduction.MAX,
        ("policy/rollout_gap/max", "nats", "largest gap between engine and trainer log-prob of one token"),
        ("policy/staleness", "versions", "how many weight versions the oldest trained token is behind"),
        ("memory/*", "bytes", "peak per phase over the workers"),
    ),
    # -- counts, progress, cost ---------------------------------------------------------------------------------
    *_rows(
        Reduction.SUM,
        ("data/episodes", "", "episodes that were run"),
        ("data/generation_batches", "", "batches of prompts that dynamic sampling rolled out"),
        ("data/filtered_groups", "", "groups left out by dynamic sampling: their rewards are all equal"),
        ("data/surplus_groups", "", "groups left out by dynamic sampling: more than the step takes"),
        ("data/trained_episodes", "", "episodes that reached the loss"),
        ("data/dropped/*", "", "episodes that did not reach the loss, by reason"),
        ("data/trained_tokens", "tokens", "model tokens that reached the loss"),
        ("data/total_tokens", "tokens", "all tokens of the trained episodes"),
    ),
    *_rows(
        Reduction.LAST,
        ("sft/loss", "nats/token", "supervised training: weighted negative log-likelihood of a batch"),
        ("sft/val_loss", "nats/token", "the same on the held-out rows"),
        ("sft/*", "", "other figures of supervised training"),
        ("health/*", "steps", "a watch is out of bounds for this many steps in a row; not there when all is well"),
        ("data/epoch", "epochs", "passes over the training prompts so far"),
        ("rollout/episodes_per_s", "1/s", "episodes per wall second of the rollout phase"),
        (
            "rollout/model_tokens_per_s",
            "tokens/s",
            "sampled tokens that were kept, per wall second of the rollout phase",
        ),
        ("rollout/engine_busy", "", "share of the rollout time in which an engine had anything to generate"),
        ("rollout/in_flight", "", "generations in flight per engine, averaged over the rollout time"),
        ("rollout/batch_rows", "", "rows per decoding step: what an engine's step is shared by"),
        ("rollout/reused_context", "", "share of context tokens that were not read again (prefix cache hits)"),
        ("rollout/search_wait_s", "s", "seconds an episode waited for its searches, on average"),
        ("rollout/episode_s/*", "s", "duration of an episode: half of them take no longer, 95 %, the longest"),
        ("rollout/discarded_tokens", "tokens", "sampled tokens that are in no usable episode; should be zero"),
        ("rollout/lost_workers", "", "rollout workers that died since the run started; the others took their episodes"),
        ("rollout/*", "", "other figures of the rollout engines of this step"),
        (
            "service/*",
            "",
            "what the task asked of its services in this step: requests, retries, failures by kind, seconds",
        ),
        ("val/*", "", "evaluation figures of the task (greedy, all rows); ``val/score`` chooses the best checkpoint"),
        ("throughput/episodes_per_s", "1/s", "episodes per wall second of the whole step"),
        ("throughput/trained_tokens_per_s", "tokens/s", "trained tokens per wall second of the whole step"),
        ("timing_s/*", "s", "wall seconds of a phase; ``timing_s/step`` is the whole step"),
        ("cpu_s/*", "s", "CPU seconds of a phase over all processes of this machine's run"),
        ("progress/remaining", "s", "estimate of the wall seconds to the end of the run"),
    ),
)


def find(name: str) -> Metric | None:
    """Return the row that names this figure: the exact one, else the longest pattern; None when there is none.

    The statistics of a histogram (``reward/total/max``) belong to its row.
    """
    exact = {row.name: row for row in METRICS}
    if name in exact:
        return exact[name]
    stem, _, statistic = name.rpartition("/")
    if statistic in STATISTICS and stem in exact and exact[stem].reduction is Reduction.HISTOGRAM:
        return exact[stem]
    patterns = [row for row in METRICS if row.name.endswith("/*") and name.startswith(row.name[:-1])]
    return max(patterns, key=lambda row: len(row.name), default=None)


class StepMetrics:
    """The figures of one step. Values are added as they come and reduced by the table in ``result``."""

    def __init__(self) -> None:
        self._values: dict[str, list[float]] = {}

    def add(self, name: str, value: float) -> None:
        """Add one value; raises KeyError when the table has no such name."""
        self.extend(name, (value,))

    def extend(self, name: str, values: Iterable[float]) -> None:
        """Add many values of one name; no value at all leaves the name out of the result."""
        if find(name) is None:
            raise KeyError(f"metric {name!r} is not in the table{closest(name, [row.name for row in METRICS])}")
        self._values.setdefault(name, []).extend(float(value) for value in values)

    def merge(self, figures: Mapping[str, float]) -> None:
        """Add one value of each name."""
        for name, value in figures.items():
            self.add(name, value)

    def result(self) -> dict[str, float]:
        """Return name -> figure, histograms as four figures, in order of first appearance."""
        figures: dict[str, float] = {}
        for name, values in self._values.items():
            if not values:
                continue
            row = find(name)
            assert row is not None  # `extend` refused it otherwise
            if row.reduction is Reduction.HISTOGRAM and name == row.name:
                figures |= {f"{name}/{statistic}": value for statistic, value in summarise(values).items()}
            else:
                figures[name] = _REDUCERS[row.reduction](values)
        return figures


def _mean(values: list[float]) -> float:
    return math.fsum(values) / len(values)


_REDUCERS: dict[Reduction, Callable[[list[float]], float]] = {
    Reduction.MEAN: _mean,
    Reduction.SUM: math.fsum,
    Reduction.MAX: max,
    Reduction.LAST: lambda values: values[-1],
    Reduction.HISTOGRAM: _mean,
}


def summarise(values: list[float]) -> dict[str, float]:
    """Return mean, population std, min and max of a non-empty list."""
    mean = _mean(values)
    variance = math.fsum((value - mean) ** 2 for value in values) / len(values)
    return {"mean": mean, "std": math.sqrt(variance), "min": min(values), "max": max(values)}


def markdown_table() -> str:
    """Return the table as Markdown: what ``docs/metrics.md`` shows."""
    lines = ["| name | per step | unit | meaning |", "|---|---|---|---|"]
    lines += [f"| `{row.name}` | {row.reduction.value} | {row.unit or '-'} | {row.meaning} |" for row in METRICS]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(markdown_table())
