"""Drills: vLLM's engine process is killed in the middle of a rollout."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from vllm_models import from_vllm_itself, load, make_vllm_folder, needs_vllm

from verl.cluster.local import LocalCluster
from verl.cluster.ray import RayCluster
from verl.config import RunConfig
from verl.errors import EngineError
from verl.types import Cluster, Prompt, Trajectory
from verl.workers.rollout.manager import Rollouts
from verl.workers.rollout.worker import RolloutWorker
from verl.workers.weight_sync import WeightChannel

pytestmark = [needs_vllm, from_vllm_itself]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_vllm_folder(tmp_path_factory.mktemp("model"), seed=0)


def ready(cluster: Cluster, size: int, folder: Path, weights: Path) -> Rollouts:
    values = {
        "task": "rollout_tasks:TwoTurns",
        "data": {"max_prompt_length": 200, "max_response_length": 56},
        "actor_rollout_ref": {
            "model": {"path": str(folder)},
            "rollout": {"name": "vllm", "dtype": "float32", "max_num_seqs": 8, "chunk_size": 4, "n_workers": size},
        },
    }
    config = RunConfig.model_validate(values)
    rollouts = Rollouts(cluster.spawn("rollout", RolloutWorker, size, config), config)  # type: ignore[arg-type]
    rollouts.setup()
    rollouts.publish(WeightChannel(weights, checksums=True).publish(load(folder).named_parameters(), version=0))
    return rollouts


def run(rollouts: Rollouts, flag: Path | None = None) -> list[Trajectory]:
    rows = {} if flag is None else {9: {"do": f"kill the engine unless {flag}"}}
    prompts = [Prompt(f"p{i}", tuple(range(10, 15 + i)), rows.get(i, {})) for i in range(16)]
    return rollouts.generate(prompts, step=1, n=2, temperature=1.0)


@pytest.fixture
def local() -> Iterator[LocalCluster]:
    cluster = LocalCluster()
    yield cluster
    cluster.close()


def test_the_death_of_the_only_engine_ends_the_run_within_seconds_and_is_named(
    local: LocalCluster, folder: Path, tmp_path: Path
) -> None:
    rollouts = ready(local, 1, folder, tmp_path / "weights")
    assert len(run(rollouts)) == 32
    started = time.monotonic()
    with pytest.raises(EngineError, match=r"no rollout worker is left; the last one, 0: the vLLM engine has died"):
        run(rollouts, tmp_path / "killed")
    assert time.monotonic() - started < 30


@pytest.mark.slow
def test_the_episodes_of_a_dead_engine_are_run_by_the_other(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cluster = RayCluster(oversubscribe=True)
    try:
        rollouts = ready(cluster, 2, folder, tmp_path / "weights")
        expected = run(rollouts)
        started = time.monotonic()
        found = run(rollouts, tmp_path / "killed")
        assert time.monotonic() - started < 60
        assert [t.trajectory_id for t in found] == [t.trajectory_id for t in expected]  # none lost, none twice
        assert not any(t.stop.failed for t in found)
        assert [t.token_ids for t in found] == [t.token_ids for t in expected]
        assert "its episodes are run by the others (1 left): the vLLM engine has died" in caplog.text
        assert rollouts.figures()["rollout/lost_workers"] == 1
    finally:
        cluster.close()
