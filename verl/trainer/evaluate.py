"""Evaluation: the same episodes as in training, greedy by default, every row in file order, failures score zero.

What is written, and by whom it is read:
    eval/<split>/step_<N>.jsonl             whole trajectories, re-scorable offline (``read_trajectories``)
    eval/<split>/summary_step_<N>.json      the task's figures
    eval/<split>/...step_<N>...             what the task adds: results as text, a card (``KeepsResults``)
    eval/pipelines/table_step_<N>.md        policy and fixed pipelines beside each other, with ``job.evaluate_bounds``
    validation_results_step<N>.json         the published format, when ``save_val``
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from verl.errors import CheckpointError
from verl.timing import Stopwatch, format_duration
from verl.tracking import write_atomically
from verl.trainer.run_folder import write_records
from verl.types import Prompt, Task, Trajectory

logger = logging.getLogger(__name__)

_BOUND_FIGURES = ("f1", "recall_at_3")


class Generates(Protocol):
    """The part of the rollout manager that evaluation needs."""

    def generate(
        self,
        prompts: Sequence[Prompt],
        step: int,
        n: int,
        *,
        temperature: float,
        top_p: float,
        top_k: int,
        mode: str = ...,
    ) -> list[Trajectory]: ...

    def figures(self) -> Mapping[str, float]: ...


@runtime_checkable
class MeasuresBounds(Protocol):
    """A task that can say how far its scores could go, and whether one evaluation is better than another."""

    def pipelines(self) -> Mapping[str, str]:
        """Return name -> ``EpisodeContext.mode`` of the fixed pipelines that are worth measuring."""
        ...

    def applicable(self, prompt: Prompt, mode: str) -> bool:
        """Say whether a prompt has what a pipeline needs; the others are left out of it."""
        ...

    def table(self, methods: Mapping[str, Sequence[Trajectory]]) -> str:
        """Return the policy and the pipelines beside each other, as Markdown."""
        ...

    def compare(self, before: Sequence[Trajectory], after: Sequence[Trajectory]) -> Mapping[str, Any]:
        """Return the paired differences of the main figures with their intervals."""
        ...


@runtime_checkable
class KeepsResults(Protocol):
    """A task that writes files of its own about an evaluation."""

    def report(
        self, trajectories: Sequence[Trajectory], facts: Mapping[str, Mapping[str, Any]], folder: Path, step: int
    ) -> Mapping[str, float]:
        """Write files ``<name>_step_<N>.<suffix>`` into the folder; return the figures, those of ``evaluate`` included.

        ``facts``: section -> name -> value of what the trainer knows (model, code, decoding, the whole config).
        """
        ...


@dataclass(frozen=True)
class Evaluation:
    """One finished evaluation."""

    step: int
    figures: Mapping[str, float]
    """The task's: n, em, f1 ..."""
    score: float
    """Mean of the task's validation reward, failures 0: what the best checkpoint is chosen by."""
    trajectories: tuple[Trajectory, ...]
    """In file order."""

    def metrics(self) -> dict[str, float]:
        """Return the figures under ``val/``."""
        return {f"val/{name}": value for name, value in self.figures.items()} | {"val/score": self.score}


class Evaluator:
    """Runs and records evaluations of one run."""

    def __init__(
        self,
        task: Task,
        prompts: Sequence[Prompt],
        rollouts: Generates,
        config: Any,
        folder: Path,
        facts: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """``facts``: what there is to say of model, code and config, see ``KeepsResults``."""
        self._facts = facts or {}
        self._task = task
        self._prompts = prompts
        self._rollouts = rollouts
        self._config = config
        self.folder = folder

    def run(self, step: int, mode: str = "policy") -> Evaluation:
        """Evaluate the current weights; ``mode`` other than ``policy`` is one of the task's fixed pipelines.

        Results of a pipeline go to a folder of their own and are not part of the published file.
        """
        trajectories = [t for batch in self._batches(step, mode) for t in batch]
        evaluation = Evaluation(
            step=step,
            figures=dict(self._figures(step, mode, trajectories)),
            score=math.fsum(self._task.validation_reward(t) for t in trajectories) / max(1, len(trajectories)),
            trajectories=tuple(trajectories),
        )
        write_records(self._split_folder(mode) / f"step_{step}.jsonl", [t.to_record() for t in trajectories])
        write_atomically(self._summary_path(mode, step), json.dumps(dict(evaluation.figures), indent=1))
        if self._config.save_val and mode == "policy":
            self._write_published(step, trajectories)
        return evaluation

    def _figures(self, step: int, mode: str, trajectories: Sequence[Trajectory]) -> Mapping[str, float]:
        if not isinstance(self._task, KeepsResults):
            return self._task.evaluate(trajectories)
        val = self._config.actor_rollout_ref.rollout.val_kwargs
        decoding = {"mode": mode, "step": step, **{n: getattr(val, n) for n in ("temperature", "top_p", "top_k", "n")}}
        facts = {"decoding": decoding | dict(self._facts.get("decoding", {}))}
        facts |= {name: dict(section) for name, section in self._facts.items() if name != "decoding"}
        return self._task.report(trajectories, facts, self._split_folder(mode), step)

    def measure_bounds(self, step: int) -> None:
        """Evaluate the fixed pipelines of the task with the current weights, unless that was done at this step."""
        if not isinstance(self._task, MeasuresBounds):
            logger.warning("job.evaluate_bounds: this task has no fixed pipelines")
            return
        for name, mode in self._task.pipelines().items():
            if not self._summary_path(mode, step).exists():
                figures = self.run(step, mode).figures
                logger.info("%s: %s", name, ", ".join(f"{k} {figures[k]:.3f}" for k in _BOUND_FIGURES if k in figures))
        table = self.folder / "eval" / "pipelines" / f"table_step_{step}.md"
        if not table.exists():
            self._write_table(self._task, step, table)

    def _write_table(self, task: MeasuresBounds, step: int, path: Path) -> None:
        modes = {"policy": "policy", **task.pipelines()}
        files = {name: self._split_folder(mode) / f"step_{step}.jsonl" for name, mode in modes.items()}
        methods = {name: read_trajectories(path) for name, path in files.items() if path.exists()}
        table = task.table({name: rows for name, rows in methods.items() if rows})
        write_atomically(path, table + "\n")
        logger.info("%s", table)

    def figures(self, step: int) -> dict[str, float] | None:
        """Return the policy's figures as written at a step; None when it was not evaluated then."""
        path = self._summary_path("policy", step)
        return dict(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else None

    def read_bounds(self, last_step: int) -> dict[str, Any] | None:
        """Return ``<pipeline>_<figure>`` as measured with the initial weights; under ``final`` with the last ones."""
        if not isinstance(self._task, MeasuresBounds):
            return None
        found: dict[int, dict[str, Any]] = {}
        for step in (0, last_step):
            found[step] = {}
            for name, mode in self._task.pipelines().items():
                path = self._summary_path(mode, step)
                figures = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
                found[step] |= {f"{name}_{key}": figures[key] for key in _BOUND_FIGURES if key in figures}
        if not found[0]:
            return None
        return found[0] | ({"final": found[last_step]} if last_step > 0 and found[last_step] else {})

    def _summary_path(self, mode: str, step: int) -> Path:
        return self._split_folder(mode) / f"summary_step_{step}.json"

    def _split_folder(self, mode: str) -> Path:
        return self.folder / "eval" / ("val" if mode == "policy" else f"pipeline_{mode}")

    def _batches(self, step: int, mode: str) -> Iterator[list[Trajectory]]:
        val = self._config.actor_rollout_ref.rollout.val_kwargs
        size = self._config.data.val_batch_size
        watch, prompts = Stopwatch(), self._prompts
        if mode != "policy" and isinstance(self._task, MeasuresBounds):
            prompts = [prompt for prompt in prompts if self._task.applicable(prompt, mode)]
            if len(prompts) < len(self._prompts):
                logger.info(
                    "pipeline %s: %d of %d questions have what it needs", mode, len(prompts), len(self._prompts)
                )
        for start in range(0, len(prompts), size):
            with watch.phase("batch"):
                batch = self._rollouts.generate(
                    prompts[start : start + size],
                    step,
                    val.n,
                    temperature=val.temperature,
                    top_p=val.top_p,
                    top_k=val.top_k,
                    mode=mode,
                )
            yield batch
            done = min(start + size, len(prompts))
            if done < len(prompts):
                left = watch.wall_seconds["batch"] / done * (len(prompts) - done)
                logger.info("evaluated %d of %d, remaining %s", done, len(prompts), format_duration(left))

    def _write_published(self, step: int, trajectories: Sequence[Trajectory]) -> None:
        directory = Path(self._config.save_val_dir) if self._config.save_val_dir is not None else self.folder
        path = directory / f"validation_results_step{step}.json"
        rows = self._task.validation_rows(trajectories)
        write_atomically(path, json.dumps(rows, indent=4, ensure_ascii=False))
        logger.info("wrote %s", path)


def read_trajectories(path: Path) -> list[Trajectory]:
    """Read a file of trajectories; raises CheckpointError naming file and line when one is damaged."""
    trajectories = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            trajectories.append(Trajectory.from_record(json.loads(line)))
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{path}:{number}: not a trajectory record ({error!r})") from error
    return trajectories
