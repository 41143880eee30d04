"""The episodes of one training step: one batch of prompts, or as many as dynamic sampling asks for."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from verl.algorithms.shaping import shape_reward
from verl.data.prompts import PromptStream
from verl.data.samples import usable
from verl.errors import HealthError
from verl.trainer.evaluate import Generates
from verl.types import Prompt, Trajectory

_SUMS = re.compile(r"service/.*|rollout/((generated|prefilled|discarded)_tokens|(decode|prefill)_s)")
_LARGEST = ("rollout/episode_s/max", "rollout/lost_workers")
"""How the figures of several batches become one: sums, largest; all others are averaged."""


@dataclass(frozen=True)
class StepRollouts:
    """What a step has rolled out."""

    generated: list[Trajectory]
    """All episodes that were run, with their shaped reward."""
    trained: list[Trajectory]
    """Those that go on."""
    figures: Mapping[str, float]


def roll_out(prompts: PromptStream, rollouts: Generates, config: Any, step: int) -> StepRollouts:
    """Run the episodes of a step.

    With ``algorithm.filter_groups`` (DAPO's dynamic sampling, Yu et al. 2025, section 3.2) groups whose task rewards
    are all equal are left out, and further batches of prompts are rolled out until ``data.train_batch_size`` groups
    remain or ``max_num_gen_batches`` is reached; what is too much is left out, too. A prompt is used once per step at
    most. Raises HealthError when not one group remains.
    """
    settings = config.algorithm.filter_groups
    wanted = config.data.train_batch_size
    generated: list[Trajectory] = []
    groups: dict[str, list[Trajectory]] = {}
    figures: list[Mapping[str, float]] = []
    seen: set[str] = set()
    limit = settings.max_num_gen_batches if settings.enable else 1
    while len(figures) < limit and len(groups) < wanted:
        batch = [prompt for prompt in prompts.next_batch() if prompt.prompt_id not in seen]
        if not batch:
            break  # the step has asked every prompt there is
        seen.update(prompt.prompt_id for prompt in batch)
        plain = _generate(batch, rollouts, config, step)
        shaped = [shape_reward(trajectory, config.algorithm.shaping) for trajectory in plain]
        figures.append(rollouts.figures())
        generated += shaped
        if not settings.enable:
            return StepRollouts(generated, generated, figures[0])
        live = {name for name, group in _by_prompt(plain).items() if informative(group)}
        groups |= {name: group for name, group in _by_prompt(shaped).items() if name in live}
    kept = list(groups.values())[:wanted]
    if not kept:
        raise HealthError(
            f"step {step}: the rewards of all {len(seen)} prompts are equal within their groups, so nothing can be "
            "learned; lower the difficulty, raise n_agent or algorithm.filter_groups.max_num_gen_batches"
        )
    counts = {
        "data/generation_batches": float(len(figures)),
        "data/filtered_groups": float(len(seen) - len(groups)),
        "data/surplus_groups": float(len(groups) - len(kept)),
    }
    trained = [trajectory for group in kept for trajectory in group]
    return StepRollouts(generated, trained, _merged(figures) | counts)


def informative(group: Sequence[Trajectory]) -> bool:
    """True when the usable trajectories of a group differ in their reward."""
    rewards = {t.reward.total for t in group if usable(t) and t.reward is not None}
    return len(rewards) > 1


def _generate(batch: Sequence[Prompt], rollouts: Generates, config: Any, step: int) -> list[Trajectory]:
    rollout = config.actor_rollout_ref.rollout
    return rollouts.generate(
        batch,
        step,
        rollout.group_size,
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        mode="policy",
    )


def _by_prompt(trajectories: Sequence[Trajectory]) -> dict[str, list[Trajectory]]:
    groups: dict[str, list[Trajectory]] = {}
    for trajectory in trajectories:
        groups.setdefault(trajectory.prompt_id, []).append(trajectory)
    return groups


def _merged(figures: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Bring the figures of several batches together."""
    names = dict.fromkeys(name for row in figures for name in row)
    return {name: _one(name, [row[name] for row in figures if name in row]) for name in names}


def _one(name: str, values: Sequence[float]) -> float:
    if name in _LARGEST:
        return max(values)
    return sum(values) if _SUMS.fullmatch(name) else sum(values) / len(values)
