"""The local cluster keeps the protocol's promises in one process."""

from __future__ import annotations

import pytest

from verl.cluster.local import LocalCluster
from verl.errors import ResourceError


class Counter:
    def __init__(self, start: int) -> None:
        self.value = start
        self.closed = False

    def add(self, amount: int) -> int:
        self.value += amount
        return self.value

    def fail(self) -> None:
        raise KeyError("missing")

    def close(self) -> None:
        self.closed = True


def test_calls_run_in_order_and_wait_returns_one_result() -> None:
    cluster = LocalCluster()
    group = cluster.spawn("policy", Counter, 1, 10)
    first, second = group.submit("add", 1), group.submit_each("add", [(5,)])
    assert group.wait(second) == [16]
    assert group.wait(first) == [11]
    assert group.wait(group.submit_one(0, "add", 4)) == [20]
    assert cluster.wait_all([first, second]) == [[11], [16]]


def test_an_exception_is_raised_by_wait_not_by_submit() -> None:
    group = LocalCluster().spawn("policy", Counter, 1, 0)
    handle = group.submit("fail")
    with pytest.raises(KeyError, match="missing"):
        group.wait(handle)


def test_more_than_one_worker_is_refused_with_the_remedy() -> None:
    with pytest.raises(ResourceError, match=r"policy needs 2.*cluster\.kind=ray"):
        LocalCluster().spawn("policy", Counter, 2, 0)


def test_closing_the_cluster_closes_the_workers() -> None:
    cluster = LocalCluster()
    group = cluster.spawn("policy", Counter, 1, 0)
    worker = group._worker
    cluster.close()
    assert worker.closed
