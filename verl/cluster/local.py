"""The cluster without processes: every group has one worker, which lives here and is called at once. For debugging."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from verl.errors import ResourceError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LocalHandle:
    """A call that has been made: its result, or the exception that ``wait`` raises."""

    value: Any = None
    error: BaseException | None = None


class LocalGroup:
    """One worker in this process. Calls run when they are submitted."""

    def __init__(self, role: str, worker: Any) -> None:
        self.role = role
        self._worker = worker

    @property
    def size(self) -> int:
        """Always 1."""
        return 1

    def submit(self, method: str, *args: Any, **kwargs: Any) -> LocalHandle:
        """Call ``method``; an exception is kept for ``wait``, as on any cluster."""
        call: Callable[..., Any] = getattr(self._worker, method)
        try:
            return LocalHandle(call(*args, **kwargs))
        except Exception as error:
            return LocalHandle(error=error)

    def submit_each(self, method: str, per_rank: Sequence[tuple[Any, ...]]) -> LocalHandle:
        """Call ``method`` with ``per_rank[0]``."""
        (args,) = per_rank
        return self.submit(method, *args)

    def submit_one(self, rank: int, method: str, *args: Any, **kwargs: Any) -> LocalHandle:
        """Call ``method`` on rank 0, the only one."""
        if rank != 0:
            raise IndexError(f"group {self.role} has one worker, there is no rank {rank}")
        return self.submit(method, *args, **kwargs)

    def wait(self, handle: LocalHandle) -> list[Any]:
        """Return a list of the one result, or raise the call's exception."""
        if handle.error is not None:
            raise handle.error
        return [handle.value]

    def wait_any(self, handles: Sequence[LocalHandle]) -> int:
        """Return the index of a finished handle: the first, since all are finished."""
        if not handles:
            raise ValueError("no handles to wait for")
        return 0

    def close(self) -> None:
        """End the worker: its ``close`` is called when it has one."""
        worker, self._worker = self._worker, None
        if hasattr(worker, "close"):
            worker.close()


class LocalCluster:
    """Groups of size 1 in this process."""

    def __init__(self) -> None:
        self._groups: list[LocalGroup] = []

    def spawn(self, role: str, worker: type, size: int, *args: Any, **kwargs: Any) -> LocalGroup:
        """Construct the worker; raises ResourceError when ``size`` is not 1."""
        if size != 1:
            raise ResourceError(
                f"the local cluster runs one worker per role, but {role} needs {size}; set cluster.kind=ray, or "
                "trainer.nnodes=1 trainer.n_gpus_per_node=1 actor_rollout_ref.rollout.n_workers=1"
            )
        group = LocalGroup(role, worker(*args, **kwargs))
        self._groups.append(group)
        return group

    def wait_all(self, handles: Sequence[LocalHandle]) -> list[list[Any]]:
        """Return the results of all handles; the first failure among them is raised."""
        for handle in handles:
            if handle.error is not None:
                raise handle.error
        return [[handle.value] for handle in handles]

    def close(self) -> None:
        """End all workers, the newest first; a failing one does not keep the others."""
        while self._groups:
            group = self._groups.pop()
            try:
                group.close()
            except Exception:
                logger.exception("closing the %s worker failed", group.role)
