"""One episode: think, search, read, answer. The exact semantics are the docstring of ``run_episode``.

The context is one append-only list of token ids. The model's ids enter it as sampled and are never encoded again;
environment text is encoded once, on its own.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from search_r1.codec import Codec
from search_r1.config import EpisodeSettings
from search_r1.hints import hint
from search_r1.observation import build_observation
from search_r1.parsing import TurnKind, TurnOutcome, parse_turn
from search_r1.tags import ANSWER, INFORMATION, SEARCH, STOP_STRINGS
from verl.errors import EngineError, RetrievalError
from verl.types import (
    Completion,
    Document,
    EpisodeContext,
    Generate,
    Origin,
    Prompt,
    Sampling,
    SearchCall,
    Segment,
    StopReason,
    Trajectory,
    episode_seed,
)


class Search(Protocol):
    """A retrieval service as an episode sees it."""

    async def search(self, query: str) -> tuple[Document, ...]:
        """Return passages in rank order, possibly none; raise RetrievalError when the service does not answer."""
        ...


@dataclass(frozen=True, slots=True)
class Event:
    """Something that just happened in an episode, for whoever watches it."""

    kind: str
    """``model`` (text of a turn), ``search`` (the query, before it is sent), ``documents`` or ``hint``."""
    text: str = ""
    documents: tuple[Document, ...] = ()


@dataclass(frozen=True)
class EpisodeTools:
    """What an episode works with besides its prompt and engine."""

    codec: Codec
    settings: EpisodeSettings
    search: Search
    observer: Callable[[Event], None] | None = None


@dataclass
class Draft:
    """The growing episode; private to this module and to the pipelines that force its beginning."""

    prompt: Prompt
    context: EpisodeContext
    tools: EpisodeTools
    segments: list[Segment] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    turns: list[TurnKind] = field(default_factory=list)
    searches: list[SearchCall] = field(default_factory=list)
    prediction: str | None = None
    truncated_observations: int = 0
    overrun_tokens: int = 0
    invented: int = 0
    """Turns in which the model itself opened an information block."""

    def append(self, segment: Segment) -> None:
        """Add a segment; nothing is ever removed or changed."""
        self.segments.append(segment)
        self.token_ids.extend(segment.token_ids)

    @property
    def room(self) -> int:
        """Tokens left in the context."""
        return self.tools.settings.context_limit - len(self.token_ids)

    def watch(self, event: Event) -> None:
        """Tell the observer, when there is one."""
        if self.tools.observer is not None:
            self.tools.observer(event)


Steps = Callable[[Draft, Generate], Any]


async def run_episode(
    prompt: Prompt, generate: Generate, context: EpisodeContext, tools: EpisodeTools, steps: Steps | None = None
) -> Trajectory:
    """Run one episode to its end; the reward is not set. Never raises for what can be a StopReason.

    1. The prompt is the whole first context. A refused prompt (no ids) ends at once with ``context_length``.
    2. Each turn generates at most ``max_response_length`` tokens, up to ``</search>`` or ``</answer>``, kept.
    3. ``search`` is answered by an information block, ``answer`` ends the episode, anything else gets a hint and
       spends the turn. Nothing is appended after an answer.
    4. After ``max_turns`` turns one last generation is made whose search is not executed.
    5. The episode ends with ``context_length`` when what has to be appended leaves no room for another token.

    Args:
        steps: the loop to run, for the fixed pipelines; default the policy's own.
    """
    draft = Draft(prompt, context, tools)
    started = time.perf_counter()
    if prompt.token_ids:
        draft.append(Segment(Origin.PROMPT, prompt.token_ids))
        stop = await _guarded(draft, generate, steps or policy_steps)
    else:
        stop = StopReason.CONTEXT_LENGTH
    return Trajectory(
        trajectory_id=f"{prompt.prompt_id}#{context.sample_index}",
        prompt_id=prompt.prompt_id,
        segments=tuple(draft.segments),
        stop=stop,
        searches=tuple(draft.searches),
        turns=tuple(kind.value for kind in draft.turns),
        prediction=draft.prediction,
        metrics=_metrics(draft, stop),
        seconds=time.perf_counter() - started,
        row=prompt.row,
    )


async def _guarded(draft: Draft, generate: Generate, steps: Steps) -> StopReason:
    try:
        async with asyncio.timeout(draft.context.deadline_s):
            stop: StopReason = await steps(draft, generate)
            return stop
    except TimeoutError:
        return StopReason.ABORTED
    except EngineError:
        return StopReason.ENGINE_FAILED
    except RetrievalError:
        return StopReason.SEARCH_FAILED


async def policy_steps(draft: Draft, generate: Generate) -> StopReason:
    """The policy's loop: generate, act, observe."""
    settings = draft.tools.settings
    last_turn = settings.max_turns if settings.do_search else 0
    for turn in range(last_turn + 1):
        capped_by_context = draft.room < settings.max_response_length
        if draft.room <= 0:
            return StopReason.CONTEXT_LENGTH
        outcome = await take_turn(draft, generate, turn)
        if outcome is None:
            return StopReason.ABORTED
        if outcome.kind is TurnKind.ANSWER:
            return StopReason.ANSWERED
        if outcome.kind is TurnKind.LENGTH and capped_by_context:
            return StopReason.CONTEXT_LENGTH
        if turn == last_turn:
            return StopReason.RESPONSE_LENGTH if outcome.kind is TurnKind.LENGTH else StopReason.TURN_LIMIT
        if not await _react(draft, outcome, turn):
            return StopReason.CONTEXT_LENGTH
    raise AssertionError("the last turn always returns")


async def take_turn(draft: Draft, generate: Generate, turn: int, opened: str = "") -> TurnOutcome | None:
    """Generate and append one model turn; None when the engine aborted the request.

    ``opened``: the opening tag that the environment wrote just before, which the turn's action may close.
    """
    settings, context = draft.tools.settings, draft.context
    sampling = Sampling(
        max_new_tokens=min(settings.max_response_length, draft.room),
        temperature=context.temperature,
        top_p=context.top_p,
        top_k=context.top_k,
        stop=STOP_STRINGS if settings.do_search else (f"</{ANSWER}>",),
        seed=episode_seed(context.seed, turn, draft.prompt.prompt_id, context.sample_index),
    )
    completion = await generate.generate(tuple(draft.token_ids), sampling)
    if completion.finish == "abort":
        return None
    text, outcome, length = _read(draft.tools, completion, opened)
    draft.overrun_tokens += len(completion.token_ids) - length
    draft.append(
        Segment(Origin.MODEL, completion.token_ids[:length], completion.logprobs[:length], completion.policy_version)
    )
    draft.turns.append(outcome.kind)
    draft.invented += f"<{INFORMATION}>" in (text if outcome.end is None else text[: outcome.end])
    if outcome.kind is TurnKind.ANSWER:
        draft.prediction = outcome.content or None
    draft.watch(Event("model", text if outcome.end is None else text[: outcome.end]))
    return outcome


def _read(tools: EpisodeTools, completion: Completion, opened: str) -> tuple[str, TurnOutcome, int]:
    """Return the turn's text, its outcome (``end`` within the text), and how many tokens belong to it.

    With an engine that honours stop strings all sampled tokens do. From one that ran on, what follows the token that
    completes the deciding tag is dropped, ids and log-probs alike: it was sampled after the action had been taken.
    """
    ended = completion.finish == "eos"
    visible = completion.token_ids[:-1] if ended else completion.token_ids
    text = tools.codec.decode(visible)
    actions = (SEARCH, ANSWER) if tools.settings.do_search else (ANSWER,)
    outcome = parse_turn(opened + text, completion.finish, actions)
    if opened and outcome.end is not None:
        outcome = replace(outcome, end=outcome.end - len(opened))
    length = len(completion.token_ids)
    if outcome.end is not None and (ended or text[outcome.end :]):
        length = tools.codec.shortest_prefix(visible, text[: outcome.end])
    return text, outcome, length


async def _react(draft: Draft, outcome: TurnOutcome, turn: int) -> bool:
    """Append what the environment says to a turn that did not answer; False when it does not fit."""
    codec = draft.tools.codec
    if outcome.kind is TurnKind.SEARCH:
        assert outcome.content is not None
        return append_env(draft, await execute_search(draft, outcome.content, turn))
    text = hint(outcome.kind)
    draft.watch(Event("hint", text))
    if outcome.kind is TurnKind.EOS:
        return append_env(draft, codec.encode_user_turn(text))
    return append_env(draft, codec.encode(f"\n\n{text}\n\n"))


async def execute_search(draft: Draft, query: str, turn: int) -> tuple[int, ...]:
    """Send one query, record the call, and return the observation's ids. A failed call is recorded and raised."""
    draft.watch(Event("search", query))
    started = time.perf_counter()
    try:
        documents = await draft.tools.search.search(query)
    except RetrievalError as error:
        draft.searches.append(SearchCall(turn, query, (), time.perf_counter() - started, str(error)))
        raise
    seconds = time.perf_counter() - started
    observation = build_observation(draft.tools.codec, documents, draft.tools.settings.max_obs_length)
    draft.truncated_observations += observation.truncated
    draft.searches.append(SearchCall(turn, query, observation.documents, seconds))
    draft.watch(Event("documents", documents=observation.documents))
    return observation.token_ids


def append_env(draft: Draft, token_ids: Sequence[int]) -> bool:
    """Append environment tokens if at least one more token can then be generated; say whether they were."""
    if len(token_ids) >= draft.room:
        return False
    draft.append(Segment(Origin.ENV, tuple(token_ids)))
    return True


def _metrics(draft: Draft, stop: StopReason) -> dict[str, float]:
    counts = {
        kind: sum(turn is kind for turn in draft.turns)
        for kind in (TurnKind.EMPTY_QUERY, TurnKind.MALFORMED, TurnKind.LENGTH, TurnKind.EOS)
    }
    settings = draft.tools.settings
    by_origin = {origin: sum(len(s.token_ids) for s in draft.segments if s.origin is origin) for origin in Origin}
    return {
        "turns": float(len(draft.turns)),
        "searches": float(len(draft.searches)),
        "answered": float(stop is StopReason.ANSWERED),
        "prompt_tokens": float(by_origin[Origin.PROMPT]),
        "response_tokens": float(by_origin[Origin.MODEL]),
        "observation_tokens": float(by_origin[Origin.ENV]),
        "invalid_actions": float(sum(counts.values())),
        "empty_queries": float(counts[TurnKind.EMPTY_QUERY]),
        "malformed_turns": float(counts[TurnKind.MALFORMED]),
        "cut_turns": float(counts[TurnKind.LENGTH]),
        "truncated_observations": float(draft.truncated_observations),
        "searches_without_hits": float(sum(not call.documents and call.error is None for call in draft.searches)),
        "search_seconds": sum(call.seconds for call in draft.searches),
        "overrun_tokens": float(draft.overrun_tokens),
        "invented_information": float(draft.invented),
        # With one search or none there is no limit to run into.
        "search_limit": float(1 < settings.max_turns <= len(draft.searches)),
        "refused": float(not draft.prompt.token_ids),
    }
