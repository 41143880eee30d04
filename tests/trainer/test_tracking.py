"""metrics.jsonl survives kills and is cut back; a failing sink never stops a run; sinks receive what they should."""

from __future__ import annotations

import json
import logging
import math
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from verl.errors import ConfigError
from verl.tracking import MetricsFile, RunInfo, Tracker, column, write_atomically


def info(folder: Path, resumed: int | None = None) -> RunInfo:
    return RunInfo(folder, "project", "experiment", 10, resumed, "run1", {"trainer.seed": 1})


def test_rows_come_back_and_a_line_cut_by_a_kill_is_left_out(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "metrics.jsonl")
    file.append(1, {"policy/entropy": 0.5})
    file.append(2, {"policy/entropy": math.nan})
    with file.path.open("a") as raw:
        raw.write('{"step": 3, "policy/ent')
    assert file.rows() == [{"step": 1, "policy/entropy": 0.5}, {"step": 2, "policy/entropy": None}]


def test_cutting_back_keeps_the_restored_step_and_drops_later_ones(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "metrics.jsonl")
    for step in range(5):
        file.append(step, {"data/epoch": 0.0})
    with file.path.open("a") as raw:
        raw.write('{"step": 5')
    file.cut_back(2)
    assert [row["step"] for row in file.rows()] == [0, 1, 2]
    file.append(3, {"data/epoch": 1.0})
    assert column(file.rows(), "data/epoch") == [(0, 0.0), (1, 0.0), (2, 0.0), (3, 1.0)]
    file.cut_back(-1)
    assert file.rows() == []


def test_an_atomic_write_leaves_no_temporary_file(tmp_path: Path) -> None:
    write_atomically(tmp_path / "new" / "file.txt", "one")
    write_atomically(tmp_path / "new" / "file.txt", "two")
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["file.txt"]
    assert (tmp_path / "new" / "file.txt").read_text() == "two"


class FailingRun:
    """A tracker whose service went away after it was opened."""

    def log(self, *_: Any, **__: Any) -> None:
        raise ConnectionError("the service is gone")

    def finish(self) -> None:
        raise ConnectionError("still gone")


def test_a_sink_that_fails_warns_once_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=lambda **_: FailingRun()))
    tracker = Tracker(info(tmp_path), ["wandb"])
    for step in (1, 2):
        tracker.log(step, {"data/epoch": 0.0})
    tracker.close()
    assert [row["step"] for row in tracker.file.rows()] == [1, 2]
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1 and "wandb" in warnings[0] and "the service is gone" in warnings[0]


def test_a_sink_that_cannot_be_opened_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)  # import fails, as when the package is missing
    tracker = Tracker(info(tmp_path), ["wandb"])
    tracker.log(1, {"data/epoch": 0.0})
    tracker.close()
    assert "cannot be opened" in caplog.text and len(tracker.file.rows()) == 1


def test_an_unknown_logger_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="tensorboard"):
        Tracker(info(tmp_path), ["tensorbord"])


def test_wandb_gets_a_run_id_that_survives_resumes_and_the_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []

    class Run:
        def log(self, figures: dict[str, float], step: int) -> None:
            calls.append((step, figures))

        def finish(self) -> None:
            calls.append("finished")

    def init(**keywords: Any) -> Run:
        calls.append({key: keywords[key] for key in ("id", "resume", "project", "name")})
        return Run()

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init))
    tracker = Tracker(info(tmp_path, resumed=3), ["wandb"])
    tracker.log(4, {"data/epoch": 0.0})
    tracker.close()
    assert calls == [
        {"id": "run1", "resume": "allow", "project": "project", "name": "experiment"},
        (4, {"data/epoch": 0.0}),
        "finished",
    ]


def test_tensorboard_files_hold_the_scalars_and_a_resume_voids_later_steps(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    first = Tracker(info(tmp_path), ["tensorboard"])
    for step in (1, 2, 3):
        first.log(step, {"policy/entropy": float(step)})
    first.close()
    second = Tracker(info(tmp_path, resumed=1), ["tensorboard"])
    second.log_again(1, {"policy/entropy": 5.0})  # the file knows better than the checkpoint
    second.log(2, {"policy/entropy": 20.0})
    second.close()
    reader = EventAccumulator(str(tmp_path / "tensorboard"))
    reader.Reload()
    assert [(point.step, point.value) for point in reader.Scalars("policy/entropy")] == [(1, 1.0), (2, 20.0)]


def test_the_progress_line_shows_what_exists_and_the_remaining_time(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="verl.progress")
    tracker = Tracker(info(tmp_path), ["console"])
    tracker.log(3, {"reward/total/mean": 0.25, "timing_s/step": 4.25, "progress/remaining": 130.0})
    assert caplog.records[-1].getMessage() == "step  3/10  reward 0.250  4.2s/step  remaining 2m10s"


def test_the_restored_step_reaches_the_file_once_and_every_sink(tmp_path: Path) -> None:
    """A kill may fall between the file and a sink, or before both: the last evaluation must not be lost to it."""
    tracker = Tracker(info(tmp_path), [])
    seen: list[tuple[int, dict[str, float]]] = []
    sink = types.SimpleNamespace(log=lambda step, figures: seen.append((step, dict(figures))), close=lambda: None)
    tracker._sinks = [("fake", sink)]
    tracker.log_again(4, {"val/score": 0.5})
    tracker.log_again(4, {"val/score": 0.25})
    assert tracker.file.rows() == [{"step": 4, "val/score": 0.5}]
    assert seen == [(4, {"val/score": 0.5})] * 2


def test_every_line_is_standard_json(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "metrics.jsonl")
    file.append(1, {"policy/grad_norm": math.inf})
    assert json.loads(file.path.read_text(), parse_constant=lambda name: pytest.fail(name))["policy/grad_norm"] is None
