"""How long episodes are: taken from the rollouts of an earlier run, or assumed from the limits of the recipe."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl.errors import DataError


@dataclass(frozen=True)
class Turn:
    """One generation and what follows it."""

    generated: int
    """Tokens the model writes."""
    observed: int
    """Tokens of the observation behind it; 0: none."""
    searched: bool
    """The observation comes from the retrieval service."""


@dataclass(frozen=True)
class Episode:
    """Example: ``Episode(800, (Turn(60, 400, True), Turn(40, 0, False)))`` searches once, then answers."""

    prompt: int
    """Tokens."""
    turns: tuple[Turn, ...]

    @property
    def model_tokens(self) -> int:
        """Tokens that are trained on."""
        return sum(turn.generated for turn in self.turns)

    @property
    def searches(self) -> int:
        """Queries to the retrieval service."""
        return sum(turn.searched for turn in self.turns)

    @property
    def length(self) -> int:
        """All tokens."""
        return self.prompt + sum(turn.generated + turn.observed for turn in self.turns)

    @property
    def pairs(self) -> float:
        """(query, visible key) pairs of causal attention over the whole episode."""
        return self.length * (self.length + 1) / 2


def recorded_episodes(run: Path) -> list[Episode]:
    """Return the episodes in ``rollouts/step_*.jsonl`` of a run's folder; raises DataError when there are none."""
    files = sorted((run / "rollouts").glob("step_*.jsonl"))
    rows = [json.loads(line) for file in files for line in file.read_text(encoding="utf-8").splitlines()]
    episodes = [episode for row in rows if (episode := _recorded(row)).turns]
    if not episodes:
        raise DataError(f"--lengths {run}: there are no episodes in {run}/rollouts/step_*.jsonl")
    return episodes


def _recorded(row: Any) -> Episode:
    """Read a trajectory record: the prompt, then what the model wrote and what was appended to it."""
    searched = {search["turn"] for search in row["searches"]}
    prompt, turns = 0, list[Turn]()
    for segment in row["segments"]:
        size = len(segment["token_ids"])
        if segment["origin"] == "prompt":
            prompt += size
        elif segment["origin"] == "model":
            turns.append(Turn(max(1, size), 0, False))
        elif turns:
            last = turns[-1]
            turns[-1] = Turn(last.generated, last.observed + size, len(turns) - 1 in searched)
    return Episode(prompt, tuple(turns))


@dataclass(frozen=True)
class Assumption:
    """Episodes where none were recorded. Tokens per turn are log-normal, since lengths have a long right tail."""

    prompt_share: float = 0.5
    """Mean prompt, as a share of ``data.max_start_length``; uniform between nothing and twice it."""
    turn_share: float = 0.2
    """Median generation, as a share of ``data.max_response_length``."""
    sigma: float = 0.6
    """Standard deviation of the logarithm of a generation's tokens."""
    observation_share: float = 0.8
    """Observation, as a share of ``data.max_obs_length``."""
    answers: float = 0.5
    """Probability that a turn behind the first answers, which ends the episode."""


def assumed_episodes(data: Any, generations: int, count: int, seed: int, by: Assumption) -> list[Episode]:
    """Draw ``count`` episodes of at most ``generations`` turns within the limits of ``data`` (its config section)."""
    draw = random.Random(seed)
    return [_assumed(data, generations, draw, by) for _ in range(count)]


def _assumed(data: Any, generations: int, draw: random.Random, by: Assumption) -> Episode:
    room = data.max_prompt_length + data.max_response_length
    prompt = max(1, min(data.max_start_length, round(draw.uniform(0, 2) * by.prompt_share * data.max_start_length)))
    room -= prompt
    turns: list[Turn] = []
    for number in range(generations):
        median = max(1.0, by.turn_share * data.max_response_length)
        size = round(median * math.exp(draw.gauss(0.0, by.sigma)))
        size = max(1, min(size, data.max_response_length, room))
        room -= size
        last = number + 1 == generations or (number > 0 and draw.random() < by.answers)
        observed = 0 if last else round(by.observation_share * data.max_obs_length)
        turns.append(Turn(size, observed if observed < room else 0, observed > 0 and observed < room))
        room -= turns[-1].observed
        if not turns[-1].observed:
            break
    return Episode(prompt, tuple(turns))


def resample(episodes: Sequence[Episode], count: int, seed: int) -> list[Episode]:
    """Return ``count`` episodes in random order, one from the middle of each ``count``-th part of the lengths."""
    ordered = sorted(episodes, key=lambda episode: episode.length)
    chosen = [ordered[int((i + 0.5) * len(ordered) / count)] for i in range(count)]
    random.Random(seed).shuffle(chosen)
    return chosen
