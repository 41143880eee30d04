"""Where figures go: always to ``metrics.jsonl``, and to sinks (console and trackers) that may fail.

A sink that cannot be opened or written warns once and never stops a run; ``metrics.jsonl`` is the record that
everything else (resume, report) reads, so its failures are errors.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from verl.registry import Registry
from verl.timing import format_duration

logger = logging.getLogger(__name__)


# ---------------------------------------------------------------------------------------------------------------
# The file


class MetricsFile:
    """``metrics.jsonl``: one object per step, ``{"step": n, name: figure, ...}``, in step order.

    Not-a-number and infinities are written as null, so that every line is standard JSON.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, step: int, figures: Mapping[str, float]) -> None:
        """Add a row and flush it to the disk."""
        row = {"step": step} | {name: _finite(value) for name, value in figures.items()}
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def rows(self) -> list[dict[str, Any]]:
        """Return the rows; a last line that was cut by a kill is left out."""
        if not self.path.exists():
            return []
        rows = []
        for line in self.path.read_text(encoding="utf-8").splitlines():
            try:
                rows.append(json.loads(line))
            except json.JSONDecodeError:
                break
        return rows

    def cut_back(self, step: int) -> None:
        """Keep rows up to and including ``step``; atomic."""
        kept = [row for row in self.rows() if row["step"] <= step]
        write_atomically(self.path, "".join(json.dumps(row) + "\n" for row in kept))


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def write_atomically(path: Path, text: str) -> None:
    """Write a whole file so that a reader, or a kill, sees the old content or the new, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


# ---------------------------------------------------------------------------------------------------------------
# Sinks


@dataclass(frozen=True, slots=True)
class RunInfo:
    """What a sink is told about the run when it opens."""

    directory: Path
    project: str
    experiment: str
    total_steps: int
    resumed_step: int | None
    """Last step of the restored run, which is logged again; None for a new one. What a sink has from it on is void."""
    run_id: str
    """Stays the same over resumes."""
    config: Mapping[str, Any]


class Sink(Protocol):
    """One more place for figures."""

    def log(self, step: int, figures: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


#: What the progress line shows, where it exists: label, metric, format.
CONSOLE_COLUMNS: tuple[tuple[str, str, str], ...] = (
    ("reward", "reward/total/mean", ".3f"),
    ("searches", "episode/searches", ".2f"),
    ("entropy", "policy/entropy", ".3f"),
    ("kl", "kl/reference", ".4f"),
    ("tokens", "length/model/mean", ".0f"),
    ("dropped", "data/dropped/failed", ".0f"),
    ("val", "val/score", ".3f"),
)


class ConsoleSink:
    """One progress line per step, with an estimate of the remaining time, through the ``verl.progress`` logger."""

    def __init__(self, info: RunInfo) -> None:
        self._total = info.total_steps
        self._log = logging.getLogger("verl.progress")

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        """Write the line."""
        width = len(str(self._total))
        parts = [f"step {step:>{width}}/{self._total}"]
        parts += [f"{label} {figures[name]:{form}}" for label, name, form in CONSOLE_COLUMNS if name in figures]
        if "timing_s/step" in figures:
            parts.append(f"{figures['timing_s/step']:.1f}s/step")
        if "progress/remaining" in figures:
            parts.append(f"remaining {format_duration(figures['progress/remaining'])}")
        self._log.info("  ".join(parts))

    def close(self) -> None:
        """Nothing is open."""


class TensorBoardSink:
    """Scalars under ``<run>/tensorboard``; on resume, points from the restored step on are purged by the reader."""

    def __init__(self, info: RunInfo) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary = event_pb2.Event, summary_pb2.Summary
        self._writer = EventFileWriter(str(info.directory / "tensorboard"))
        if info.resumed_step is not None:
            session = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            # A session start at step n tells TensorBoard to forget what an earlier file holds from n on.
            self._writer.add_event(event_pb2.Event(wall_time=time.time(), step=info.resumed_step, session_log=session))

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        """Add one event with all scalars."""
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in figures.items()]
        self._writer.add_event(self._event(wall_time=time.time(), step=step, summary=self._summary(value=values)))
        self._writer.flush()

    def close(self) -> None:
        """Flush and close the event file."""
        self._writer.close()


class WandbSink:
    """A Weights & Biases run whose id survives resumes; steps it already has are not logged twice."""

    def __init__(self, info: RunInfo) -> None:
        import wandb

        self._run = wandb.init(
            project=info.project,
            name=info.experiment,
            id=info.run_id,
            resume="allow",
            dir=str(info.directory),
            config=dict(info.config),
        )

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        """Log the figures at their step."""
        self._run.log(dict(figures), step=step)

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()


class TrackioSink:
    """A Trackio run, found again by its name; it lies in ``TRACKIO_DIR``. A resume logs its first step twice."""

    def __init__(self, info: RunInfo) -> None:
        import trackio

        self._run = trackio.init(
            project=info.project,
            name=f"{info.experiment}-{info.run_id}",  # Trackio knows runs by name, and experiments repeat theirs
            config=dict(info.config),
            resume="allow",
            embed=False,
        )

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        """Log the figures at their step."""
        self._run.log(dict(figures), step=step)

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()


class MlflowSink:
    """An MLflow run, found again by its tag ``chatr1.run_id``. A resume logs its first step twice.

    It lies where ``MLFLOW_TRACKING_URI`` says, else in ``mlflow.db`` in the run's folder.
    """

    _TAG = "chatr1.run_id"

    def __init__(self, info: RunInfo) -> None:
        from mlflow.entities import Metric, Param
        from mlflow.tracking import MlflowClient

        self._metric = Metric
        address = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{info.directory.resolve()}/mlflow.db"
        self._client = MlflowClient(tracking_uri=address)
        experiment = self._client.get_experiment_by_name(info.project)
        number = experiment.experiment_id if experiment else self._client.create_experiment(info.project)
        found = self._client.search_runs([number], filter_string=f"tags.`{self._TAG}` = '{info.run_id}'", max_results=1)
        if found:
            self._run_id: str = found[0].info.run_id
            self._client.update_run(self._run_id, status="RUNNING")
            return
        run = self._client.create_run(number, run_name=info.experiment, tags={self._TAG: info.run_id})
        self._run_id = run.info.run_id
        params = [Param(key, str(value)[:_MLFLOW_PARAM]) for key, value in info.config.items()]
        for start in range(0, len(params), _MLFLOW_PARAMS):
            self._client.log_batch(self._run_id, params=params[start : start + _MLFLOW_PARAMS])

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        """Log the figures at their step, characters that MLflow has no place for as ``_``."""
        now = int(time.time() * 1000)
        metrics = [self._metric(_MLFLOW_UNKNOWN.sub("_", name), value, now, step) for name, value in figures.items()]
        for start in range(0, len(metrics), _MLFLOW_METRICS):
            self._client.log_batch(self._run_id, metrics=metrics[start : start + _MLFLOW_METRICS])

    def close(self) -> None:
        """End the run."""
        self._client.set_terminated(self._run_id)


#: What one call to MLflow may hold, how long a parameter may be, and which characters a name may not have.
_MLFLOW_METRICS, _MLFLOW_PARAMS, _MLFLOW_PARAM = 1000, 100, 6000
_MLFLOW_UNKNOWN = re.compile(r"[^\w\-. :/]")

SINKS: Registry[Callable[[RunInfo], Sink]] = Registry(
    "logger",
    {
        "console": ConsoleSink,
        "tensorboard": TensorBoardSink,
        "wandb": WandbSink,
        "trackio": TrackioSink,
        "mlflow": MlflowSink,
    },
)


# ---------------------------------------------------------------------------------------------------------------
# All of it


class Tracker:
    """Sends each step's figures to ``metrics.jsonl`` and to every sink that works."""

    def __init__(self, info: RunInfo, names: Iterable[str]) -> None:
        self.file = MetricsFile(info.directory / "metrics.jsonl")
        self._sinks: list[tuple[str, Sink]] = []
        self._warned: set[str] = set()
        for name in names:
            factory = SINKS[name]
            try:
                self._sinks.append((name, factory(info)))
            except Exception as error:  # whatever a third-party tracker raises, the run goes on without it
                self._warn(name, "cannot be opened", error)

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        """Record one step everywhere."""
        self.file.append(step, figures)
        self._send(step, figures)

    def _send(self, step: int, figures: Mapping[str, float]) -> None:
        for name, sink in self._sinks:
            try:
                sink.log(step, figures)
            except Exception as error:  # as above
                self._warn(name, f"failed at step {step}", error)

    def log_again(self, step: int, figures: Mapping[str, float]) -> None:
        """Record the restored step wherever a kill may have cut it off: in the file if it is missing, in every sink."""
        rows = {row["step"]: row for row in self.file.rows()}
        if step not in rows:
            self.file.append(step, figures)
            rows[step] = dict(figures)
        self._send(step, {name: value for name, value in rows[step].items() if name != "step" and value is not None})

    def close(self) -> None:
        """Close every sink."""
        for name, sink in self._sinks:
            try:
                sink.close()
            except Exception as error:  # as above
                self._warn(name, "failed while closing", error)
        self._sinks = []

    def _warn(self, name: str, what: str, error: Exception) -> None:
        if name not in self._warned:
            self._warned.add(name)
            logger.warning(
                "logger %r %s: %s: %s; the run goes on, metrics.jsonl has everything",
                name, what, type(error).__name__, error,
            )  # fmt: skip


def column(rows: Sequence[Mapping[str, Any]], name: str) -> list[tuple[int, float]]:
    """Return (step, value) of one metric over the rows that have it."""
    return [(row["step"], row[name]) for row in rows if row.get(name) is not None]
