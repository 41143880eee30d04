"""The same rollouts from two worker processes: equal bit for bit, and the work of a dead one is done by the other."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from verl.cluster.local import LocalCluster
from verl.cluster.ray import RayCluster
from verl.config import RunConfig
from verl.errors import EngineError
from verl.types import Cluster, Prompt, Trajectory
from verl.workers.rollout.manager import Rollouts
from verl.workers.rollout.worker import RolloutWorker
from verl.workers.weight_sync import WeightChannel, WeightManifest


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    running = RayCluster(oversubscribe=True)
    yield running
    running.close()


@pytest.fixture(scope="module")
def config(model_folder: Path) -> RunConfig:
    rollout = {"name": "hf", "dtype": "float32", "max_num_seqs": 8, "chunk_size": 4, "deterministic": True}
    values = {
        "task": "rollout_tasks:TwoTurns",
        "data": {"max_prompt_length": 200, "max_response_length": 56},
        "actor_rollout_ref": {"model": {"path": str(model_folder)}, "rollout": rollout},
    }
    return RunConfig.model_validate(values)


@pytest.fixture(scope="module")
def manifest(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> WeightManifest:
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    channel = WeightChannel(tmp_path_factory.mktemp("weights"), checksums=True)
    return channel.publish(model.named_parameters(), version=0)


def ready(cluster: Cluster, size: int, config: RunConfig, manifest: WeightManifest) -> Rollouts:
    group = cluster.spawn("rollout", RolloutWorker, size, config)
    rollouts = Rollouts(group, config)  # type: ignore[arg-type]
    rollouts.setup()
    rollouts.publish(manifest)
    return rollouts


def run(rollouts: Rollouts, rows: dict[int, str] | None = None) -> list[Trajectory]:
    what = rows or {}
    prompts = [Prompt(f"p{i}", tuple(range(10, 15 + i)), {"do": what[i]} if i in what else {}) for i in range(7)]
    return rollouts.generate(prompts, step=1, n=3, temperature=1.0)


def test_two_workers_give_what_one_process_gives_and_a_dead_one_is_replaced_by_the_other(
    cluster: RayCluster, config: RunConfig, manifest: WeightManifest, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    local = LocalCluster()
    expected = run(ready(local, 1, config, manifest))
    rollouts = ready(cluster, 2, config, manifest)
    assert [t.segments for t in run(rollouts)] == [t.segments for t in expected]  # bit for bit

    found = run(rollouts, {5: f"die unless {tmp_path / 'killed'}"})
    assert [t.trajectory_id for t in found] == [t.trajectory_id for t in expected]  # none lost, none twice
    assert [t.segments for t in found] == [t.segments for t in expected]
    assert "its episodes are run by the others (1 left): rollout worker" in caplog.text
    assert rollouts.figures()["rollout/lost_workers"] == 1
    rollouts.publish(manifest)
    assert [t.segments for t in run(rollouts)] == [t.segments for t in expected]

    with pytest.raises(EngineError, match=r"no rollout worker is left; the last one, [01]: rollout worker [01] died"):
        run(rollouts, {5: "die"})
    local.close()
    rollouts.close()
