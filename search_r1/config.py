"""The task's own config keys, as the typed model that ``SearchTask.config_schema`` hands to the loader."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator


class _Section(BaseModel):
    """Frozen; unknown keys are refused, and so are numbers without end."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)


class RetrieverConfig(_Section):
    """Where searches go and how long they may take."""

    url: str = "http://127.0.0.1:8002/retrieve"
    """Address of the ``/retrieve`` endpoint; ``/readyz`` and ``/info`` are looked for beside it."""
    topk: int = Field(default=3, ge=1)
    """Passages per query."""
    timeout_s: float = Field(default=30.0, gt=0)
    """Seconds one attempt may take as a whole, however slowly the bytes trickle."""
    deadline_s: float = Field(default=120.0, gt=0)
    """Seconds one search may take in all: attempts, pauses between them, and queries of a batch sent again alone."""
    retries: int = Field(default=3, ge=0)
    """Further attempts after the first, on connection errors, 429, 5xx and answers of a wrong shape."""
    backoff_s: float = Field(default=0.5, ge=0)
    """Pause before the first retry; doubles each time, with jitter."""
    start_timeout_s: float = Field(default=600.0, gt=0)
    """Seconds to wait at start for a service that answers but is still loading."""
    api_key_env: str | None = None
    """Name of the environment variable that holds a bearer token; the token itself never stands in a config."""

    @field_validator("url")
    @classmethod
    def _names_an_endpoint(cls, url: str) -> str:
        """Refuse what cannot be asked; a bare ``http://host:port`` means its ``/retrieve``."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{url!r} is no address; expected http://HOST:PORT/retrieve")
        _ = parts.port  # raises ValueError for a port that is none
        return url if parts.path.strip("/") else f"{parts.scheme}://{parts.netloc}/retrieve"


class RewardConfig(_Section):
    """How an episode is scored. ``preset`` picks the formula, ``function`` the answer metric."""

    preset: Literal["none", "auto", "chatr1", "search_r1"] = "none"
    """``none``: the answer metric alone. ``auto``: shaped, search_r1's formula for EM sources, chatr1's for F1 ones."""
    function: Literal["auto", "em", "f1", "sub_em"] = "auto"
    """``auto`` looks the metric up by the row's ``data_source``."""
    f1_mode: Literal["multiset", "chatr1"] = "multiset"
    """``multiset`` is SQuAD's F1; ``chatr1`` counts shared words once, as the published reward does."""
    intent_placement: Literal["terminal", "turn"] = "terminal"
    """Where the intent reward is paid: on the last model token, or on the turn that wrote the best query."""
    rewrite_score: float = Field(default=0.0, ge=0)
    """Weight of the intent reward, max over executed queries of F1(query, gold rewrite). Published run: 0.2."""
    retrieval_score: float = Field(default=0.0, ge=0)
    """Weight of having retrieved the gold passage (chatr1) or a passage with the answer (search_r1)."""
    structure_format_score: float = Field(default=0.0, ge=0)
    """Weight of a valid think/search/answer structure."""
    final_format_score: float = Field(default=0.0, ge=0)
    """search_r1's formula only: score of a wrong answer in an invalid structure."""

    @model_validator(mode="after")
    def _shaping_needs_a_preset(self) -> RewardConfig:
        weights = ("rewrite_score", "retrieval_score", "structure_format_score", "final_format_score")
        given = [name for name in weights if getattr(self, name) > 0]
        if self.preset == "none" and given:
            raise ValueError(
                f"{', '.join(given)} would have no effect with preset=none; "
                "set reward_model.preset=auto (or run verl.trainer.main_ppo_format)"
            )
        return self


class SearchConfig(_Section):
    """Top-level keys owned by the task. The validated instance travels as ``RunConfig.task_config``."""

    max_turns: int = Field(default=10, ge=0)
    """Turns with tools; one last generation follows whose search is not executed."""
    do_search: bool = True
    """False: a single generation without tools."""
    retriever: RetrieverConfig = RetrieverConfig()
    reward_model: RewardConfig = RewardConfig()

    def notes(self, run: Any) -> list[str]:
        """Return what ``--check`` says about this run's episodes: legal, but worth a look."""
        data = run.data
        room = data.max_prompt_length + data.max_response_length
        turns = self.max_turns if self.do_search else 0
        turn = data.max_response_length + data.max_obs_length
        needed = data.max_start_length + turns * turn + data.max_response_length
        if needed <= room:
            return []
        return [
            f"an episode of {turns} searches with everything at its longest needs {needed} tokens, the context has "
            f"{room}: such episodes end early; they fit with data.max_prompt_length={needed - data.max_response_length}"
        ]


@dataclass(frozen=True, slots=True)
class EpisodeSettings:
    """The limits of one episode, all lengths in tokens."""

    max_turns: int
    do_search: bool
    max_start_length: int
    """Longest first prompt."""
    max_prompt_length: int
    max_response_length: int
    """Longest single generation."""
    max_obs_length: int
    """Longest observation, its shell included."""
    topk: int

    @property
    def context_limit(self) -> int:
        """Longest whole episode: prompt, generations and observations together."""
        return self.max_prompt_length + self.max_response_length

    @classmethod
    def from_config(cls, config: Any) -> EpisodeSettings:
        """Read the limits from a run config (``data.*`` and the task's section)."""
        task: SearchConfig = config.task_config
        return cls(
            max_turns=task.max_turns,
            do_search=task.do_search,
            max_start_length=config.data.max_start_length,
            max_prompt_length=config.data.max_prompt_length,
            max_response_length=config.data.max_response_length,
            max_obs_length=config.data.max_obs_length,
            topk=task.retriever.topk,
        )


def search_config(values: Mapping[str, Any]) -> SearchConfig:
    """Validate a plain mapping; raises pydantic's ValidationError with every mistake at once."""
    return SearchConfig.model_validate(values)
