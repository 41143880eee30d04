"""Fixed pipelines: baselines that share the policy's reader but not its query.

The environment writes the first turn (think and search, origin ENV), the passages follow, then the model reads and
answers once. ``closed_book`` is given an empty information block, so what it answers it knew by heart; ``own_rewrite``
completes the query itself; ``oracle`` is handed the gold passages without a search. A row that lacks what a pipeline
needs is not run in it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from search_r1.config import PipelineName
from search_r1.datasets.rows import Row
from search_r1.episode import Draft, Steps, append_env, execute_search, policy_steps, take_turn
from search_r1.gold_passages import gold_documents
from search_r1.observation import build_observation
from search_r1.parsing import TurnKind
from search_r1.tags import ANSWER, SEARCH, TAG_PATTERN
from verl.registry import Registry
from verl.types import Generate, Origin, SearchCall, Segment, StopReason

REWRITE_TURN = "<think> I search as asked. </think><search>"
FORCED_TURN = REWRITE_TURN + " {query} </search>"
_EMPTY_BLOCK = "\n\n<information></information>\n\n"
READ_TURN = "<think> The passages answer this. </think><answer>"

QueryOf = Callable[[Row], str]


def gold(row: Row) -> str:
    """The gold rewrite."""
    assert row.rewrite is not None  # ``applicable``
    return row.rewrite


def raw(row: Row) -> str:
    """The last question as it was asked."""
    return row.question


def questions(row: Row) -> str:
    """All questions of the conversation so far and the last one."""
    return " ".join([*(row.history or ())[::2], row.question])


def history(row: Row) -> str:
    """The whole conversation so far and the last question."""
    return " ".join([*(row.history or ()), row.question])


QUERIES: Mapping[str, QueryOf] = {"gold": gold, "raw": raw, "questions": questions, "history": history}


def _searching(query_of: QueryOf) -> Steps:
    async def steps(draft: Draft, generate: Generate) -> StopReason:
        query = query_of(Row.from_json(draft.prompt.row))
        _force(draft, query)
        observation = await execute_search(draft, query, turn=0)
        return await _read_and_answer(draft, generate, observation)

    return steps


async def closed_book(draft: Draft, generate: Generate) -> StopReason:
    """No passages at all: the bound below which retrieval plays no part."""
    _force(draft, Row.from_json(draft.prompt.row).question)
    return await _read_and_answer(draft, generate, draft.tools.codec.encode(_EMPTY_BLOCK))


def _force(draft: Draft, query: str) -> None:
    text = FORCED_TURN.format(query=draft.tools.codec.escape(query))
    draft.append(Segment(Origin.ENV, draft.tools.codec.encode(text)))


async def _read_and_answer(draft: Draft, generate: Generate, observation: tuple[int, ...]) -> StopReason:
    opened = draft.tools.settings.reader == "opened"
    if not append_env(draft, (*observation, *(draft.tools.codec.encode(READ_TURN) if opened else ()))):
        return StopReason.CONTEXT_LENGTH
    outcome = await take_turn(draft, generate, turn=1, opened=f"<{ANSWER}>" if opened else "")
    if outcome is None:
        return StopReason.ABORTED
    if opened and outcome.kind in (TurnKind.EOS, TurnKind.LENGTH):
        return _unclosed(draft, outcome.kind)
    return _end(outcome.kind)


def _unclosed(draft: Draft, kind: TurnKind) -> StopReason:
    """Take what stands in an answer block that the model did not close; tags it wrote in it end the answer."""
    text = TAG_PATTERN.split(draft.tools.codec.readable(draft.segments[-1].token_ids))[0].strip()
    draft.prediction = text or None
    return StopReason.ANSWERED if kind is TurnKind.EOS else StopReason.RESPONSE_LENGTH


def _end(kind: TurnKind) -> StopReason:
    if kind is TurnKind.ANSWER:
        return StopReason.ANSWERED
    return StopReason.RESPONSE_LENGTH if kind is TurnKind.LENGTH else StopReason.TURN_LIMIT


async def own_rewrite(draft: Draft, generate: Generate) -> StopReason:
    """Rewrite, then retrieve: the environment opens the search and the model writes the query."""
    draft.append(Segment(Origin.ENV, draft.tools.codec.encode(REWRITE_TURN)))
    if draft.room <= 0:
        return StopReason.CONTEXT_LENGTH
    outcome = await take_turn(draft, generate, turn=0, opened=f"<{SEARCH}>")
    if outcome is None:
        return StopReason.ABORTED
    if outcome.kind is not TurnKind.SEARCH:
        return _end(outcome.kind)
    assert outcome.content is not None
    return await _read_and_answer(draft, generate, await execute_search(draft, outcome.content, turn=0))


async def oracle(draft: Draft, generate: Generate) -> StopReason:
    """The gold passages, as many as fit an observation: the bound that retrieval cannot exceed."""
    row = Row.from_json(draft.prompt.row)
    query, started = row.rewrite or row.question, time.perf_counter()
    _force(draft, query)
    observation = build_observation(draft.tools.codec, gold_documents(row), draft.tools.settings.max_obs_length)
    # Recorded as a search, so that recall says what the reader was given.
    draft.searches.append(SearchCall(0, query, observation.documents, time.perf_counter() - started))
    return await _read_and_answer(draft, generate, observation.token_ids)


PIPELINES: Registry[Steps] = Registry(
    "pipeline",
    {
        "policy": policy_steps,
        "closed_book": closed_book,
        "rewrite": own_rewrite,
        "oracle": oracle,
        **{name: _searching(of) for name, of in QUERIES.items()},
    },
)
"""``EpisodeContext.mode`` -> the loop that runs."""

MODES: Mapping[PipelineName, str] = {
    "closed_book": "closed_book",
    "raw_question": "raw",
    "questions_only": "questions",
    "history_question": "history",
    "own_rewrite": "rewrite",
    "gold_query": "gold",
    "oracle_passage": "oracle",
}
"""Name in ``evaluation.pipelines``, in summaries and tables -> ``EpisodeContext.mode``."""

_NEEDS: Mapping[str, Callable[[Row], bool]] = {
    "gold": lambda row: row.rewrite is not None,
    "oracle": lambda row: bool(gold_documents(row)),
    "questions": lambda row: row.history is not None,
    "history": lambda row: row.history is not None,
}


def applicable(row: Row, mode: str) -> bool:
    """Say whether a row has what a pipeline needs."""
    return mode not in _NEEDS or _NEEDS[mode](row)
