"""The types that flow between task, rollout and trainer, and the protocols at the seams.

Conversation -> Prompt -> (episode) -> Trajectory -> (rewards) -> Group -> Sample -> (advantage) -> MicroBatch
-> StepStats

Legend of lengths: P prompts of a step, G samples per prompt, N = P * G trajectories, L tokens of one trajectory,
S tokens of one segment. Nothing here imports torch, ray, vllm or transformers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from typing import Any, Protocol, runtime_checkable

# ---------------------------------------------------------------------------------------------------------------
# Episodes


class Origin(StrEnum):
    """Who wrote a segment. The loss mask is derived from this and from nothing else."""

    PROMPT = "prompt"
    MODEL = "model"
    ENV = "env"


class StopReason(StrEnum):
    """Why an episode ended; every episode has exactly one."""

    ANSWERED = "answered"
    TURN_LIMIT = "turn_limit"
    RESPONSE_LENGTH = "response_length"
    CONTEXT_LENGTH = "context_length"
    SEARCH_FAILED = "search_failed"
    ENGINE_FAILED = "engine_failed"
    ABORTED = "aborted"

    @property
    def failed(self) -> bool:
        """True when the episode says nothing about the policy: excluded from the loss, zero in evaluation."""
        return self in (StopReason.SEARCH_FAILED, StopReason.ENGINE_FAILED, StopReason.ABORTED)


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of tokens from one origin. Example: ``Segment(Origin.MODEL, (5, 9), (-0.1, -2.3), policy_version=4)``."""

    origin: Origin
    token_ids: tuple[int, ...]
    """[S] exactly as sampled (model) or as encoded once, on its own (prompt, env)."""
    logprobs: tuple[float, ...] | None = None
    """[S] natural log of the sampling distribution before top-p/top-k; present iff origin is MODEL."""
    policy_version: int | None = None
    """Weight version that sampled the segment; present iff origin is MODEL."""

    def __post_init__(self) -> None:
        is_model = self.origin is Origin.MODEL
        if is_model != (self.logprobs is not None) or is_model != (self.policy_version is not None):
            raise ValueError(f"log-probs and policy version belong to model segments only, got {self.origin}")
        if self.logprobs is not None and len(self.logprobs) != len(self.token_ids):
            raise ValueError(f"{len(self.token_ids)} token ids but {len(self.logprobs)} log-probs")


@dataclass(frozen=True, slots=True)
class Document:
    """One retrieved passage as the policy saw it. ``score`` is the retriever's, higher is better."""

    id: str
    title: str
    text: str
    score: float | None = None


@dataclass(frozen=True, slots=True)
class SearchCall:
    """One executed search of an episode."""

    turn: int
    """Turn index, from 0, of the generation that asked."""
    query: str
    documents: tuple[Document, ...] = ()
    """In rank order; empty when nothing matched or the search failed."""
    seconds: float = 0.0
    """Wall time from request to answer, retries included."""
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Reward:
    """The score of one trajectory. ``total`` is what is trained on; ``parts`` say where it came from."""

    total: float
    parts: Mapping[str, float | None] = field(default_factory=dict)
    """Unweighted parts by name; None means that the supervision is not available for this row."""
    turn_rewards: Mapping[int, float] = field(default_factory=dict)
    """Turn -> the share of ``total`` placed on its last model token; the rest goes on the last model token of all."""
    failure: str | None = None
    """Why a part that is paid could not be computed: the episode is left out of the loss and counted."""


@dataclass(frozen=True)
class Prompt:
    """One question, rendered and encoded, ready for an episode."""

    prompt_id: str
    """Unique in its split; groups are keyed by it."""
    token_ids: tuple[int, ...]
    """[S] the whole first context of the model."""
    row: Mapping[str, Any]
    """The task's own row (question, history, answers, rewrite ...); opaque to the trainer, JSON-serialisable."""


@dataclass(frozen=True)
class Trajectory:
    """One finished episode. Append-only while it runs, frozen here; also the record on disk (``to_record``).

    Example: prompt [7, 8], model [1, 2], env [9], model [3] gives token_ids [7, 8, 1, 2, 9, 3], loss_mask
    [0, 0, 1, 1, 0, 1] and n_turns 2.
    """

    trajectory_id: str
    """``<prompt_id>#<sample index>``, unique in a step."""
    prompt_id: str
    segments: tuple[Segment, ...]
    stop: StopReason
    searches: tuple[SearchCall, ...] = ()
    turns: tuple[str, ...] = ()
    """Outcome of each model turn: search, answer, empty_query, malformed, length, eos."""
    prediction: str | None = None
    """What the task read as the answer, stripped; None when there is none."""
    reward: Reward | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Per-episode figures of the task, averaged by the loop."""
    seconds: float = 0.0
    row: Mapping[str, Any] = field(default_factory=dict)
    """The prompt's row, so that a record can be re-scored on its own."""

    @cached_property
    def token_ids(self) -> tuple[int, ...]:
        """[L] all tokens in order."""
        return tuple(token for segment in self.segments for token in segment.token_ids)

    @cached_property
    def loss_mask(self) -> tuple[bool, ...]:
        """[L] true exactly where the model wrote the token."""
        return tuple(s.origin is Origin.MODEL for s in self.segments for _ in s.token_ids)

    @cached_property
    def logprobs(self) -> tuple[float, ...]:
        """[L] engine log-probs, 0.0 where the mask is false."""
        return tuple(
            value
            for s in self.segments
            for value in (s.logprobs if s.logprobs is not None else (0.0,) * len(s.token_ids))
        )

    @cached_property
    def turn_ends(self) -> tuple[int, ...]:
        """[n_turns] position in ``token_ids`` of the last token of each model turn that has tokens."""
        ends, position = [], 0
        for segment in self.segments:
            position += len(segment.token_ids)
            if segment.origin is Origin.MODEL and segment.token_ids:
                ends.append(position - 1)
        return tuple(ends)

    @property
    def n_turns(self) -> int:
        """Number of generations of the model."""
        return sum(s.origin is Origin.MODEL for s in self.segments)

    def with_reward(self, reward: Reward) -> Trajectory:
        """Return a copy that carries the reward."""
        return replace(self, reward=reward)

    def to_record(self) -> dict[str, Any]:
        """Return the JSON form written to ``rollouts/step_N.jsonl``; ``from_record`` inverts it exactly."""
        return {
            "trajectory_id": self.trajectory_id,
            "prompt_id": self.prompt_id,
            "stop": self.stop.value,
            "turns": list(self.turns),
            "prediction": self.prediction,
            "reward": None
            if self.reward is None
            else {
                "total": self.reward.total,
                "parts": dict(self.reward.parts),
                "turn_rewards": {str(turn): value for turn, value in self.reward.turn_rewards.items()},
                "failure": self.reward.failure,
            },
            "segments": [
                {
                    "origin": s.origin.value,
                    "token_ids": list(s.token_ids),
                    "logprobs": None if s.logprobs is None else list(s.logprobs),
                    "policy_version": s.policy_version,
                }
                for s in self.segments
            ],
            "searches": [
                {
                    "turn": call.turn,
                    "query": call.query,
                    "documents": [
                        {"id": d.id, "title": d.title, "text": d.text, "score": d.score} for d in call.documents
                    ],
                    "seconds": call.seconds,
                    "error": call.error,
                }
                for call in self.searches
            ],
            "metrics": dict(self.metrics),
            "seconds": self.seconds,
            "row": dict(self.row),
        }

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Trajectory:
        """Rebuild a trajectory from ``to_record``'s form; raises KeyError on a missing field."""
        reward = record["reward"]
        return cls(
            trajectory_id=record["trajectory_id"],
            prompt_id=record["prompt_id"],
            stop=StopReason(record["stop"]),
            turns=tuple(record["turns"]),
            prediction=record["prediction"],
            reward=None
            if reward is None
            else Reward(
                reward["total"],
                reward["parts"],
                {int(turn): value for turn, value in reward["turn_rewards"].items()},
                reward.get("failure"),  # records of before 0.2 have none
            ),
            segments=tuple(
                Segment(
                    Origin(s["origin"]),
                    tuple(s["token_ids"]),
                    None if s["logprobs"] is None else tuple(s["logprobs"]),
                    s["policy_version"],
                )
                for s in record["segments"]
            ),
            searches=tuple(
                SearchCall(
                    c["turn"], c["query"], tuple(Document(**d) for d in c["documents"]), c["seconds"], c["error"]
                )
                for c in record["searches"]
            ),
            metrics=record["metrics"],
            seconds=record["seconds"],
            row=record["row"],
        )


@dataclass(frozen=True)
class Group:
    """The trajectories of one prompt in one step, failed ones included."""

    prompt_id: str
    trajectories: tuple[Trajectory, ...]
    """[G]"""


# ---------------------------------------------------------------------------------------------------------------
# Training


# Fields of a Sample that have one entry per token, beside ``token_ids``.
_COLUMNS = (
    "loss_mask", "rewards", "rollout_logprobs", "old_logprobs", "ref_logprobs", "values", "advantages", "returns",
    "correction",
)  # fmt: skip


@dataclass(frozen=True)
class Sample:
    """One trajectory as the trainer sees it: flat lists, all of length L.

    Produced by ``verl.data.samples.assemble``; ``old_logprobs``, ``ref_logprobs``, ``values``, ``advantages``,
    ``returns`` and ``correction`` are filled in as the step goes on (``dataclasses.replace``), None until then.
    """

    sample_id: str
    prompt_id: str
    token_ids: tuple[int, ...]
    """[L]"""
    loss_mask: tuple[bool, ...]
    """[L] true on model tokens; the first token is never true, since nothing predicts it."""
    rewards: tuple[float, ...]
    """[L] task reward per token, non-zero on model tokens only."""
    score: float
    """The trajectory's total reward: what group baselines compare."""
    rollout_logprobs: tuple[float, ...]
    """[L] the engine's, 0 where the mask is false."""
    policy_version: int
    """Oldest weight version that sampled one of its tokens."""
    old_logprobs: tuple[float, ...] | None = None
    """[L] the trainer's before the first update of the step, 0 where the mask is false."""
    ref_logprobs: tuple[float, ...] | None = None
    """[L] the reference policy's, 0 where the mask is false."""
    values: tuple[float, ...] | None = None
    """[L] V_t read at the position that predicts token t, 0 where the mask is false."""
    advantages: tuple[float, ...] | None = None
    """[L] 0 where the mask is false."""
    returns: tuple[float, ...] | None = None
    """[L] value targets, 0 where the mask is false."""
    correction: tuple[float, ...] | None = None
    """[L] importance weight of the token's policy loss, 0 where the mask is false; None: no correction."""

    def __post_init__(self) -> None:
        length = len(self.token_ids)
        for name in _COLUMNS:
            column = getattr(self, name)
            if column is not None and len(column) != length:
                raise ValueError(f"sample {self.sample_id}: {name} has length {len(column)}, token_ids {length}")
        if self.loss_mask and self.loss_mask[0]:
            raise ValueError(f"sample {self.sample_id}: the first token cannot be trained, nothing predicts it")

    @property
    def n_model_tokens(self) -> int:
        """Number of trained tokens."""
        return sum(self.loss_mask)


# ---------------------------------------------------------------------------------------------------------------
# Seams


@dataclass(frozen=True, slots=True)
class Sampling:
    """How one generation is sampled."""

    max_new_tokens: int
    temperature: float = 1.0
    """0 means greedy; log-probs are then those of temperature 1."""
    top_p: float = 1.0
    top_k: int = -1
    """-1 keeps all."""
    stop: tuple[str, ...] = ()
    """Generation ends with the token that completes one of these; the string stays in the output."""
    seed: int | None = None
    """Seeds this request alone, whatever else is in the batch."""


@dataclass(frozen=True, slots=True)
class Completion:
    """What an engine returns for one generation."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Natural log of softmax(logits / T) at the sampled token, before top-p and top-k."""
    finish: str
    """``stop`` (a stop string), ``eos``, ``length`` or ``abort``."""
    policy_version: int


class Generate(Protocol):
    """A rollout engine as an episode sees it. Raises EngineError when it cannot generate."""

    async def generate(self, token_ids: Sequence[int], sampling: Sampling) -> Completion:
        """Continue ``token_ids`` (the whole context)."""
        ...


@runtime_checkable
class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that the task uses; injected, never imported."""

    eos_token_id: int | None

    def encode(self, text: str, add_special_tokens: bool = ...) -> list[int]: ...

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = ...) -> str: ...


@dataclass(frozen=True, slots=True)
class EpisodeContext:
    """What one episode is given besides its prompt."""

    sample_index: int
    """Index of the trajectory in its group, from 0."""
    seed: int
    """Derived from (run seed, step, prompt id, sample index): see ``verl.types.episode_seed``."""
    temperature: float
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = -1
    mode: str = "policy"
    """``policy``, or the name of one of the task's fixed pipelines (a baseline that shares the reader)."""
    deadline_s: float | None = None
    """Wall seconds the episode may take before it is aborted; None in deterministic mode."""


class Task(Protocol):
    """What the trainer knows of the task. Built by ``task.from_config(config, tokenizer)``; picklable arguments only.

    One instance lives in the driver (prompts, evaluation) and one in each rollout worker (episodes, rewards).
    """

    @classmethod
    def config_schema(cls) -> type[Any]:
        """Return the pydantic model whose fields are the task's own top-level config keys.

        The validated instance travels as ``RunConfig.task_config``. It may have a method ``notes(run) -> list[str]``:
        what ``--check`` says of a run that is legal but worth a look.
        """
        ...

    @classmethod
    def from_config(cls, config: Any, tokenizer: Tokenizer) -> Task:
        """Build the task from the validated run config."""
        ...

    def prompts(self, split: str) -> list[Prompt]:
        """Load the prompts of ``train`` or ``val`` in file order; raises DataError naming file and line."""
        ...

    async def start(self) -> None:
        """Open connections and check that services are ready; raises RetrievalError with the remedy."""
        ...

    async def close(self) -> None:
        """Close what ``start`` opened."""
        ...

    def totals(self) -> Mapping[str, float]:
        """Return running totals of the services it uses since it was built (requests, retries, failures, seconds).

        Every worker's growth since the last report is added up and logged under ``service/``.
        """
        ...

    async def episode(self, prompt: Prompt, generate: Generate, context: EpisodeContext) -> Trajectory:
        """Run one episode to its end; never raises for what can be a StopReason. The reward is set."""
        ...

    def validation_reward(self, trajectory: Trajectory) -> float:
        """Return the plain answer score that the best checkpoint is chosen by (failures: 0)."""
        ...

    def evaluate(self, trajectories: Sequence[Trajectory]) -> Mapping[str, float]:
        """Return flat figures over a finished split: n, em, f1, rewrite_f1, recall_at_3, searches, format_valid ..."""
        ...

    def validation_rows(self, trajectories: Sequence[Trajectory]) -> list[dict[str, Any]]:
        """Return the rows of ``validation_results_step<N>.json`` in the published format."""
        ...


class Level(StrEnum):
    """How grave a finding of an audit is."""

    OK = "ok"
    NOTE = "note"
    """Harmless to what is trained, and worth knowing."""
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Finding:
    """One answer of an audit. Example: ``Finding("turn end", Level.FAIL, "ends with '</s>'", "set eos_token")``."""

    check: str
    level: Level
    detail: str
    remedy: str = ""


class WorkerGroup(Protocol):
    """N identical workers, rank 0..N-1, on some cluster. Errors of a worker are raised in the caller."""

    @property
    def size(self) -> int: ...

    def submit(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call ``method`` with the same arguments on every rank; return a handle for ``wait``."""
        ...

    def submit_each(self, method: str, per_rank: Sequence[tuple[Any, ...]]) -> Any:
        """Call ``method`` with ``per_rank[rank]`` as arguments; return a handle for ``wait``."""
        ...

    def submit_one(self, rank: int, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call ``method`` on one rank; return a handle whose ``wait`` gives a list of one result."""
        ...

    def wait(self, handle: Any) -> list[Any]:
        """Return the results of a handle in rank order."""
        ...

    def close(self) -> None:
        """End the workers."""
        ...


class Cluster(Protocol):
    """Where workers run: this process (``local``) or Ray."""

    def spawn(self, role: str, worker: type, size: int, *args: Any, **kwargs: Any) -> WorkerGroup:
        """Create ``size`` instances of ``worker(*args, **kwargs)``; ranks of one group share a process group."""
        ...

    def close(self) -> None:
        """End everything that was spawned."""
        ...


def episode_seed(run_seed: int, step: int, prompt_id: str, sample_index: int) -> int:
    """Return a 63-bit seed that depends on nothing but its arguments (not on process, order or Python's hash)."""
    text = f"{run_seed}/{step}/{prompt_id}/{sample_index}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1
