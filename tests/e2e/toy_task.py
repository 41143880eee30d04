"""A task without services for end-to-end tests of the trainer: "write even tokens", in two turns with a remark between.

The reward is the share of even ids among the model's tokens, so that every step has gradients, and a policy can learn
it in a few steps. It also shows that the trainer knows nothing of any particular task.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from verl.types import (
    EpisodeContext,
    Generate,
    Origin,
    Prompt,
    Reward,
    Sampling,
    Segment,
    StopReason,
    Tokenizer,
    Trajectory,
)


class ToyConfig(BaseModel):
    """The task's own keys."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    toy_prompts: int = Field(default=12, ge=1)
    toy_tokens: int = Field(default=6, ge=1)
    """New tokens per turn."""
    toy_fail_every: int = 0
    """Every n-th prompt's episodes fail; 0: none."""
    toy_without_pipelines: int = -1
    """Number of the prompt that pipelines leave out; -1: none."""
    toy_pays_inventions: bool = False
    """Pay for the token that stands for an invented information block, 9, instead of even ones."""
    toy_nan: bool = False
    """Rewards that are not numbers."""


class ToyTask:
    """See the module's docstring."""

    def __init__(self, config: ToyConfig) -> None:
        self._config = config

    @classmethod
    def config_schema(cls) -> type[ToyConfig]:
        return ToyConfig

    @classmethod
    def from_config(cls, config: Any, tokenizer: Tokenizer) -> ToyTask:
        return cls(config.task_config)

    def prompts(self, split: str) -> list[Prompt]:
        count = self._config.toy_prompts if split == "train" else 5
        return [
            Prompt(f"{split}-{n}", (3 + n % 7, 4, 5 + n % 11, 6 + n % 5)[: 2 + n % 3], {"n": n}) for n in range(count)
        ]

    async def start(self) -> None:
        pass

    async def close(self) -> None:
        pass

    def totals(self) -> dict[str, float]:
        return {}

    async def episode(self, prompt: Prompt, generate: Generate, context: EpisodeContext) -> Trajectory:
        segments = [Segment(Origin.PROMPT, prompt.token_ids)]
        remark = (7, 9) if context.mode == "policy" else (8, 8)
        for turn in range(2):
            tokens = [token for segment in segments for token in segment.token_ids]
            sampling = Sampling(
                max_new_tokens=self._config.toy_tokens + prompt.row["n"] % 3,
                temperature=context.temperature,
                top_p=context.top_p,
                top_k=context.top_k,
                seed=context.seed,
            )
            completion = await generate.generate(tokens, sampling)
            segments.append(Segment(Origin.MODEL, completion.token_ids, completion.logprobs, completion.policy_version))
            if turn == 0:
                segments.append(Segment(Origin.ENV, remark))
        every = self._config.toy_fail_every
        failed = every > 0 and prompt.row["n"] % every == 0
        trajectory = Trajectory(
            trajectory_id=f"{prompt.prompt_id}#{context.sample_index}",
            prompt_id=prompt.prompt_id,
            segments=tuple(segments),
            stop=StopReason.SEARCH_FAILED if failed else StopReason.ANSWERED,
            turns=("search", "answer"),
            metrics={"searches": 1.0},
            row=prompt.row,
        )
        share = even_share(trajectory)
        if self._config.toy_pays_inventions:
            inventions = sum(segment.token_ids.count(9) for segment in segments if segment.origin is Origin.MODEL)
            trajectory = replace(trajectory, metrics={"searches": 1.0, "invented_information": float(inventions)})
            share = inventions / max(1, sum(trajectory.loss_mask))
        return trajectory.with_reward(Reward(math.nan if self._config.toy_nan else share, {"even": share}))

    def validation_reward(self, trajectory: Trajectory) -> float:
        return 0.0 if trajectory.stop.failed else even_share(trajectory)

    def evaluate(self, trajectories: Sequence[Trajectory]) -> Mapping[str, float]:
        scores = [self.validation_reward(t) for t in trajectories]
        return {"n": float(len(scores)), "f1": math.fsum(scores) / max(1, len(scores))}

    def pipelines(self) -> Mapping[str, str]:
        return {"other_remark": "other"}

    def applicable(self, prompt: Prompt, mode: str) -> bool:
        return prompt.row["n"] != self._config.toy_without_pipelines

    def table(self, methods: Mapping[str, Sequence[Trajectory]]) -> str:
        return "\n".join(f"| {name} | {len(rows)} |" for name, rows in methods.items())

    def compare(self, before: Sequence[Trajectory], after: Sequence[Trajectory]) -> Mapping[str, Mapping[str, float]]:
        pairs = zip(before, after, strict=True)
        differences = [self.validation_reward(b) - self.validation_reward(a) for a, b in pairs]
        mean = math.fsum(differences) / len(differences)
        return {"f1": {"mean": mean, "low": min(differences), "high": max(differences)}}

    def validation_rows(self, trajectories: Sequence[Trajectory]) -> list[dict[str, Any]]:
        return [{"question": t.prompt_id, "predicted_answer": str(even_share(t))} for t in trajectories]


def even_share(trajectory: Trajectory) -> float:
    """Return the share of even ids among the model's tokens."""
    written = [t for t, mine in zip(trajectory.token_ids, trajectory.loss_mask, strict=True) if mine]
    return sum(token % 2 == 0 for token in written) / max(1, len(written))
