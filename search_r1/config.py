"""The task's own config keys, as the typed model that ``SearchTask.config_schema`` hands to the loader."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args
from urllib.parse import urlsplit

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, field_validator, model_validator

from verl.errors import ConfigError
from verl.registry import closest, import_object


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

    preset: str = "none"
    """``none``: the answer metric alone. ``auto``: shaped, search_r1's formula for EM sources, chatr1's for F1 ones.
    ``chatr1``, ``search_r1``: that formula for all. ``module:function``: one's own."""
    function: str = "auto"
    """Answer metric: ``em``, ``sub_em``, ``f1``, ``module:function``, or ``auto``: by the row's ``data_source``."""
    f1_mode: Literal["multiset", "chatr1"] = "multiset"
    """``multiset`` is SQuAD's F1; ``chatr1`` counts shared words once, as the published reward does."""
    normaliser: Literal["squad", "multilingual"] = "squad"
    """Of rewards and evaluation. ``multilingual``: Unicode punctuation, and characters as words in unspaced scripts."""
    intent_placement: Literal["terminal", "turn"] = "terminal"
    """Where the intent reward is paid: on the last model token, or on the turn that wrote the best query."""
    retrieval_match: Literal["auto", "id", "text"] = "auto"
    """How passages are known to be gold: by id, by the gold text standing in them, or by id where the row has ids."""
    answer_score: float = Field(default=1.0, ge=0)
    """Weight of the answer metric in chatr1's formula; 0 leaves it to the judge. Ours."""
    rewrite_score: float = Field(default=0.0, ge=0)
    """Weight of the intent reward, max over executed queries of F1(query, gold rewrite). Published run: 0.2."""
    retrieval_score: float = Field(default=0.0, ge=0)
    """Weight of having retrieved the gold passage (chatr1) or a passage with the answer (search_r1)."""
    recall_score: float = Field(default=0.0, ge=0)
    """Weight of the share of the gold passages that was retrieved. Ours."""
    structure_format_score: float = Field(default=0.0, ge=0)
    """Weight of a valid think/search/answer structure."""
    final_format_score: float = Field(default=0.0, ge=0)
    """search_r1's formula only: score of a wrong answer in an invalid structure."""
    judge_score: float = Field(default=0.0, ge=0)
    """Weight of the judge's score of the answer (``judge.*``). Ours."""
    search_cost: float = Field(default=0.0, ge=0)
    """Taken off for every executed search beyond ``free_searches``. Ours."""
    free_searches: int = Field(default=0, ge=0)
    """Searches that cost nothing. Ours."""
    invalid_cost: float = Field(default=0.0, ge=0)
    """Taken off for every turn without an action (empty query, malformed, cut, ended). Ours."""

    @field_validator("preset", "function")
    @classmethod
    def _is_known(cls, name: str, info: ValidationInfo) -> str:
        """Refuse unknown names, and import a function of one's own now: it is needed only after the first rollouts."""
        known = _REWARD_NAMES[str(info.field_name)]
        if ":" not in name and name not in known:
            raise ValueError(f"{name!r} is none of {', '.join(known)}, module:function{closest(name, list(known))}")
        try:
            if ":" in name and not callable(import_object(name, f"reward_model.{info.field_name}")):
                raise ValueError(f"{name!r} is not a function")
        except ConfigError as error:
            raise ValueError(str(error)) from error
        return name

    @model_validator(mode="after")
    def _weights_have_an_effect(self) -> RewardConfig:
        given = {name for name in _WEIGHTS if getattr(self, name) != type(self).model_fields[name].default}
        idle = sorted(given & set(_WEIGHTS_WITHOUT_EFFECT.get(self.preset, ())))
        if idle:
            raise ValueError(
                f"{', '.join(idle)} would have no effect with preset={self.preset}; "
                "set reward_model.preset=auto (or run verl.trainer.main_ppo_format)"
            )
        if self.free_searches and not self.search_cost:
            raise ValueError("free_searches would have no effect with search_cost=0; set reward_model.search_cost")
        return self


_REWARD_NAMES: Mapping[str, tuple[str, ...]] = {
    "preset": ("none", "auto", "chatr1", "search_r1"),
    "function": ("auto", "em", "f1", "sub_em"),
}
_SHAPING = ("answer_score", "rewrite_score", "recall_score", "judge_score")
_COSTS = ("search_cost", "invalid_cost")
_WEIGHTS = (*_SHAPING, *_COSTS, "retrieval_score", "structure_format_score", "final_format_score")
_WEIGHTS_WITHOUT_EFFECT: Mapping[str, tuple[str, ...]] = {
    "none": _WEIGHTS,
    "chatr1": ("final_format_score",),
    "search_r1": _SHAPING,
}
"""A formula of one's own may use every weight, and so may ``auto``, which is both published ones."""


class JudgeConfig(_Section):
    """A language model that scores answers: any endpoint that speaks OpenAI's chat completions. Ours."""

    url: str | None = None
    """Base address, as ``http://127.0.0.1:8000/v1``; null: no judge."""
    model: str = ""
    """Name of the model at the endpoint."""
    prompt: Literal["graded-1", "correct-1"] = "graded-1"
    """Versioned prompt: ``graded-1`` asks for 1 to 5 (scored 0 to 1), ``correct-1`` for right or wrong."""
    api_key_env: str | None = None
    """Name of the environment variable that holds the key."""
    max_tokens: int = Field(default=512, ge=1)
    """Length of a reply, reasoning included."""
    timeout_s: float = Field(default=60.0, gt=0)
    """Seconds one attempt may take."""
    retries: int = Field(default=3, ge=0)
    """Further attempts after the first, on connection errors, 408, 429 and 5xx."""
    backoff_s: float = Field(default=1.0, ge=0)
    """Pause before the first retry; doubles each time, with jitter; a longer Retry-After is honoured."""
    max_concurrent: int = Field(default=16, ge=1)
    """Requests of one process under way at the same time."""
    cache_path: str | None = ".cache/judge.sqlite"
    """File of replies, shared by processes and runs; null: ask again every time."""
    input_price: float = Field(default=0.0, ge=0)
    """Money per million prompt tokens, for the cost that is shown."""
    output_price: float = Field(default=0.0, ge=0)
    """Money per million reply tokens."""

    @model_validator(mode="after")
    def _is_complete(self) -> JudgeConfig:
        if self.url is not None:
            parts = urlsplit(self.url)
            if parts.scheme not in ("http", "https") or not parts.hostname:
                raise ValueError(f"judge.url={self.url!r} is no address; expected http://HOST:PORT/v1")
            if not self.model:
                raise ValueError(f"judge.model is empty; name the model that {self.url} serves")
        return self


PipelineName = Literal[
    "closed_book",
    "raw_question",
    "questions_only",
    "history_question",
    "own_rewrite",
    "gold_query",
    "oracle_passage",
]
"""The fixed pipelines: what is searched for, or handed over, in place of the policy's own searches."""


def _named(value: Any) -> Any:
    """``all`` is every pipeline, and one name a list of one."""
    if value == "all":
        return get_args(PipelineName)
    return (value,) if isinstance(value, str) else value


class EvaluationConfig(_Section):
    """What evaluations measure beside their standard figures. Ours."""

    pipelines: Annotated[tuple[PipelineName, ...], BeforeValidator(_named)] = (
        "closed_book",
        "raw_question",
        "questions_only",
        "history_question",
        "gold_query",
    )
    """Fixed pipelines that ``job.evaluate_bounds`` runs, in this order, or ``all``. See docs/evaluation.md."""
    reader: Literal["own", "opened"] = "own"
    """How pipelines read: ``own``: the model thinks and answers as in its episodes. ``opened``: the answer block is
    opened for it, and what it writes to its end is the answer; for models that were never trained on the tags."""
    passages: str | None = None
    """Corpus (JSONL) in which the passages of ``oracle_passage`` are looked up; rows with their own text need none."""
    bertscore_model: str | None = None
    """Folder of the encoder of BERTScore; null: not computed. Needs the package bert-score."""
    bertscore_layer: int | None = Field(default=None, ge=1)
    """Hidden layer that is compared; null: the last."""
    judge: bool = False
    """Have the answers graded by the judge of ``judge.*``."""


class SearchConfig(_Section):
    """Top-level keys owned by the task. The validated instance travels as ``RunConfig.task_config``."""

    max_turns: int = Field(default=10, ge=0)
    """Turns with tools; one last generation follows whose search is not executed."""
    do_search: bool = True
    """False: a single generation without tools."""
    retriever: RetrieverConfig = RetrieverConfig()
    reward_model: RewardConfig = RewardConfig()
    judge: JudgeConfig = JudgeConfig()
    evaluation: EvaluationConfig = EvaluationConfig()

    @model_validator(mode="after")
    def _judge_is_there(self) -> SearchConfig:
        paid, graded = self.reward_model.judge_score > 0, self.evaluation.judge
        if self.judge.url is None and (paid or graded):
            key = "reward_model.judge_score" if paid else "evaluation.judge"
            raise ValueError(f"{key} needs a judge; set judge.url and judge.model")
        return self

    @property
    def generations(self) -> int:
        """The most generations of one episode."""
        return self.max_turns + 1 if self.do_search else 1

    def notes(self, run: Any) -> list[str]:
        """Return what ``--check`` says about this run's episodes: legal, but worth a look."""
        data = run.data
        room = data.max_prompt_length + data.max_response_length
        turns = self.max_turns if self.do_search else 0
        turn = data.max_response_length + data.max_obs_length
        needed = data.max_start_length + turns * turn + data.max_response_length
        found = []
        blind = ("grpo", "dr_grpo", "rloo", "reinforce_plus_plus_baseline")
        if self.reward_model.intent_placement == "turn" and run.algorithm.adv_estimator in blind:
            found.append(
                f"intent_placement=turn changes nothing with adv_estimator={run.algorithm.adv_estimator}, which "
                "compares whole scores; turn_grpo sees the turn"
            )
        if needed > room:
            fits = needed - data.max_response_length
            found.append(
                f"an episode of {turns} searches with everything at its longest needs {needed} tokens, the context "
                f"has {room}: such episodes end early; they fit with data.max_prompt_length={fits}"
            )
        return found


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
    reader: str = "own"
    """``evaluation.reader``: how the fixed pipelines read."""

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
            reader=task.evaluation.reader,
        )


def search_config(values: Mapping[str, Any]) -> SearchConfig:
    """Validate a plain mapping; raises pydantic's ValidationError with every mistake at once."""
    return SearchConfig.model_validate(values)
