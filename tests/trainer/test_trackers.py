"""Trackers: with fakes of their libraries always, with the libraries themselves, offline, where they are installed."""

from __future__ import annotations

import logging
import sys
import types
from pathlib import Path
from typing import Any, ClassVar

import pytest

from verl.tracking import SINKS, RunInfo, Tracker


def info(folder: Path, resumed: int | None = None) -> RunInfo:
    return RunInfo(folder, "project", "experiment", 10, resumed, "run1", {"trainer.seed": 1, "data.train_files": ["a"]})


def two_sessions(folder: Path, name: str) -> None:
    """Steps 1 and 2, a kill, and a resumed session from 2 to 3."""
    first = Tracker(info(folder), [name])
    first.log(1, {"val/n/act_a|b": 1.0, "val/score": 0.1})
    first.log(2, {"val/score": 0.2})
    first.close()
    second = Tracker(info(folder, resumed=2), [name])
    second.log_again(2, {"val/score": 0.2})
    second.log(3, {"val/score": 0.3})
    second.close()


class FakeTrackio:
    """Runs by name, as Trackio keeps them."""

    def __init__(self) -> None:
        self.runs: dict[str, list[tuple[int, dict[str, float]]]] = {}
        self.finished = 0

    def init(self, *, project: str, name: str, config: Any, resume: str, embed: bool) -> Any:
        assert (project, resume, embed, config["trainer.seed"]) == ("project", "allow", False, 1)
        rows = self.runs.setdefault(name, [])
        return types.SimpleNamespace(log=lambda figures, step: rows.append((step, figures)), finish=self._finish)

    def _finish(self) -> None:
        self.finished += 1


def test_trackio_goes_on_in_the_run_of_the_same_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeTrackio()
    monkeypatch.setitem(sys.modules, "trackio", fake)
    two_sessions(tmp_path, "trackio")
    assert list(fake.runs) == ["experiment-run1"] and fake.finished == 2
    assert [step for step, _ in fake.runs["experiment-run1"]] == [1, 2, 2, 3]


class FakeClient:
    """What the sink uses of ``MlflowClient``; the store outlives a client."""

    runs: ClassVar[dict[str, Any]] = {}
    experiments: ClassVar[dict[str, str]] = {}

    def __init__(self, tracking_uri: str) -> None:
        self.address = tracking_uri

    def get_experiment_by_name(self, name: str) -> Any:
        return types.SimpleNamespace(experiment_id="7") if name in self.experiments else None

    def create_experiment(self, name: str) -> str:
        assert name not in self.experiments
        self.experiments[name] = "7"
        return "7"

    def search_runs(self, experiments: list[str], filter_string: str, max_results: int) -> list[Any]:
        assert (experiments, filter_string) == (["7"], "tags.`chatr1.run_id` = 'run1'")
        return [types.SimpleNamespace(info=types.SimpleNamespace(run_id=number)) for number in self.runs]

    def create_run(self, experiment: str, run_name: str, tags: dict[str, str]) -> Any:
        assert (experiment, run_name, tags) == ("7", "experiment", {"chatr1.run_id": "run1"})
        self.runs["r"] = {"address": self.address, "status": "RUNNING", "metrics": [], "params": []}
        return types.SimpleNamespace(info=types.SimpleNamespace(run_id="r"))

    def update_run(self, number: str, status: str) -> None:
        self.runs[number]["status"] = status

    def log_batch(self, number: str, metrics: Any = (), params: Any = ()) -> None:
        assert len(metrics) <= 1000 and len(params) <= 100, "what the service accepts"
        self.runs[number]["metrics"] += [(name, value, step) for name, value, _, step in metrics]
        self.runs[number]["params"] += params

    def set_terminated(self, number: str) -> None:
        self.runs[number]["status"] = "FINISHED"


@pytest.fixture
def mlflow(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setattr(FakeClient, "runs", {})
    monkeypatch.setattr(FakeClient, "experiments", {})
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    entities = types.SimpleNamespace(Metric=lambda *values: values, Param=lambda *values: values)
    monkeypatch.setitem(sys.modules, "mlflow", types.SimpleNamespace())
    monkeypatch.setitem(sys.modules, "mlflow.entities", entities)
    monkeypatch.setitem(sys.modules, "mlflow.tracking", types.SimpleNamespace(MlflowClient=FakeClient))
    return FakeClient.runs


def test_mlflow_goes_on_in_the_run_with_the_same_tag(tmp_path: Path, mlflow: dict[str, Any]) -> None:
    two_sessions(tmp_path, "mlflow")
    assert list(mlflow) == ["r"] and mlflow["r"]["status"] == "FINISHED"
    assert mlflow["r"]["address"] == f"sqlite:///{tmp_path.resolve()}/mlflow.db"
    assert [entry for entry in mlflow["r"]["metrics"] if entry[0] == "val/score"] == [
        ("val/score", 0.1, 1), ("val/score", 0.2, 2), ("val/score", 0.2, 2), ("val/score", 0.3, 3),
    ]  # fmt: skip
    assert ("val/n/act_a_b", 1.0, 1) in mlflow["r"]["metrics"], "a character that MLflow refuses is replaced"
    assert mlflow["r"]["params"] == [("trainer.seed", "1"), ("data.train_files", "['a']")]


def test_mlflow_is_asked_in_pieces_that_it_accepts(
    tmp_path: Path, mlflow: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://tracker:5000")
    many = RunInfo(tmp_path, "project", "experiment", 10, None, "run1", {f"key.{n}": "x" * 7000 for n in range(250)})
    sink = SINKS["mlflow"](many)
    sink.log(1, {f"val/n/{n}": 0.0 for n in range(2500)})
    run = mlflow["r"]
    assert (len(run["metrics"]), len(run["params"]), run["address"]) == (2500, 250, "http://tracker:5000")
    assert len(run["params"][0][1]) == 6000


# The libraries themselves, offline: run where they are installed.


def test_trackio_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    pytest.importorskip("trackio")
    from trackio.sqlite_storage import SQLiteStorage

    two_sessions(tmp_path, "trackio")
    assert not [
        record for record in caplog.records if record.levelno >= logging.WARNING and record.name == "verl.tracking"
    ]
    rows = SQLiteStorage.get_logs("project", "experiment-run1")
    assert [(row["step"], row["val/score"]) for row in rows] == [(1, 0.1), (2, 0.2), (2, 0.2), (3, 0.3)]


def test_mlflow_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    tracking = pytest.importorskip("mlflow.tracking")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    two_sessions(tmp_path, "mlflow")
    assert not [
        record for record in caplog.records if record.levelno >= logging.WARNING and record.name == "verl.tracking"
    ]
    client = tracking.MlflowClient(tracking_uri=f"sqlite:///{tmp_path}/mlflow.db")
    (run,) = client.search_runs([client.get_experiment_by_name("project").experiment_id])
    history = client.get_metric_history(run.info.run_id, "val/score")
    assert sorted({(point.step, point.value) for point in history}) == [(1, 0.1), (2, 0.2), (3, 0.3)]
    assert run.info.status == "FINISHED" and run.data.params["trainer.seed"] == "1"


def test_wandb_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    two_sessions(tmp_path, "wandb")
    assert not [
        record for record in caplog.records if record.levelno >= logging.WARNING and record.name == "verl.tracking"
    ]
    folders = list((tmp_path / "wandb").glob("offline-run-*-run1"))
    assert folders, "the run's id is ours, so that both sessions are one run once they are synchronised"
