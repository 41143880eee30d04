"""What the figures of a step are read from: its episodes, and its samples once they are scored."""

from __future__ import annotations

from collections.abc import Sequence

from verl.metrics import StepMetrics
from verl.types import Origin, Sample, StopReason, Trajectory


def add_episode_figures(trajectories: Sequence[Trajectory], figures: StepMetrics) -> None:
    """Add rewards, lengths, stop reasons, turn outcomes and the task's own per-episode figures.

    Rewards, lengths and the task's figures are over episodes that did not fail, since a failed one says nothing about
    the policy; stop reasons and counts are over all.
    """
    figures.add("data/episodes", len(trajectories))
    for reason in StopReason:
        figures.extend(f"stop/{reason.value}", (float(t.stop is reason) for t in trajectories))
    outcomes = [outcome for t in trajectories for outcome in t.turns]
    for outcome in sorted(set(outcomes)):
        figures.extend(f"turn/{outcome}", (float(other == outcome) for other in outcomes))
    for trajectory in trajectories:
        if trajectory.stop.failed:
            continue
        _add_reward(trajectory, figures)
        prompt = sum(len(s.token_ids) for s in trajectory.segments if s.origin is Origin.PROMPT)
        figures.add("length/prompt", prompt)
        figures.add("length/response", len(trajectory.token_ids) - prompt)
        figures.add("length/model", sum(trajectory.loss_mask))
        figures.add("length/turns", trajectory.n_turns)
        turns = [s.token_ids for s in trajectory.segments if s.origin is Origin.MODEL]
        figures.extend("length/repetition", map(repetition, (turn for turn in turns if len(turn) >= _GRAM)))
        for name, value in trajectory.metrics.items():
            figures.add(f"episode/{name}", value)


_GRAM = 4


def repetition(token_ids: Sequence[int]) -> float:
    """Return 1 - distinct / all 4-grams (rep-n of Welleck et al. 2020); 0.0 for fewer than four tokens."""
    grams = [token_ids[start : start + _GRAM] for start in range(len(token_ids) - _GRAM + 1)]
    return 1.0 - len(set(grams)) / len(grams) if grams else 0.0


def _add_reward(trajectory: Trajectory, figures: StepMetrics) -> None:
    if trajectory.reward is None or trajectory.reward.failure is not None:
        return
    figures.add("reward/total", trajectory.reward.total)
    for name, value in trajectory.reward.parts.items():
        figures.add(f"reward/available/{name}", float(value is not None))
        if value is not None:
            figures.add(f"reward/part/{name}", value)


def add_sample_figures(samples: Sequence[Sample], version: int, figures: StepMetrics) -> None:
    """Add token counts, staleness, and how far engine, trainer and reference are apart on the trained tokens.

    ``version`` is the weight version that the trainer holds before this step's update.
    """
    figures.add("data/trained_episodes", len(samples))
    figures.add("data/trained_tokens", sum(sample.n_model_tokens for sample in samples))
    figures.add("data/total_tokens", sum(len(sample.token_ids) for sample in samples))
    figures.extend("policy/staleness", (version - sample.policy_version for sample in samples))
    gaps: list[float] = []
    for sample in samples:
        if sample.old_logprobs is not None:
            pairs = zip(sample.rollout_logprobs, sample.old_logprobs, sample.loss_mask, strict=True)
            gaps.extend(engine - trainer for engine, trainer, trained in pairs if trained)
    figures.extend("policy/rollout_kl", gaps)
    figures.extend("policy/rollout_gap/max", map(abs, gaps))
    for sample in samples:
        if sample.old_logprobs is not None and sample.ref_logprobs is not None:
            pairs = zip(sample.old_logprobs, sample.ref_logprobs, sample.loss_mask, strict=True)
            figures.extend("kl/reference", (old - reference for old, reference, trained in pairs if trained))


def add_advantage_figures(samples: Sequence[Sample], figures: StepMetrics) -> None:
    """Add advantages, returns and values over the trained tokens, and the log-prob of correct trajectories.

    A trajectory counts as correct when the sum of its advantages is positive.
    """
    for name, column in (
        ("advantage/value", "advantages"),
        ("advantage/return", "returns"),
        ("critic/value", "values"),
    ):
        for sample in samples:
            values = getattr(sample, column)
            if values is not None:
                figures.extend(name, (v for v, trained in zip(values, sample.loss_mask, strict=True) if trained))
    for sample in samples:
        if sample.old_logprobs is not None and sample.advantages is not None and sum(sample.advantages) > 0:
            pairs = zip(sample.old_logprobs, sample.loss_mask, strict=True)
            figures.extend("policy/correct_logprob", (logprob for logprob, trained in pairs if trained))
