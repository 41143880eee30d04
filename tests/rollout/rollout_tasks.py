"""Tasks for the tests of worker and manager, imported by path as a run's task is."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import psutil

from search_r1.task import SearchTask
from search_r1.testing import DictionarySearch
from verl.errors import RetrievalError
from verl.types import (
    Completion,
    Document,
    EpisodeContext,
    Generate,
    Origin,
    Prompt,
    Reward,
    Sampling,
    Segment,
    StopReason,
    Trajectory,
)


class TwoTurns:
    """Generates, waits as for a search, appends a token, generates again. ``row['do']`` makes it go wrong."""

    def __init__(self) -> None:
        self.started = 0
        self.episodes = 0

    @classmethod
    def from_config(cls, config: Any, tokenizer: Any) -> TwoTurns:
        return cls()

    async def start(self) -> None:
        self.started += 1

    async def close(self) -> None:
        self.started -= 1

    def totals(self) -> dict[str, float]:
        return {"requests": float(self.episodes)}

    async def episode(self, prompt: Prompt, generate: Generate, context: EpisodeContext) -> Trajectory:
        assert self.started == 1
        self.episodes += 1
        await self._misbehave(prompt.row.get("do"), generate)
        segments = [Segment(Origin.PROMPT, prompt.token_ids)]
        for turn in range(2):
            ids = [token for segment in segments for token in segment.token_ids]
            sampling = Sampling(6, context.temperature, context.top_p, context.top_k, seed=context.seed + turn)
            completion = await generate.generate(ids, sampling)
            segments.append(Segment(Origin.MODEL, completion.token_ids, completion.logprobs, completion.policy_version))
            if turn == 0:
                await asyncio.sleep(0.001 * (context.seed % 7))
                segments.append(Segment(Origin.ENV, (9, 9)))
        return Trajectory(
            trajectory_id=f"{prompt.prompt_id}#{context.sample_index}",
            prompt_id=prompt.prompt_id,
            segments=tuple(segments),
            stop=StopReason.ANSWERED,
            reward=Reward(1.0, failure="the judge is silent" if prompt.row.get("do") == "unjudged" else None),
            row=prompt.row,
        )

    async def _misbehave(self, what: str | None, generate: Generate) -> None:
        if what == "hang":
            await asyncio.sleep(60)
        if what == "too long":
            await generate.generate([5] * 1000, Sampling(5))
        if what == "no service":
            raise RetrievalError("connection refused by port 8002")
        if what == "no service after a turn":
            await generate.generate([5, 6], Sampling(6, seed=1))
            raise RetrievalError("connection refused by port 8002")
        if what == "bug":
            raise KeyError("a fault of the program")
        if what == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        once, _, flag = (what or "").partition(" unless ")
        if flag and not os.path.exists(flag):
            Path(flag).touch()
            victims = [os.getpid()] if once == "die" else _engine_processes()
            for victim in victims:
                os.kill(victim, signal.SIGKILL)


def _engine_processes() -> list[int]:
    """Return the ids of the engine processes that this one has started."""
    children = psutil.Process().children(recursive=True)
    found = [child.pid for child in children if "EngineCore" in " ".join((child.name(), *child.cmdline()))]
    assert found, [child.cmdline() for child in children]
    return found


class OfflineSearchTask(SearchTask):
    """The real task over a dictionary instead of a service; remembers what the engine sampled."""

    sampled: dict[str, list[Completion]] = {}  # noqa: RUF012 - shared with the test on purpose

    @classmethod
    def from_config(cls, config: Any, tokenizer: Any) -> OfflineSearchTask:
        passages = (Document("1", "Paris", "Paris lies on the Seine."), Document("2", "Rome", "Rome is old."))
        return cls(config, tokenizer, search=DictionarySearch({f"q{i}": passages for i in range(0, 24, 2)}))

    async def episode(self, prompt: Prompt, generate: Generate, context: EpisodeContext) -> Trajectory:
        key = f"{prompt.prompt_id}#{context.sample_index}"
        return await super().episode(prompt, _Recording(generate, self.sampled.setdefault(key, [])), context)


class _Recording:
    def __init__(self, generate: Generate, completions: list[Completion]) -> None:
        self._generate = generate
        self._completions = completions

    async def generate(self, token_ids: Any, sampling: Sampling) -> Completion:
        self._completions.append(await self._generate.generate(token_ids, sampling))
        return self._completions[-1]
