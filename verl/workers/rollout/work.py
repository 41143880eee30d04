"""What travels between the manager and the rollout workers. No torch here: the driver imports it too."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from verl.types import Origin, Prompt, Reward, Segment, StopReason, Trajectory


@dataclass(frozen=True)
class RolloutWork:
    """One episode to run."""

    prompt: Prompt
    step: int
    """Training step, part of the seed."""
    sample_index: int
    """Index in the prompt's group, from 0."""
    temperature: float
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = -1
    mode: str = "policy"
    """``policy`` or one of the task's fixed pipelines."""


@dataclass(frozen=True)
class WorkerReport:
    """What a worker did since the last report."""

    causes: dict[StopReason, Counter[str]] = field(default_factory=dict)
    """Messages of failed episodes by stop reason."""
    figures: dict[str, float] = field(default_factory=dict)
    """Sums: tokens, steps and seconds of the engine."""
    service: dict[str, float] = field(default_factory=dict)
    """Sums: what the task's services were asked."""


def failed_trajectory(work: RolloutWork, stop: StopReason) -> Trajectory:
    """Return the record of an episode that ended without one of its own: its prompt and nothing else."""
    prompt = work.prompt
    return Trajectory(
        trajectory_id=f"{prompt.prompt_id}#{work.sample_index}",
        prompt_id=prompt.prompt_id,
        segments=(Segment(Origin.PROMPT, prompt.token_ids),) if prompt.token_ids else (),
        stop=stop,
        reward=Reward(0.0),
        row=prompt.row,
    )
