"""Where workers run: in this process (``local``) or on Ray (``ray``, the only module that imports it)."""

from __future__ import annotations

from typing import Any

from verl.cluster.local import LocalCluster
from verl.types import Cluster


def make_cluster(config: Any) -> Cluster:
    """Return the cluster that ``config.cluster.kind`` names, started; raises ResourceError when it cannot start."""
    if config.cluster.kind == "local":
        return LocalCluster()
    from verl.cluster.ray import RayCluster  # takes a second to import; the local cluster does without

    split = config.actor_rollout_ref.rollout.placement == "split"
    return RayCluster(
        threads_per_worker=config.cluster.threads_per_worker,
        oversubscribe=config.cluster.oversubscribe,
        own_devices=("rollout",) if split else (),
    )
