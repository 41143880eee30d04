"""The Ray cluster: environment of the ranks, errors with their type, dead workers, limits, overlap."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import pytest

from verl.cluster.ray import RayCluster
from verl.errors import EngineError, ResourceError


class Probe:
    """A worker that shows where it is and fails on demand."""

    def __init__(self, offset: int = 0) -> None:
        self.offset = offset
        self.rank = int(os.environ["RANK"])

    def where(self) -> dict[str, str]:
        names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS")
        return {name: os.environ[name] for name in names}

    def add(self, value: int, *, scale: int = 1) -> int:
        return self.offset + scale * (value + self.rank)

    def fail(self, only: int) -> str:
        if self.rank == only:
            raise EngineError(f"rank {self.rank} has no weights")
        time.sleep(40)
        return "late"

    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def sleep(self, seconds: float) -> int:
        time.sleep(seconds)
        return self.rank

    def all_reduce(self) -> float:
        """Sum 1 + rank over the group with torch's own rendezvous from the environment."""
        import torch
        import torch.distributed as dist

        dist.init_process_group("gloo")
        tensor = torch.tensor([1.0 + self.rank])
        dist.all_reduce(tensor)
        dist.destroy_process_group()
        return float(tensor.item())


class Refuses:
    """A worker that cannot be constructed."""

    def __init__(self) -> None:
        raise ValueError("no model folder")


@pytest.fixture(autouse=True)
def _hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers that are still busy are not waited for long when a test closes them."""
    monkeypatch.setattr("verl.cluster.ray._CLOSE_TIMEOUT_S", 1.0)


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    running = RayCluster(threads_per_worker=1, oversubscribe=True)
    yield running
    running.close()


def test_each_rank_has_its_process_group_environment(cluster: RayCluster) -> None:
    group = cluster.spawn("probe", Probe, 2)
    places = group.wait(group.submit("where"))
    assert [place["RANK"] for place in places] == ["0", "1"]
    assert {place["WORLD_SIZE"] for place in places} == {"2"}
    assert len({(place["MASTER_ADDR"], place["MASTER_PORT"]) for place in places}) == 1
    assert {place["OMP_NUM_THREADS"] for place in places} == {"1"}
    assert group.wait(group.submit("all_reduce")) == [3.0, 3.0]
    group.close()


def test_calls_reach_all_each_or_one_in_rank_order(cluster: RayCluster) -> None:
    group = cluster.spawn("probe", Probe, 2, offset=100)
    assert group.wait(group.submit("add", 1, scale=10)) == [110, 120]
    assert group.wait(group.submit_each("add", [(5,), (7,)])) == [105, 108]
    assert group.wait(group.submit_one(1, "add", 0)) == [101]
    with pytest.raises(ValueError, match="2 workers, got arguments for 1"):
        group.submit_each("add", [(5,)])
    slow, fast = group.submit_one(0, "sleep", 5.0), group.submit_one(1, "sleep", 0.0)
    assert group.wait_any([slow, fast]) == 1
    group.close()


def test_a_workers_error_keeps_its_type_and_does_not_wait_for_the_other_ranks(cluster: RayCluster) -> None:
    group = cluster.spawn("rollout", Probe, 2)
    started = time.monotonic()
    with pytest.raises(EngineError, match="rank 1 has no weights") as caught:
        group.wait(group.submit("fail", 1))
    assert time.monotonic() - started < 30
    assert str(caught.value) == "rank 1 has no weights"
    assert "rollout worker 1" in "".join(caught.value.__notes__)
    group.close()


def test_a_dead_worker_is_named(cluster: RayCluster) -> None:
    group = cluster.spawn("rollout", Probe, 1)
    with pytest.raises(ResourceError, match="rollout worker 0 died"):
        group.wait(group.submit("die"))
    group.close()


def test_groups_work_at_the_same_time_and_the_first_failure_of_any_is_raised(cluster: RayCluster) -> None:
    policy, critic = cluster.spawn("policy", Probe, 1), cluster.spawn("critic", Probe, 1)
    started = time.monotonic()
    assert cluster.wait_all([policy.submit("sleep", 2.0), critic.submit("sleep", 2.0)]) == [[0], [0]]
    assert time.monotonic() - started < 3.9  # not one after the other
    started = time.monotonic()
    with pytest.raises(EngineError):
        cluster.wait_all([policy.submit("sleep", 40.0), critic.submit("fail", 0)])
    assert time.monotonic() - started < 30
    policy.close()
    critic.close()


def test_a_constructors_error_is_raised_by_spawn(cluster: RayCluster) -> None:
    with pytest.raises(ValueError, match="no model folder"):
        cluster.spawn("policy", Refuses, 1)


def test_more_workers_than_cores_are_refused_with_the_remedy(cluster: RayCluster) -> None:
    strict = RayCluster(threads_per_worker=1)  # joins the instance of this module
    cores = len(os.sched_getaffinity(0))
    with pytest.raises(ResourceError, match=rf"{cores + 1} policy workers .*cluster\.oversubscribe=true"):
        strict.spawn("policy", Probe, cores + 1)
    strict.close()
    assert cluster.spawn("probe", Probe, 1).size == 1


def test_ray_that_does_not_come_up_in_time_is_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    from verl.cluster import ray as module

    tries: list[int] = []

    def init(**options: object) -> None:
        tries.append(len(tries))
        if len(tries) < 3:
            raise Exception("The current node timed out during startup.")

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(module.ray, "init", init)
    monkeypatch.setattr(module.ray, "shutdown", lambda: None)
    module._start_ray()
    assert tries == [0, 1, 2]
    monkeypatch.setattr(module.ray, "init", lambda **options: 1 / 0)
    with pytest.raises(ResourceError, match="starting again may be enough"):
        module._start_ray()
