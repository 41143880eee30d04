"""Text metrics, structure, formulas: hand-computed values."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from search_r1.codec import Codec
from search_r1.config import RewardConfig, search_config
from search_r1.datasets.rows import Row
from search_r1.rewards.formulas import FORMULAS, FormulaInput, describe, score
from search_r1.rewards.sources import metric_of
from search_r1.rewards.structure import Piece, check_structure, check_text
from search_r1.rewards.text import (
    ANSWER_METRICS,
    best,
    exact_match,
    f1,
    f1_set,
    normalise,
    normalise_multilingual,
    sub_exact_match,
)
from search_r1.rewards.view import EpisodeView, Found
from search_r1.testing import CharTokenizer
from verl.errors import ConfigError, DataError
from verl.types import Document, Origin, Reward, SearchCall, Segment, StopReason, Trajectory

CODEC = Codec(CharTokenizer())
ROW = Row(qid="q", question="Where?", answers=("Paris", "the city of Paris"), rewrite="where is the Louvre", history=())
GOOD = "<think>a</think><search>where is Louvre</search>"
DONE = "<think>b</think><answer>Paris</answer>"
LOUVRE = Document("d1", "Louvre", "A museum in Paris.")


def view(
    row: Row = ROW,
    model: tuple[str, ...] = (GOOD, DONE),
    env: tuple[str, ...] = ("\n\n<information>Doc 1(Title: Louvre) A museum in Paris.</information>\n\n",),
    prediction: str | None = "Paris",
    searches: tuple[SearchCall, ...] = (SearchCall(0, "where is Louvre", (LOUVRE,)),),
    stop: StopReason = StopReason.ANSWERED,
    prompt: str = "<search> query </search> <answer> x </answer>",
    turns: tuple[str, ...] = ("search", "answer"),
) -> EpisodeView:
    segments = [Segment(Origin.PROMPT, CODEC.encode(prompt))]
    for index, text in enumerate(model):
        ids = CODEC.encode(text)
        segments.append(Segment(Origin.MODEL, ids, (0.0,) * len(ids), 0))
        if index < len(env):
            segments.append(Segment(Origin.ENV, CODEC.encode(env[index])))
    trajectory = Trajectory("q#0", "q", tuple(segments), stop, searches, turns, prediction, row=row.to_json())
    return EpisodeView.of(trajectory, CODEC)


def config(**values: Any) -> RewardConfig:
    return RewardConfig(**values)


# -- text -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prediction", "reference", "multiset", "as_set", "em"),
    [
        ("the the cat", "cat", 1.0, 1.0, 1.0),  # T26
        ("cat cat", "cat", 2 / 3, 2 / 3, 0.0),  # T26
        ("red fox", "fox", 2 / 3, 2 / 3, 0.0),
        ("go go gone", "go go gone", 1.0, 2 / 3, 1.0),  # the set form punishes repetition: 2 common of 3
        ("UNANSWERABLE", "unanswerable.", 1.0, 1.0, 1.0),  # T28
        ("I cannot answer", "unanswerable", 0.0, 0.0, 0.0),  # T28: no rule of ours turns words into verdicts
        ("Yes, it does.", "yes", 0.5, 0.5, 0.0),  # 1 of 3 words, all of 1
        ("", "the", 1.0, 1.0, 1.0),
        ("", "x", 0.0, 0.0, 0.0),
    ],
)
def test_word_metrics(prediction: str, reference: str, multiset: float, as_set: float, em: float) -> None:
    assert f1(prediction, reference) == pytest.approx(multiset)
    assert f1_set(prediction, reference) == pytest.approx(as_set)
    assert exact_match(prediction, reference) == em


def test_normalise_and_sub_match() -> None:
    assert normalise("  The Cat's  pyjamas, an A-B! ") == "cats pyjamas ab"
    assert sub_exact_match("It is in Paris, France.", "paris") == 1.0
    assert normalise("a </search> b") == normalise("a &lt;/search> b")  # one map on both sides


def test_best_takes_the_best_reference_and_nothing_scores_nothing() -> None:  # T27
    assert best(f1, "city of Paris", ("London", "the city of Paris")) == 1.0
    assert best(f1, None, ("London",)) == 0.0 and best(f1, "x", ()) == 0.0


@given(st.text(max_size=30), st.text(max_size=30))
def test_every_metric_is_within_bounds_and_full_on_equality(left: str, right: str) -> None:
    for name in ANSWER_METRICS:
        assert 0.0 <= ANSWER_METRICS[name](left, right, normalise) <= 1.0
    assert exact_match(left, left) == f1(left, left) == sub_exact_match(left, left) == 1.0
    assert f1(left, right) == pytest.approx(f1(right, left))


@pytest.mark.parametrize(
    ("text", "form"),
    [
        ("東京は、日本の「首都」です。", "東 京 は 日 本 の 首 都 で す"),
        ("Python3で２倍", "python3 で 2 倍"),  # NFKC: full-width digits are digits
        ("ﾃﾞｰﾀ", "デ ー タ"),  # half-width kana are kana, voice marks included
        ("ที่นี่", "ที่ นี่"),  # vowel signs and tone marks stay with their consonant
        ("The rue de l’Église — «Été»", "rue de léglise été"),
        ("Straße", "strasse"),
        ("cafe\u0301", "café"),  # decomposed and composed letters are equal
        ("한국어 문장", "한국어 문장"),  # written with spaces: words
        ("a </search> b $5", "ltsearch b 5"),
    ],
)
def test_multilingual_form(text: str, form: str) -> None:
    assert normalise_multilingual(text) == form


def test_characters_are_words_only_where_words_are_not_spaced() -> None:
    assert f1("北京大学", "北京") == 0.0  # under SQuAD's rule text without spaces is one word
    assert f1("北京大学", "北京", normalise_multilingual) == pytest.approx(2 * 0.5 * 1.0 / 1.5)
    assert f1("red fox", "fox", normalise_multilingual) == f1("red fox", "fox")
    assert sub_exact_match("首都は東京です", "東京", normalise_multilingual) == 1.0
    assert exact_match("『東京』", "東京", normalise_multilingual) == 1.0 and exact_match("『東京』", "東京") == 0.0


# -- structure --------------------------------------------------------------------------------------------------

INFO = "\n\n<information>x</information>\n\n"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("<think>a</think><answer>b</answer>", "valid"),
        (" <think>a</think>\n<search>q</search>" + INFO + "<think>b</think><answer>c</answer>\n", "valid"),
        ("<think>a</think><search>q</search>" + INFO + "<answer>c</answer>", "valid"),
        ("<answer>b</answer>", "<answer> at the start"),
        ("<think>a</think><think>b</think><answer>c</answer>", "<think> after think"),
        ("<think>a</think><search>q</search><answer>c</answer>", "<answer> after search"),
        ("<think>a</think><search>q</search>" + INFO + "<search>q</search>", "<search> after information"),
        ("<think>a</think>", "there is no answer"),
        ("<think>a", "<think> is not closed"),
        ("<think>a</think>so<answer>b</answer>", "text outside of blocks: 'so'"),
        ("<think>a</think><answer>b</answer>.", "text outside of blocks: '.'"),
        ("<think>a</think><answer>b</answer><answer>c</answer>", "<answer> after answer"),
        ("<think>a<search>q</search></think>", "<search> inside <think>"),
        ("</think><answer>b</answer>", "</think> without <think>"),
        ("", "there is no answer"),
    ],
)
def test_structure(text: str, reason: str) -> None:
    verdict = check_text(text)
    assert (verdict.reason, verdict.valid) == (reason, reason == "valid")


def test_strict_structure_wants_a_thought_after_information() -> None:
    text = "<think>a</think><search>q</search>" + INFO + "<answer>c</answer>"
    assert check_text(text).valid and not check_text(text, relaxed=False).valid


def test_model_written_information_is_invalid() -> None:
    text = "<think>a</think><search>q</search>" + INFO + "<think>b</think><answer>c</answer>"
    assert not check_structure([Piece(text, from_model=True)]).valid


# -- view -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "prompt", ["", "<answer>z</answer>", "<answer>a</answer><search>where is the Louvre</search>" * 3]
)
def test_prompt_never_changes_a_score(prompt: str) -> None:  # T9
    assert score(view(prompt=prompt), config(preset="auto", rewrite_score=0.2)) == score(
        view(), config(preset="auto", rewrite_score=0.2)
    )


def test_intent_is_the_best_executed_query() -> None:
    searches = (
        SearchCall(0, "Louvre", ()),  # 1 of 1, 1 of 3 words: 0.5
        SearchCall(1, "where is Louvre", ()),
        SearchCall(2, "where is the Louvre", (), error="no answer"),
    )
    assert view(searches=searches).intent(f1) == (1.0, 1)
    assert view(searches=searches[:1]).intent(f1) == (0.5, 0)
    assert view(searches=searches[1::-1]).intent(f1) == (1.0, 1)  # the best one, not the last one
    assert view(searches=(searches[0], searches[2])).intent(f1) == (0.5, 0)  # a failed search does not count
    assert view(searches=()).intent(f1) == (0.0, -1)
    assert view(replace(ROW, rewrite=None)).intent(f1) is None  # T30


def found(row: Row, **how: Any) -> tuple[float, float] | None:
    gold = view(row).gold(**how)
    return None if gold is None else (gold.hit, gold.recall)


def test_retrieval_hit_and_recall_by_id_by_text_or_not_available() -> None:
    assert found(replace(ROW, gold_passage_ids=("d1",))) == (1.0, 1.0)
    assert found(replace(ROW, gold_passage_ids=("d1", "d2", "d9"))) == (1.0, pytest.approx(1 / 3))
    assert found(replace(ROW, gold_passage_ids=("d9",))) == (0.0, 0.0)
    assert found(replace(ROW, gold_text='"Louvre"\nA museum in Paris.')) == (1.0, 1.0)
    assert found(replace(ROW, gold_text="A museum in Rome.")) == (0.0, 0.0)
    assert found(ROW) is None  # T30
    both = replace(ROW, gold_passage_ids=("d9",), gold_text="A museum in Paris.")
    assert found(both) == (0.0, 0.0) and found(both, match="text") == (1.0, 1.0)
    assert found(replace(ROW, gold_text="x"), match="id") is None
    assert found(replace(ROW, gold_passage_ids=("d1",)), match="text") is None
    for nothing in ("", "The.", "..."):  # normalised, nothing is left, and nothing stands in every passage
        assert found(replace(ROW, gold_text=nothing)) is None
        assert view(replace(ROW, answers=(nothing,))).retrieved_answer() is False
    seen = (Document("a", "", ""), Document("b", "", ""), Document("c", "", ""), Document("d1", "", ""))
    deep = view(replace(ROW, gold_passage_ids=("d1",)), searches=(SearchCall(0, "q", seen), SearchCall(1, "q", seen)))
    assert deep.gold() == Found(1, 1) and deep.gold(top=3) == Found(0, 1)  # found twice is one passage


# -- formulas ---------------------------------------------------------------------------------------------------


def test_plain_is_the_answer_alone() -> None:
    reward = score(view(), config())
    assert reward.total == 1.0 and reward.turn_rewards == {}
    assert reward.parts == {
        "answer": 1.0, "em": 1.0, "sub_em": 1.0, "f1": 1.0, "intent": 1.0, "retrieval": None, "recall": None,
        "structure": 1.0, "judge": None, "searches": 1.0, "invalid": 0.0,
    }  # fmt: skip


def test_chatr1_formula() -> None:
    row = replace(ROW, gold_passage_ids=("d1",), answers=("Paris France",))  # answer F1 2/3
    weights = {"rewrite_score": 0.2, "retrieval_score": 0.3, "structure_format_score": 0.1}
    searches = (SearchCall(0, "Louvre", (LOUVRE,)),)  # intent 0.5
    reward = score(view(row, searches=searches), config(preset="auto", **weights))
    assert reward.total == pytest.approx(2 / 3 + 0.2 * 0.5 + 0.3 + 0.1)
    assert score(view(row, prediction=None), config(preset="auto", **weights)).total == 0.0


def test_chatr1_skips_what_has_no_supervision() -> None:
    bare = replace(ROW, rewrite=None)
    reward = score(view(bare), config(preset="chatr1", rewrite_score=0.2, retrieval_score=0.3))
    assert reward.total == 1.0 and reward.parts["intent"] is None and reward.parts["retrieval"] is None


def test_intent_can_be_paid_at_the_turn_that_searched() -> None:
    searches = (SearchCall(0, "Louvre", ()), SearchCall(1, "where is Louvre", ()))
    given_config = config(preset="auto", rewrite_score=0.2, intent_placement="turn")
    reward = score(view(searches=searches), given_config)
    assert reward.turn_rewards == {1: pytest.approx(0.2)} and reward.total == pytest.approx(1.2)
    assert score(view(searches=()), given_config).turn_rewards == {}
    assert score(view(prediction=None), given_config).turn_rewards == {}


@pytest.mark.parametrize(
    ("model", "prediction", "total"),
    [
        ((GOOD, DONE), "Paris", 1.0),  # right, valid
        (("<search>q</search>", DONE), "Paris", 0.8),  # right, invalid
        ((GOOD, DONE.replace("Paris", "Rome")), "Rome", 0.2 + 0.1),  # wrong, valid, a passage held the answer
        (("<search>q</search>", DONE), "Rome", 0.05),  # wrong, invalid
        (("<search>q</search>", "<think>"), None, 0.0),  # none, invalid
    ],
)
def test_search_r1_formula(model: tuple[str, ...], prediction: str | None, total: float) -> None:
    given_config = config(preset="auto", structure_format_score=0.2, retrieval_score=0.1, final_format_score=0.05)
    row = replace(ROW, data_source="nq")
    assert score(view(row, model, prediction=prediction), given_config).total == pytest.approx(total)


def test_search_r1_without_the_answer_in_a_passage_gets_the_structure_alone() -> None:
    row = replace(ROW, data_source="nq", answers=("Rome",))
    assert score(view(row), config(preset="auto", structure_format_score=0.2, retrieval_score=0.1)).total == 0.2


@pytest.mark.parametrize("name", FORMULAS.names())
@pytest.mark.parametrize("stop", [StopReason.SEARCH_FAILED, StopReason.ENGINE_FAILED, StopReason.ABORTED])
def test_failed_episodes_score_zero_under_every_formula(name: Any, stop: StopReason) -> None:
    reward = score(view(stop=stop), config(preset=name))
    assert reward.total == 0.0 and reward.parts == {}


@pytest.mark.parametrize("name", FORMULAS.names())
def test_turn_rewards_are_a_share_of_the_total(name: Any) -> None:
    weights = {"chatr1": {"rewrite_score": 0.2}, "search_r1": {"structure_format_score": 0.1}}.get(name, {})
    reward = score(view(), config(preset=name, intent_placement="turn", **weights))
    assert sum(reward.turn_rewards.values()) <= reward.total


def test_metric_of_a_source() -> None:
    assert metric_of("nq", "auto") == "em" and metric_of("qrecc", "auto") == "f1" and metric_of("zzz", "em") == "em"
    with pytest.raises(DataError, match=r"did you mean 'topiocqa'.*reward_model\.function"):
        metric_of("topiocqua", "auto")
    assert describe("nq", config()) == "nq: em"
    assert describe("qrecc", config(preset="auto", f1_mode="chatr1")).startswith("qrecc: chatr1 formula over f1_chatr1")
    with pytest.raises(ConfigError, match="unknown answer metric 'f2'"):
        ANSWER_METRICS["f2"]


def test_recall_judge_and_answer_weights() -> None:
    row = replace(ROW, gold_passage_ids=("d1", "d2"), rewrite=None)
    weights = {"answer_score": 0.5, "recall_score": 0.4, "judge_score": 0.3}
    reward = score(view(row), config(preset="chatr1", **weights), judged=0.75)
    assert reward.total == pytest.approx(0.5 * 1.0 + 0.4 * 0.5 + 0.3 * 0.75)
    assert (reward.parts["recall"], reward.parts["judge"], reward.parts["retrieval"]) == (0.5, 0.75, 1.0)


@pytest.mark.parametrize(("preset", "earned"), [("chatr1", 1.0), ("search_r1", 1.0)])
def test_searches_and_invalid_actions_cost_with_and_without_an_answer(preset: str, earned: float) -> None:
    searches = tuple(SearchCall(turn, "where is Louvre", (LOUVRE,)) for turn in range(3))
    turns = ("search", "malformed", "search", "eos", "search", "empty_query", "length", "answer")
    given_config = config(preset=preset, search_cost=0.1, free_searches=1, invalid_cost=0.05)
    reward = score(view(searches=searches, turns=turns), given_config)
    assert reward.parts["searches"] == 2.0 and reward.parts["invalid"] == 4.0
    assert reward.total == pytest.approx(earned - 0.1 * 2 - 0.05 * 4)
    nothing = score(view(model=("<search>q</search>",), prediction=None, searches=searches, turns=turns), given_config)
    assert nothing.total == pytest.approx(-0.1 * 2 - 0.05 * 4)


def own_metric(prediction: str, reference: str, form: Any) -> float:
    return float(len(prediction) == len(reference))


def own_formula(given: FormulaInput) -> Reward:
    return Reward(given.config.rewrite_score * (given.parts["intent"] or 0.0) + len(given.view.searches), given.parts)


def test_functions_of_ones_own_by_import_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    named = config(function="test_rewards:own_metric", preset="auto")
    assert score(view(prediction="Praga"), named).total == 1.0 and score(view(prediction="Rom"), named).total == 0.0
    assert describe("zzz", named).startswith("zzz: chatr1 formula over test_rewards:own_metric")
    shaped = config(preset="test_rewards:own_formula", rewrite_score=0.5)
    assert score(view(), shaped).total == 1.5
    for name, message in (("no_such:f", "cannot import"), ("test_rewards:no", "no attribute"), ("chatr2", "chatr1")):
        with pytest.raises(ValidationError, match=message):
            config(preset=name)
    with pytest.raises(ValidationError, match="is not a function"):
        config(function="test_rewards:ROW")


def test_config_refuses_weights_that_would_do_nothing() -> None:
    with pytest.raises(ValidationError, match="rewrite_score would have no effect"):
        config(rewrite_score=0.2)
    with pytest.raises(ValidationError, match="final_format_score would have no effect with preset=chatr1"):
        config(preset="chatr1", final_format_score=0.1)
    with pytest.raises(ValidationError, match="judge_score, rewrite_score would have no effect with preset=search_r1"):
        config(preset="search_r1", rewrite_score=0.2, judge_score=0.1)
    with pytest.raises(ValidationError, match="free_searches would have no effect"):
        config(preset="chatr1", free_searches=2)
    with pytest.raises(ValidationError, match=r"set judge\.url and judge\.model"):
        search_config({"reward_model": {"preset": "chatr1", "judge_score": 0.1}})
    with pytest.raises(ValidationError, match="max_tuns"):
        search_config({"max_tuns": 2})
    assert search_config({"reward_model": {"preset": "auto", "rewrite_score": 0.2}}).retriever.topk == 3
