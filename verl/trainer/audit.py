"""Is what was sampled what is trained? Pure comparisons of recorded generations, trajectories and samples.

The recorder stands between engine and task, so that its token ids are the engine's own and owe nothing to the code that
assembles samples. ``main_audit`` runs the episodes and shows what is found here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from verl.algorithms.kl import ESTIMATORS
from verl.types import Finding, Level, Origin, Sample, Tokenizer, Trajectory
from verl.workers.rollout.recording import Generation

POSITIONS = (0, 1, 8, 32, 128, 512)
"""Lower bounds of the ranges of positions in a turn that gaps are shown for."""


@runtime_checkable
class ChecksTemplate(Protocol):
    """A task that can say what its tokenizer and chat template do to its episodes."""

    def check_template(self) -> list[Finding]:
        """Return one finding per check."""
        ...


# ---------------------------------------------------------------------------------------------------------------
# Tokens


def check_tokens(
    trajectories: Sequence[Trajectory], recordings: Mapping[str, Sequence[Generation]], samples: Sequence[Sample]
) -> list[Finding]:
    """Compare the engine's own record with trajectories and samples: contexts, trained ids, mask.

    Each finding counts the episodes for which it holds and names the first for which it does not.
    """
    by_id = {sample.sample_id: sample for sample in samples}
    wrong: dict[str, list[str]] = {"context": [], "trained ids": [], "mask": []}
    dropped = n_generations = 0
    for trajectory in trajectories:
        sample = by_id.get(trajectory.trajectory_id)
        if sample is None:
            continue
        generations = recordings[trajectory.trajectory_id]
        n_generations += len(generations)
        dropped += sum(len(g.completion.token_ids) for g in generations) - sum(trajectory.loss_mask)
        for name, problem in _token_problems(trajectory, generations, sample):
            wrong[name].append(f"{trajectory.trajectory_id}: {problem}")
    meanings = {
        "context": "every generation continued exactly the tokens that stand before it in its sample",
        "trained ids": "the trained ids are the sampled ids, one for one",
        "mask": "the loss mask is true exactly where the engine sampled",
    }
    findings = [_verdict(name, len(by_id), wrong[name], meaning) for name, meaning in meanings.items()]
    if dropped:
        detail = f"{dropped} tokens of {n_generations} generations were sampled after the deciding tag and dropped"
        findings.append(Finding("overrun", Level.NOTE, detail, "use an engine that honours stop strings"))
    return findings


def _token_problems(
    trajectory: Trajectory, generations: Sequence[Generation], sample: Sample
) -> Iterator[tuple[str, str]]:
    """Yield (check, what is wrong) for one episode, the first of each kind."""
    turns = [segment for segment in trajectory.segments if segment.origin is Origin.MODEL]
    if len(turns) != len(generations):
        yield "trained ids", f"{len(generations)} generations became {len(turns)} turns"
        return
    ids = sample.token_ids
    sampled = [False] * len(ids)
    bad_context = bad_ids = None
    for turn, (segment, generation) in enumerate(zip(turns, generations, strict=True)):
        start, n = len(generation.context), len(segment.token_ids)
        for position in range(start, min(start + n, len(ids))):
            sampled[position] = True
        if bad_context is None and ids[:start] != generation.context:
            at = _first_difference(ids[:start], generation.context)
            bad_context = f"turn {turn} saw another token at position {at} than is trained on"
        if bad_ids is None and ids[start : start + n] != generation.completion.token_ids[:n]:
            at = _first_difference(ids[start : start + n], generation.completion.token_ids[:n])
            bad_ids = f"turn {turn}, token {at}: trained {ids[start + at : start + at + 1]}, sampled " + str(
                generation.completion.token_ids[at : at + 1]
            )
    if bad_context is not None:
        yield "context", bad_context
    if bad_ids is not None:
        yield "trained ids", bad_ids
    if tuple(sampled) != tuple(sample.loss_mask):
        yield "mask", f"differs first at position {_first_difference(sampled, sample.loss_mask)}"


def _first_difference(left: Sequence[object], right: Sequence[object]) -> int:
    shorter = min(len(left), len(right))
    return next((i for i in range(shorter) if left[i] != right[i]), shorter)


def _verdict(check: str, n: int, problems: Sequence[str], meaning: str) -> Finding:
    if not problems:
        return Finding(check, Level.OK, f"{n} of {n} episodes: {meaning}")
    detail = f"{len(problems)} of {n} episodes do not hold: {meaning}; first: {problems[0]}"
    return Finding(check, Level.FAIL, detail, "carry the engine's ids to the sample; never encode model text again")


# ---------------------------------------------------------------------------------------------------------------
# Text


def check_round_trip(trajectories: Sequence[Trajectory], tokenizer: Tokenizer) -> Finding:
    """Count the turns whose ids would change if their text were encoded again; show the first place."""
    turns = changed = 0
    example = ""
    for trajectory in trajectories:
        for segment in trajectory.segments:
            if segment.origin is not Origin.MODEL or not segment.token_ids:
                continue
            turns += 1
            ids = list(segment.token_ids)
            again = list(tokenizer.encode(tokenizer.decode(ids, skip_special_tokens=False), add_special_tokens=False))
            if again == ids:
                continue
            changed += 1
            if not example:
                at = _first_difference(ids, again)
                pieces = [tokenizer.decode([token], skip_special_tokens=False) for token in ids[at : at + 3]]
                anew = [tokenizer.decode([token], skip_special_tokens=False) for token in again[at : at + 3]]
                example = f"; first: {trajectory.trajectory_id} token {at}: sampled {pieces}, encoded again {anew}"
    if not changed:
        return Finding("round trip", Level.OK, f"all {turns} turns survive being decoded and encoded again")
    return Finding(
        "round trip",
        Level.NOTE,
        f"{changed} of {turns} turns would change if their text were encoded again{example}",
        "nothing to do here: ids are carried; programs that encode the text again train on other tokens",
    )


# ---------------------------------------------------------------------------------------------------------------
# Log-probs


@dataclass(frozen=True, slots=True)
class Gap:
    """How far two evaluations of the same tokens are apart, in nats. Of no tokens everything is 0."""

    tokens: int
    largest: float
    """Absolute."""
    mean: float
    """Absolute."""
    k1: float
    """Mean of engine minus trainer: estimates KL(engine || trainer), signed."""
    k3: float
    """Mean of r - 1 - log r with r = trainer / engine probability: the same, never negative."""

    @classmethod
    def of(cls, engine: NDArray[np.float64], trainer: NDArray[np.float64]) -> Gap:
        """Compare log-probs [M] of the same tokens."""
        if not len(engine):
            return cls(0, 0.0, 0.0, 0.0, 0.0)
        apart = np.abs(engine - trainer)
        k1, k3 = (float(ESTIMATORS[name](engine, trainer).mean()) for name in ("kl", "low_var_kl"))
        return cls(len(engine), float(apart.max()), float(apart.mean()), k1, k3)


@dataclass(frozen=True)
class Gaps:
    """The gaps of an audit: of all tokens, by turn, by position in the turn; and of whole episodes."""

    whole: Gap
    by_turn: Mapping[str, Gap]
    by_position: Mapping[str, Gap]
    largest_ratio: float
    """Largest |sum over an episode of (trainer - engine)|, in nats: what a sequence-level importance ratio sees."""


def measure_gaps(trajectories: Sequence[Trajectory], samples: Sequence[Sample]) -> Gaps:
    """Compare engine and trainer log-probs of scored samples (``old_logprobs`` filled in)."""
    turns_of = {trajectory.trajectory_id: _turn_and_position(trajectory) for trajectory in trajectories}
    columns: list[tuple[int, int, float, float]] = []
    largest = 0.0
    for sample in samples:
        if sample.old_logprobs is None:
            raise ValueError(f"sample {sample.sample_id} has no log-probs of the trainer")
        where = turns_of[sample.sample_id]
        rows = [
            (*where[position], sample.rollout_logprobs[position], sample.old_logprobs[position])
            for position, trained in enumerate(sample.loss_mask)
            if trained
        ]
        columns += rows
        largest = max(largest, abs(math.fsum(trainer - engine for _, _, engine, trainer in rows)))
    table = np.array(columns, dtype=np.float64).reshape(-1, 4)
    turn, position, engine, trainer = table.T
    by_turn = {str(t): Gap.of(engine[turn == t], trainer[turn == t]) for t in sorted(set(turn.astype(int).tolist()))}
    by_position = {}
    for low, high in pairwise((*POSITIONS, math.inf)):
        inside = (position >= low) & (position < high)
        if inside.any():
            name = f"{low}+" if high == math.inf else str(low) if high == low + 1 else f"{low}-{int(high) - 1}"
            by_position[name] = Gap.of(engine[inside], trainer[inside])
    return Gaps(Gap.of(engine, trainer), by_turn, by_position, largest)


def _turn_and_position(trajectory: Trajectory) -> list[tuple[int, int]]:
    """Return [L] (model turn, position in it); (-1, position) in segments of other origin."""
    found: list[tuple[int, int]] = []
    turn = -1
    for segment in trajectory.segments:
        mine = segment.origin is Origin.MODEL
        turn += mine
        found += [(turn if mine else -1, position) for position in range(len(segment.token_ids))]
    return found


def check_gaps(gaps: Gaps, max_gap: float, mean_gap: float) -> Finding:
    """Say whether engine and trainer agree within the limits (nats)."""
    whole = gaps.whole
    detail = (
        f"engine and trainer are apart by {whole.mean:.3g} nats on average (limit {mean_gap:.3g}), "
        f"{whole.largest:.3g} at most (limit {max_gap:.3g})"
    )
    if whole.largest <= max_gap and whole.mean <= mean_gap:
        return Finding("log-probs", Level.OK, detail)
    worst = max(gaps.by_turn, key=lambda name: gaps.by_turn[name].mean)
    return Finding(
        "log-probs",
        Level.FAIL,
        f"{detail}; worst on average in turn {worst}",
        "set rollout.dtype and model.dtype alike; if only later turns differ, suspect the engine's prefix cache; what "
        "remains is numerics: raise audit.max_gap or audit.mean_gap only if you correct for it",
    )
