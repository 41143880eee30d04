"""What holds for every episode, whatever the model writes."""

import asyncio
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from search_r1.codec import Codec
from search_r1.config import EpisodeSettings
from search_r1.episode import EpisodeTools, run_episode
from search_r1.testing import CharTokenizer, DictionarySearch, ScriptedEngine
from verl.errors import EngineError
from verl.types import Document, EpisodeContext, Origin, Prompt, StopReason, Trajectory

LIMITS = EpisodeSettings(
    max_turns=2,
    do_search=True,
    max_start_length=50,
    max_prompt_length=150,
    max_response_length=60,
    max_obs_length=60,
    topk=3,
)
PIECES = [
    "<search>",
    "</search>",
    "<answer>",
    "</answer>",
    "<information>",
    "</think>",
    "<|end|>",
    "q",
    " ",
    "long " * 9,
]
TURN = st.one_of(
    st.lists(st.sampled_from(PIECES), max_size=6).map("".join),
    st.sampled_from(["<search>q</search>", "<search>down</search>", "<answer>x</answer>"]),
    st.just(EngineError("gone")),
)
SEARCH = DictionarySearch({"q": [Document("d", "T", "x <answer>y</answer> " * 9)]}, failing=["down"])


@settings(max_examples=300, deadline=None)
@given(
    turns=st.lists(TURN, min_size=4, max_size=4),
    max_turns=st.integers(0, 3),
    runs_on=st.booleans(),
    chat=st.booleans(),
    do_search=st.booleans(),
)
def test_invariants(turns: list[str | Exception], max_turns: int, runs_on: bool, chat: bool, do_search: bool) -> None:
    tokenizer = CharTokenizer(chat=chat)
    engine = ScriptedEngine(tokenizer, turns, runs_on)
    limits = replace(LIMITS, max_turns=max_turns, do_search=do_search)
    prompt = Prompt("p", tuple(tokenizer.encode("<answer>in the prompt</answer>")), {})
    tools = EpisodeTools(Codec(tokenizer), limits, SEARCH)
    result = asyncio.run(run_episode(prompt, engine, EpisodeContext(0, 1, 1.0), tools))

    model = [s for s in result.segments if s.origin is Origin.MODEL]
    # every model segment is a prefix of what was sampled in its turn, and all of it when the engine stops by itself
    for segment, sampled in zip(model, engine.sampled, strict=False):
        assert segment.token_ids == sampled[: len(segment.token_ids)]
        assert runs_on or segment.token_ids == sampled
    assert sum(result.loss_mask) == sum(len(s.token_ids) for s in model)
    # each generation read exactly the episode so far
    for context in engine.contexts:
        assert result.token_ids[: len(context)] == context
    assert len(result.token_ids) <= limits.context_limit
    assert len(engine.contexts) <= (max_turns if do_search else 0) + 1
    assert len(result.searches) <= (max_turns if do_search else 0)
    assert len(result.turns) == len(model)
    # the prompt's own answer block is nobody's answer
    assert result.prediction != "in the prompt" and (result.stop is StopReason.ANSWERED or result.prediction is None)
    if result.stop is StopReason.ANSWERED:
        assert result.segments[-1].origin is Origin.MODEL and result.turns[-1] == "answer"
    for segment in result.segments:
        if segment.origin is Origin.ENV and "<information>" in tokenizer.decode(segment.token_ids):
            assert len(segment.token_ids) <= limits.max_obs_length
    assert Trajectory.from_record(result.to_record()) == result
