"""Workers as Ray actors: placement, the environment of a process group, errors that keep their type, clean ends.

Each rank is one actor. It gets RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT and its thread count before the worker's
module, and with it torch, is imported. Roles take turns on the same cores or devices, so the limit on workers holds for
each role; policy and critic, which do overlap, each get a share of every core or device of theirs.

What was simplified: no restart of a dead worker. The run ends with its name and the cause, and is resumed.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from verl.errors import ResourceError

logger = logging.getLogger(__name__)

_SHARE = 0.25
"""Part of a core or device that one worker asks Ray for: up to four roles share it, taking turns."""
_SPAWN_TIMEOUT_S = 300.0
_START_TRIES = 3
_CLOSE_TIMEOUT_S = 10.0
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS")


class _Host:
    """The actor around one worker. Its module imports no torch, so that the environment is set in time."""

    def __init__(self, environment: Mapping[str, str], path: Sequence[str]) -> None:
        """Take the rank's environment and the driver's module search path (tasks may live outside the tree)."""
        os.environ.update(environment)
        sys.path.extend(entry for entry in path if entry not in sys.path)
        self._worker: Any = None

    def address(self) -> tuple[str, int]:
        """Return this node's address and a port that is free now."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return ray.util.get_node_ip_address(), int(probe.getsockname()[1])

    def build(self, environment: Mapping[str, str], worker: type, args: Any, kwargs: Any) -> None:
        """Construct the worker in its process group's environment."""
        os.environ.update(environment)
        self._worker = worker(*args, **kwargs)

    def call(self, method: str, args: Any, kwargs: Any) -> Any:
        """Call a method of the worker."""
        return getattr(self._worker, method)(*args, **kwargs)

    def call_shared(self, method: str, names: Sequence[str], *values: Any) -> Any:
        """Call a method with arguments that Ray resolves from its store; the last ones are named by ``names``."""
        positional = len(values) - len(names)
        return self.call(method, values[:positional], dict(zip(names, values[positional:], strict=True)))

    def close(self) -> None:
        """Let the worker close what it holds."""
        if hasattr(self._worker, "close"):
            self._worker.close()


@dataclass(frozen=True)
class RayHandle:
    """Calls on the way: ``refs[i]`` is answered by rank ``ranks[i]`` of ``role``."""

    role: str
    ranks: tuple[int, ...]
    refs: tuple[Any, ...]


class RayGroup:
    """N actors of one role."""

    def __init__(self, role: str, actors: Sequence[Any]) -> None:
        self.role = role
        self._actors = list(actors)

    @property
    def size(self) -> int:
        """Number of workers."""
        return len(self._actors)

    def submit(self, method: str, *args: Any, **kwargs: Any) -> RayHandle:
        """Call ``method`` with the same arguments on every rank; they are stored once, not once a rank."""
        if self.size == 1:
            return self.submit_one(0, method, *args, **kwargs)
        shared = [ray.put(argument) for argument in args]
        named = {name: ray.put(argument) for name, argument in kwargs.items()}
        refs = [actor.call_shared.remote(method, list(named), *shared, *named.values()) for actor in self._actors]
        return RayHandle(self.role, tuple(range(self.size)), tuple(refs))

    def submit_each(self, method: str, per_rank: Sequence[tuple[Any, ...]]) -> RayHandle:
        """Call ``method`` with ``per_rank[rank]`` on each rank."""
        if len(per_rank) != self.size:
            raise ValueError(f"group {self.role} has {self.size} workers, got arguments for {len(per_rank)}")
        refs = [a.call.remote(method, args, {}) for a, args in zip(self._actors, per_rank, strict=True)]
        return RayHandle(self.role, tuple(range(self.size)), tuple(refs))

    def submit_one(self, rank: int, method: str, *args: Any, **kwargs: Any) -> RayHandle:
        """Call ``method`` on one rank."""
        return RayHandle(self.role, (rank,), (self._actors[rank].call.remote(method, args, kwargs),))

    def wait(self, handle: RayHandle) -> list[Any]:
        """Return the results in rank order; the first failure of any rank is raised at once.

        At once: when one rank of a process group has failed, the others may wait for it for ever.
        """
        return _collect([handle])[0]

    def wait_any(self, handles: Sequence[RayHandle]) -> int:
        """Return the index of a handle (of one call each) that has finished or failed."""
        ready, _ = ray.wait([handle.refs[0] for handle in handles], num_returns=1)
        return next(i for i, handle in enumerate(handles) if handle.refs[0] == ready[0])

    def close(self) -> None:
        """Close the workers, then end their processes."""
        actors, self._actors = self._actors, []
        with contextlib.suppress(RayError):
            ray.wait([a.close.remote() for a in actors], num_returns=len(actors) or 1, timeout=_CLOSE_TIMEOUT_S)
        for actor in actors:
            ray.kill(actor)


def _collect(handles: Sequence[RayHandle]) -> list[list[Any]]:
    """Return the results of all handles; raise the first failure among them as soon as it is known."""
    where = {ref: (h, i) for h, handle in enumerate(handles) for i, ref in enumerate(handle.refs)}
    results: list[list[Any]] = [[None] * len(handle.refs) for handle in handles]
    pending = list(where)
    while pending:
        ready, pending = ray.wait(pending, num_returns=1)
        for ref in ready:
            h, i = where[ref]
            results[h][i] = _get(ref, handles[h].role, handles[h].ranks[i])
    return results


def _get(ref: Any, role: str, rank: int) -> Any:
    """Return a result; raise the worker's own exception, or ResourceError when its process is gone."""
    try:
        return ray.get(ref)
    except RayTaskError as error:
        cause = error.cause
        if not isinstance(cause, Exception) or isinstance(cause, RayError):
            raise RuntimeError(f"{role} worker {rank} failed: {error}") from None
        cause.add_note(f"raised in {role} worker {rank}: {_COLOURS.sub('', str(error))}")
        raise cause from None
    except RayActorError as error:
        raise ResourceError(
            f"{role} worker {rank} died (killed, out of memory or crashed): {_one_line(error)}; its log is in "
            f"{_log_folder()}"
        ) from error


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def _log_folder() -> str:
    node = ray._private.worker._global_node
    return "the cluster's session folder" if node is None else str(node.get_logs_dir_path())


class RayCluster:
    """Spawns groups on Ray: on a private instance started here, or on the cluster that RAY_ADDRESS names."""

    def __init__(
        self,
        *,
        threads_per_worker: int = 1,
        oversubscribe: bool = False,
        own_devices: Sequence[str] = (),
        devices_per_worker: Mapping[str, int] | None = None,
    ) -> None:
        """Start or join Ray.

        ``threads_per_worker`` counts on machines without accelerators. Roles in ``own_devices`` do not share their
        devices with the other roles (``rollout`` when it is placed ``split``). ``devices_per_worker`` names the roles
        whose workers compute on several devices each (cores on a CPU): engines with tensor parallelism.
        """
        self._threads = threads_per_worker
        self._oversubscribe = oversubscribe
        self._own_devices = frozenset(own_devices)
        self._devices_per_worker = dict(devices_per_worker or {})
        self._groups: list[RayGroup] = []
        self._placements: dict[str, Any] = {}
        self._started = not ray.is_initialized()
        if self._started:
            _start_ray()
        resources = ray.cluster_resources()
        self._cores = int(resources.get("CPU", 0))
        self._devices = int(resources.get("GPU", 0))

    def spawn(self, role: str, worker: type, size: int, *args: Any, **kwargs: Any) -> RayGroup:
        """Create ``size`` workers that share a process group. Raises ResourceError when they do not fit.

        An exception of a worker's constructor is raised here, with its own type.
        """
        self._check_room(role, size)
        threads = {} if self._devices else {name: str(self._threads) for name in _THREAD_VARIABLES}
        base = threads | {"TOKENIZERS_PARALLELISM": "false", "WORLD_SIZE": str(size), "LOCAL_RANK": "0"}
        actors = []
        for rank, options in enumerate(self._options(role, size)):
            host = ray.remote(_Host).options(**options)
            actors.append(host.remote(base | {"RANK": str(rank)}, list(sys.path)))
        group = RayGroup(role, actors)
        self._groups.append(group)
        address, port = self._first_address(role, size, actors[0])
        master = {"MASTER_ADDR": address, "MASTER_PORT": str(port)}
        refs = tuple(actor.build.remote(master, worker, args, kwargs) for actor in actors)
        _collect([RayHandle(role, tuple(range(size)), refs)])
        return group

    def wait_all(self, handles: Sequence[RayHandle]) -> list[list[Any]]:
        """Wait for handles of any groups together; the first failure among them is raised at once."""
        return _collect(handles)

    def close(self) -> None:
        """End all workers and, when it was started here, Ray."""
        while self._groups:
            try:
                self._groups.pop().close()
            except Exception as error:
                logger.warning("closing workers failed: %s", error)
        if self._started and ray.is_initialized():
            ray.shutdown()

    def _check_room(self, role: str, size: int) -> None:
        each = self._devices_per_worker.get(role, 1)
        if self._devices:
            if each > 1 and role not in self._own_devices:
                raise ResourceError(
                    f"a {role} worker on {each} devices (actor_rollout_ref.rollout.tensor_model_parallel_size) cannot "
                    "share them with training ranks of one device each; set actor_rollout_ref.rollout.placement=split "
                    "with actor_rollout_ref.rollout.n_gpus, or tensor_model_parallel_size=1"
                )
            return
        threads = self._threads * each
        if self._oversubscribe or size * threads <= self._cores:
            return
        raise ResourceError(
            f"{size} {role} workers of {threads} threads need {size * threads} cores, there are "
            f"{self._cores}; lower trainer.n_gpus_per_node, actor_rollout_ref.rollout.n_workers, "
            "actor_rollout_ref.rollout.tensor_model_parallel_size or cluster.threads_per_worker, or set "
            "cluster.oversubscribe=true"
        )

    def _options(self, role: str, size: int) -> list[dict[str, Any]]:
        """Return the actor options of each rank."""
        each = self._devices_per_worker.get(role, 1)
        if not self._devices:
            cores = 0.0 if self._oversubscribe else _SHARE * self._threads * each
            return [{"num_cpus": cores, "scheduling_strategy": "SPREAD"}] * size
        bundles = self._placement(role, size)
        return [
            {
                "num_cpus": _SHARE,
                "num_gpus": _SHARE if each == 1 else each,
                "scheduling_strategy": PlacementGroupSchedulingStrategy(
                    bundles, placement_group_bundle_index=rank % bundles.bundle_count
                ),
            }
            for rank in range(size)
        ]

    def _placement(self, role: str, size: int) -> Any:
        """Return the placement group of a role: a worker's devices a bundle; shared by all roles without their own."""
        pool = role if role in self._own_devices else "shared"
        if pool not in self._placements:
            each = self._devices_per_worker.get(role, 1)
            bundles = placement_group([{"GPU": float(each), "CPU": 1.0}] * size, strategy="PACK")
            if not bundles.wait(timeout_seconds=60):
                raise ResourceError(
                    f"{size * each} devices for {role} are not free: the cluster has {self._devices} devices and "
                    f"{self._cores} cores; lower trainer.n_gpus_per_node, trainer.nnodes or "
                    "actor_rollout_ref.rollout.n_gpus"
                )
            self._placements[pool] = bundles
        return self._placements[pool]

    def _first_address(self, role: str, size: int, first: Any) -> tuple[str, int]:
        """Return where rank 0 will listen; waiting for it also shows whether actors can start at all."""
        try:
            return ray.get(first.address.remote(), timeout=_SPAWN_TIMEOUT_S)  # type: ignore[no-any-return]
        except (GetTimeoutError, RayActorError) as error:
            raise ResourceError(
                f"{size} {role} workers did not start within {_SPAWN_TIMEOUT_S:.0f} s: {_one_line(error)}; "
                f"resources of the cluster: {ray.cluster_resources()}; logs: {_log_folder()}"
            ) from error


def _start_ray() -> None:
    """Start a private instance, or join the cluster that RAY_ADDRESS names; nothing is written to the terminal."""
    address = os.environ.get("RAY_ADDRESS", "local")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    # The first failure of a call is raised; those of the other ranks would be reported on the terminal at the end.
    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")
    logging.getLogger("ray").setLevel(logging.ERROR)
    own: dict[str, Any] = {}
    if address == "local":
        # Only small objects travel (samples, manifests): weights go through files.
        own = {"num_cpus": len(os.sched_getaffinity(0)), "object_store_memory": _object_store_bytes()}
    for attempt in range(_START_TRIES):
        try:
            ray.init(
                address=address,
                include_dashboard=False,
                log_to_driver=False,
                configure_logging=False,
                logging_level=logging.ERROR,
                **own,
            )
        except Exception as error:  # a plain one when a daemon took more than 30 s to come up, as on a busy machine
            ray.shutdown()
            if address != "local" or attempt + 1 == _START_TRIES:
                raise ResourceError(
                    f"cannot start or join Ray at {address!r}: {_one_line(error)}. On an overloaded machine starting "
                    "again may be enough; cluster.kind=local does without Ray"
                ) from error
            logger.warning("Ray did not start (%s); trying again", _one_line(error))
        else:
            return


def _object_store_bytes() -> int:
    """Return 2 GiB or half of what shared memory has free, at least Ray's minimum."""
    try:
        status = os.statvfs("/dev/shm")
        free = status.f_bavail * status.f_frsize
    except OSError:
        free = 0
    return int(max(80 * 2**20, min(2 * 2**30, free // 2)))
