"""The worker groups behind the loop: policy, critic and rollout engines, one call per phase.

Policy and critic are separate workers, so both are asked before either is waited for. Which ranks compute what, and how
sums are reduced over them, is the workers' own business: every rank gets the whole list and answers for its share.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from verl.data.samples import ScoredRows, fill
from verl.types import Cluster, Sample, WorkerGroup
from verl.workers.critic import CriticWorker
from verl.workers.policy import PolicyWorker
from verl.workers.rollout.manager import Rollouts

logger = logging.getLogger(__name__)


class WorkerModels:
    """Implements ``verl.trainer.loop.Models`` over worker groups."""

    def __init__(
        self,
        config: Any,
        policy: WorkerGroup,
        critic: WorkerGroup | None,
        rollouts: Rollouts,
        weights_folder: Path,
    ) -> None:
        """``weights_folder`` is where published weights pass through."""
        self._config = config
        self._policy = policy
        self._critic = critic
        self._rollouts = rollouts
        self._weights_folder = weights_folder

    def score(self, samples: Sequence[Sample]) -> tuple[list[Sample], Mapping[str, float]]:
        """Fill in old log-probs, and reference log-probs and values where the algorithm uses them.

        Engines that share the devices leave them to training from here to the next ``publish``.
        """
        self._rollouts.sleep()
        columns = [("old_logprobs", self._policy, self._policy.submit("log_probs", samples))]
        if self._critic is not None:
            columns.append(("values", self._critic, self._critic.submit("values", samples)))
        if self._config.uses_reference:
            columns.append(("ref_logprobs", self._policy, self._policy.submit("reference_log_probs", samples)))
        scored = list(samples)
        figures: dict[str, float] = {}
        for column, group, handle in columns:
            shares: list[ScoredRows] = group.wait(handle)
            scored = fill(scored, column, shares)
            figures.update(shares[0].metrics)
        return scored, figures

    def update(self, samples: Sequence[Sample], train_policy: bool, entropy_coeff: float) -> Mapping[str, float]:
        """Update critic and, unless it is the critic's warm-up, policy; both at the same time."""
        calls = [] if self._critic is None else [(self._critic, self._critic.submit("update", samples))]
        if train_policy:
            calls.append((self._policy, self._policy.submit("update", samples, entropy_coeff)))
        figures: dict[str, float] = {}
        for group, handle in calls:
            figures |= group.wait(handle)[0]
        return figures

    def dropped_prompts(self) -> tuple[str, ...]:
        """Return the prompt ids that the last update left out, because a gradient was not finite."""
        groups = [group for group in (self._policy, self._critic) if group is not None]
        shares = [group.wait(group.submit("dropped_prompts"))[0] for group in groups]
        return tuple(dict.fromkeys(prompt for share in shares for prompt in share))

    def publish(self, version: int) -> None:
        """Bring the policy's weights to every rollout engine as ``version``."""
        manifests = self._policy.wait(self._policy.submit("publish", version, str(self._weights_folder)))
        self._rollouts.publish(manifests[0])

    def save(self, folder: Path, export: bool) -> None:
        """Write ``policy/``, ``critic/`` and, when asked, ``hf/``."""
        calls = [(self._policy, self._policy.submit("save", str(folder / "policy")))]
        if self._critic is not None:
            calls.append((self._critic, self._critic.submit("save", str(folder / "critic"))))
        for group, handle in calls:
            group.wait(handle)
        if export:
            self._policy.wait(self._policy.submit("export", str(folder / "hf")))

    def load(self, folder: Path) -> None:
        """Read what ``save`` wrote."""
        calls = [(self._policy, self._policy.submit("load", str(folder / "policy")))]
        if self._critic is not None:
            calls.append((self._critic, self._critic.submit("load", str(folder / "critic"))))
        for group, handle in calls:
            group.wait(handle)

    def close(self) -> None:
        """Remove what is left of published weights."""
        shutil.rmtree(self._weights_folder, ignore_errors=True)


def spawn_models(cluster: Cluster, config: Any, rollouts: Rollouts, total_steps: int, weights: Path) -> WorkerModels:
    """Create the policy's and, for gae, the critic's workers; load all models, those of ``rollouts`` too, at once."""
    rollouts.begin_setup()
    policy = cluster.spawn("policy", PolicyWorker, config.world_size, config, total_steps)
    critic = None
    calls = [(policy, policy.submit("setup"))]
    if config.uses_critic and not config.trainer.val_only:
        critic = cluster.spawn("critic", CriticWorker, config.world_size, config, total_steps)
        calls.append((critic, critic.submit("setup")))
    for group, handle in calls:
        group.wait(handle)
    rollouts.setup()
    return WorkerModels(config, policy, critic, rollouts, weights)


def weights_folder(run_folder: Path, run_id: str, nodes: int, need_bytes: int) -> Path:
    """Return where published weights pass through: shared memory on one machine when they fit, else the run's folder.

    The name depends on the run alone, so that what a killed session left there is found and replaced by the next one.
    """
    memory = Path("/dev/shm")
    usable = nodes == 1 and memory.is_dir() and os.access(memory, os.W_OK)
    if usable and shutil.disk_usage(memory).free > 2 * need_bytes:
        return memory / f"chatr1-{run_id}"
    return run_folder / "weights"
