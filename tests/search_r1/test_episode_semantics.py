"""The episode: what is generated, what is appended, when it ends (design section 4)."""

import asyncio
from dataclasses import replace

import pytest

from search_r1.codec import Codec
from search_r1.config import EpisodeSettings
from search_r1.episode import EpisodeTools, run_episode
from search_r1.hints import HINTS
from search_r1.parsing import TurnKind
from search_r1.testing import CharTokenizer, DictionarySearch, ScriptedEngine
from verl.errors import EngineError
from verl.types import Document, EpisodeContext, Origin, Prompt, StopReason, Trajectory

SETTINGS = EpisodeSettings(
    max_turns=2,
    do_search=True,
    max_start_length=1000,
    max_prompt_length=3000,
    max_response_length=500,
    max_obs_length=400,
    topk=3,
)
PASSAGES = {"q1": [Document("d1", "One", "first")], "q2": [Document("d2", "Two", "second")]}
INFO_1 = "\n\n<information>Doc 1(Title: One) first</information>\n\n"
INFO_2 = "\n\n<information>Doc 1(Title: Two) second</information>\n\n"
CONTEXT = EpisodeContext(sample_index=1, seed=5, temperature=1.0)


class Run:
    """One finished episode with everything around it."""

    def __init__(
        self,
        turns: list[str | Exception],
        settings: EpisodeSettings = SETTINGS,
        tokenizer: CharTokenizer | None = None,
        search: DictionarySearch | None = None,
        runs_on: bool = False,
        context: EpisodeContext = CONTEXT,
        delay_s: float = 0.0,
    ) -> None:
        self.tokenizer = tokenizer or CharTokenizer()
        self.engine = ScriptedEngine(self.tokenizer, turns, runs_on, delay_s)
        self.search = search or DictionarySearch(PASSAGES)
        self.codec = Codec(self.tokenizer)
        prompt = Prompt("p7", tuple(self.tokenizer.encode("ask")), {"question": "ask"})
        tools = EpisodeTools(self.codec, settings, self.search)
        self.result: Trajectory = asyncio.run(run_episode(prompt, self.engine, context, tools))

    @property
    def text(self) -> str:
        return self.codec.decode(self.result.token_ids)

    @property
    def env(self) -> list[str]:
        return [self.codec.decode(s.token_ids) for s in self.result.segments if s.origin is Origin.ENV]


def test_search_then_answer_token_for_token() -> None:
    first, second = "<think>a</think><search> q1 </search>", "<answer> x </answer>"
    run = Run([first, second])
    result = run.result
    assert run.text == "ask" + first + INFO_1 + second
    assert (result.stop, result.prediction, result.turns) == (StopReason.ANSWERED, "x", ("search", "answer"))
    assert [(c.turn, c.query, c.documents[0].id) for c in result.searches] == [(0, "q1", "d1")]
    # T12: the model's segments are the sampled ids themselves, with the engine's log-probs
    model = [s for s in result.segments if s.origin is Origin.MODEL]
    assert [s.token_ids for s in model] == run.engine.sampled
    assert [s.logprobs for s in model] == [tuple(-0.5 - i for i in range(len(ids))) for ids in run.engine.sampled]
    assert {s.policy_version for s in model} == {3}
    # T14: mask 1 exactly on sampled tokens
    assert sum(result.loss_mask) == sum(len(ids) for ids in run.engine.sampled)
    assert (result.trajectory_id, result.prompt_id) == ("p7#1", "p7")
    assert Trajectory.from_record(result.to_record()) == result


def test_each_generation_sees_the_whole_episode_so_far_once() -> None:  # T11
    run = Run(["<search>q1</search>", "<search>q2</search>", "<answer>x</answer>"])
    seen = [run.tokenizer.decode(ids) for ids in run.engine.contexts]
    assert seen == [
        "ask",
        "ask<search>q1</search>" + INFO_1,
        "ask<search>q1</search>" + INFO_1 + "<search>q2</search>" + INFO_2,
    ]
    assert run.result.token_ids[: len(run.engine.contexts[2])] == run.engine.contexts[2]


def test_sampling_of_each_turn() -> None:
    run = Run(["<search>q1</search>", "<answer>x</answer>"])
    first, second = run.engine.samplings
    assert first.stop == ("</search>", "</answer>") and first.max_new_tokens == 500
    assert first.seed != second.seed and first.seed == Run(["<answer>x</answer>"]).engine.samplings[0].seed


def test_every_turn_decodes_as_its_context_says() -> None:
    """Greedy stays greedy after a search, after a hint and in the last turn."""
    context = replace(CONTEXT, temperature=0.0, top_p=0.9, top_k=7)
    run = Run(["<search>q1</search>", "q1</search>", "<answer>x</answer>"], context=context)
    assert [(s.temperature, s.top_p, s.top_k) for s in run.engine.samplings] == [(0.0, 0.9, 7)] * 3


def test_last_search_is_not_executed() -> None:  # T10
    run = Run(["<search>q1</search>", "<search>q2</search>", "<search>q1</search>"])
    assert run.search.queries == ["q1", "q2"]
    assert run.result.stop is StopReason.TURN_LIMIT and run.result.prediction is None
    assert run.result.turns == ("search", "search", "search") and run.result.n_turns == 3
    assert run.result.metrics["searches"] == 2 and run.result.segments[-1].origin is Origin.MODEL


@pytest.mark.parametrize(
    ("turn", "kind"),
    [
        ("<search> \n</search>", TurnKind.EMPTY_QUERY),
        ("q1</search>", TurnKind.MALFORMED),
        ("<search>q1" + "z" * 600, TurnKind.LENGTH),
    ],
)
def test_invalid_turn_gets_its_hint_and_no_request(turn: str, kind: TurnKind) -> None:
    run = Run([turn, "<answer>x</answer>"])
    assert run.env == [f"\n\n{HINTS[kind]}\n\n"] and run.search.queries == []
    assert run.result.turns == (kind.value, "answer") and run.result.metrics["invalid_actions"] == 1
    assert run.result.stop is StopReason.ANSWERED


def test_eos_stays_trained_and_the_hint_is_a_user_turn() -> None:
    run = Run(["hello<|end|>", "<answer>x</answer>"], tokenizer=CharTokenizer(chat=True))
    eos = run.tokenizer.eos_token_id
    model = [s for s in run.result.segments if s.origin is Origin.MODEL]
    assert model[0].token_ids[-1] == eos and run.result.turns[0] == "eos"
    assert run.env == [f"\n<|user|>{HINTS[TurnKind.EOS]}<|end|>\n<|bot|>"]
    assert run.text.count("<|end|>") == 2  # the sampled one and the one that ends the user turn


def test_eos_without_chat_template_gets_a_bare_hint() -> None:
    run = Run(["hello<|end|>", "<answer>x</answer>"])
    assert run.env == [f"\n\n{HINTS[TurnKind.EOS]}\n\n"]


def test_hints_name_no_tag_pair() -> None:
    assert not any("<" in text for text in HINTS.values())


def test_token_that_completes_the_tag_stays_whole() -> None:
    run = Run(["<answer>x</answer>\n"], tokenizer=CharTokenizer(merged=("</answer>\n",)))
    assert run.result.prediction == "x" and run.text == "ask<answer>x</answer>\n"
    assert run.result.metrics["overrun_tokens"] == 0


def test_engine_that_runs_on_is_cut_at_the_action() -> None:  # T1, T3
    run = Run(["<answer>x</answer><search>q1</search><|end|>"], runs_on=True)
    assert run.text == "ask<answer>x</answer>" and run.search.queries == []
    segment = run.result.segments[-1]
    assert segment.logprobs is not None and len(segment.logprobs) == len(segment.token_ids)
    assert run.result.metrics["overrun_tokens"] == len(run.engine.sampled[0]) - len(segment.token_ids) == 5
    run = Run(["<search>q1</search><search>q2</search>", "<answer>x</answer>"], runs_on=True)
    assert run.search.queries == ["q1"] and "q2" not in run.text


def test_model_written_information_is_no_retrieval() -> None:
    run = Run(["<information>Doc 1</information><answer>x</answer>"])
    assert run.result.searches == () and run.env == []
    assert run.result.metrics["invented_information"] == 1
    honest = Run(["<search>q</search>", "<answer>x</answer>"])
    assert honest.result.metrics["invented_information"] == 0, "the environment's block is no invention"


def test_last_turn_cut_is_response_length() -> None:
    run = Run(["<search>q1</search>", "<search>q2</search>", "z" * 600])
    assert run.result.stop is StopReason.RESPONSE_LENGTH


def test_context_is_never_exceeded() -> None:  # T17
    limit = 100
    settings = replace(SETTINGS, max_prompt_length=60, max_response_length=40)
    run = Run(["<search>q1</search>", "z" * 600, "never asked"], settings=settings)
    # 3 + 4 + len(INFO_1) tokens are used, so the second turn is cut by the context, not by max_response_length
    assert run.engine.samplings[1].max_new_tokens == limit - 3 - 4 - len(INFO_1)
    assert run.result.stop is StopReason.CONTEXT_LENGTH and len(run.result.token_ids) == limit


def test_observation_that_does_not_fit_ends_the_episode() -> None:
    settings = replace(SETTINGS, max_prompt_length=10, max_response_length=40)
    run = Run(["<search>q1</search>"], settings=settings)
    assert run.result.stop is StopReason.CONTEXT_LENGTH and run.env == []
    assert [c.query for c in run.result.searches] == ["q1"] and run.result.segments[-1].origin is Origin.MODEL


@pytest.mark.parametrize(("spare", "appended"), [(0, False), (1, True)])
def test_an_observation_must_leave_room_for_one_more_token(spare: int, appended: bool) -> None:
    used = len("ask") + len(CharTokenizer().encode("<search>q1</search>")) + len(INFO_1)
    settings = replace(SETTINGS, max_prompt_length=used + spare - 5, max_response_length=5)
    run = Run(["<search>q1</search>", "z" * 9], settings=settings)
    assert run.env == ([INFO_1] if appended else [])
    assert run.result.stop is StopReason.CONTEXT_LENGTH and len(run.result.token_ids) == (
        used + 1 if appended else used - len(INFO_1)
    )


def test_failures_are_stop_reasons() -> None:
    run = Run(["<search>bad</search>"], search=DictionarySearch({}, failing=["bad"]))
    assert run.result.stop is StopReason.SEARCH_FAILED and run.result.stop.failed
    assert run.result.searches[0].error == "no answer for 'bad'"
    assert Run([EngineError("gone")]).result.stop is StopReason.ENGINE_FAILED
    late = replace(CONTEXT, deadline_s=0.05)
    assert Run(["<answer>x</answer>"], context=late, delay_s=5.0).result.stop is StopReason.ABORTED


def test_refused_prompt_ends_without_generation() -> None:
    tokenizer = CharTokenizer()
    tools = EpisodeTools(Codec(tokenizer), SETTINGS, DictionarySearch({}))
    result = asyncio.run(run_episode(Prompt("p", (), {}), ScriptedEngine(tokenizer, []), CONTEXT, tools))
    assert result.stop is StopReason.CONTEXT_LENGTH and result.n_turns == 0 and result.metrics["refused"] == 1


def test_without_tools_one_generation() -> None:
    run = Run(["<search>q1</search><answer>x</answer>"], settings=replace(SETTINGS, do_search=False))
    assert run.result.prediction == "x" and run.search.queries == [] and run.engine.samplings[0].stop == ("</answer>",)


def test_pad_or_eos_ids_do_not_shape_the_mask() -> None:  # T15
    run = Run(["<|end|>", "<answer>x</answer>"], tokenizer=CharTokenizer())
    assert run.result.loss_mask[3] is True and run.result.token_ids[3] == run.tokenizer.eos_token_id
