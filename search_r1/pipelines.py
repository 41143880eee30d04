"""Fixed pipelines: baselines that share the policy's reader but not its query.

The environment writes the first turn (think and search, origin ENV), the passages follow, then the model reads and
answers once. ``closed_book`` is given an empty information block, so what it answers it knew by heart.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from search_r1.datasets.rows import Row
from search_r1.episode import Draft, Steps, append_env, execute_search, policy_steps, take_turn
from search_r1.parsing import TurnKind
from verl.registry import Registry
from verl.types import Generate, Origin, Segment, StopReason

FORCED_TURN = "<think> I search as asked. </think><search> {query} </search>"
_EMPTY_BLOCK = "\n\n<information></information>\n\n"

QueryOf = Callable[[Row], str]


def gold(row: Row) -> str:
    """The gold rewrite; the question itself where there is none."""
    return row.rewrite or row.question


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
    if not append_env(draft, observation):
        return StopReason.CONTEXT_LENGTH
    outcome = await take_turn(draft, generate, turn=1)
    if outcome is None:
        return StopReason.ABORTED
    if outcome.kind is TurnKind.ANSWER:
        return StopReason.ANSWERED
    return StopReason.RESPONSE_LENGTH if outcome.kind is TurnKind.LENGTH else StopReason.TURN_LIMIT


PIPELINES: Registry[Steps] = Registry(
    "pipeline",
    {"policy": policy_steps, "closed_book": closed_book, **{name: _searching(of) for name, of in QUERIES.items()}},
)
"""``EpisodeContext.mode`` -> the loop that runs."""

BOUNDS: Mapping[str, str] = {
    "closed_book": "closed_book",
    "gold_query": "gold",
    "raw_question": "raw",
    "questions_only": "questions",
    "history_question": "history",
}
"""Name in a run's summary -> pipeline."""
