"""Figures of result rows: groups, samples, rankings by an independent formula, intervals and tests."""

from __future__ import annotations

import itertools
import json
import math
import random

import pytest
from result_rows import queries, row
from scipy import stats

from search_r1.evaluation.compare import compare
from search_r1.evaluation.intervals import bootstrap_interval, paired_p_values
from search_r1.evaluation.rankings import score_rankings
from search_r1.evaluation.results import ResultRow
from search_r1.evaluation.summary import summarise
from search_r1.evaluation.votes import majority, pass_at_k
from search_r1.rewards.text import normalise_multilingual
from verl.errors import DataError


def test_a_row_survives_its_file() -> None:
    full = row(history=("a", "b"), topic_shift=True, answerable=False, scores={"judge": 0.5, "bertscore": None})
    for one in (full, row(gold_ids=None, turns=None, searches=(), rewrite=None, has_gold=False)):
        assert ResultRow.from_json(json.loads(json.dumps(one.to_json()))) == one
    with pytest.raises(ValueError, match=r"unknown fields \['scroes'\]"):
        ResultRow.from_json({**full.to_json(), "scroes": {}})


def test_figures_and_groups_by_hand() -> None:
    rows = [
        row("a"),
        row("b", prediction="1793 or 1794", depth=12, topic_shift=True, answerable=True, data_source="qrecc"),
        row("c", prediction=None, stop="turn_limit", topic_shift=False, answerable=False, dialogue_act="noAnswer"),
        row("d", failed=True, stop="search_failed", searches=(), kind="list"),
    ]
    figures = summarise(rows)
    # "1793 or 1794" against "1793": 1 of 3 words, all of 1; against "in 1793" 1 of 3, 1 of 2
    assert figures["n"] == 4 and figures["f1"] == pytest.approx((1 + 0.5 + 0 + 0) / 4) and figures["em"] == 0.25
    assert figures["sub_em"] == 0.5 and figures["f1_first"] == pytest.approx((2 / 3 + 0.5) / 4)
    assert figures["recall_at_3"] == figures["rewrite_f1"] == 0.75 and figures["failed"] == 0.25
    assert figures["turns"] == 2 and figures["searches"] == 0.75 and figures["answered"] == 0.5
    assert (figures["f1/source_qrecc"], figures["n/source_topiocqa"]) == (0.5, 3)
    assert (figures["f1/turn_10_on"], figures["n/turn_2"]) == (0.5, 3)
    assert (figures["f1/topic_shift"], figures["f1/same_topic"], figures["n/topic_shift"]) == (0.5, 0.0, 1)
    assert (figures["f1/answerable"], figures["f1/unanswerable"], figures["f1/act_noAnswer"]) == (0.5, 0.0, 0.0)
    assert (figures["f1/hit"], figures["f1/miss"], figures["n/miss"], figures["f1/kind_list"]) == (0.5, 0.0, 1, 0.0)
    assert figures["stop/answered"] == 0.5 and figures["stop/turn_limit"] == figures["stop/search_failed"] == 0.25
    assert summarise(rows) == figures and summarise([]) == {"n": 0.0}


def test_missing_supervision_is_left_out_and_counted() -> None:
    bare = row("a", rewrite=None, gold_ids=None, has_gold=False, searches=(), turns=None, stop=None)
    figures = summarise([bare])
    assert figures["n_rewrite"] == figures["n_gold"] == 0
    assert not {"rewrite_f1", "recall_at_3", "turns", "answered", "queries/mrr"} & set(figures)
    half = summarise([bare, row("b")])
    assert half["rewrite_f1"] == 1.0 and half["n/rewrite_f1"] == half["n_rewrite"] == 1 and half["n"] == 2


def test_the_normaliser_reaches_every_figure() -> None:
    given = [row(answers=("東京",), prediction="東京都", rewrite="首都", searches=queries(("d2",)))]
    assert summarise(given)["f1"] == 0.0
    assert summarise(given, normalise_multilingual)["f1"] == pytest.approx(0.8)


# -- several samples --------------------------------------------------------------------------------------------


def test_pass_at_k_is_the_share_of_subsets_that_hold_a_right_one() -> None:
    for samples in range(1, 7):
        for correct, k in itertools.product(range(samples + 1), range(1, samples + 1)):
            subsets = list(itertools.combinations(range(samples), k))
            share = sum(any(member < correct for member in subset) for subset in subsets) / len(subsets)
            assert pass_at_k(correct, samples, k) == pytest.approx(share)


def test_samples_of_a_question_count_as_one_question() -> None:
    predictions = ["1793", "1800", "The 1800.", None]
    rows = [row("a", sample=i, prediction=p) for i, p in enumerate(predictions)]
    rows += [row("b", sample=i, prediction="in 1793", failed=i == 3) for i in range(4)]
    figures = summarise(rows)
    assert figures["n"] == 2 and figures["episodes"] == 8
    assert figures["em"] == pytest.approx((0.25 + 0.75) / 2)
    assert figures["em/pass_at_1"] == figures["em"]
    assert figures["em/pass_at_2"] == pytest.approx((0.5 + 1.0) / 2) and figures["em/pass_at_4"] == 1.0
    assert figures["em/majority_of_4"] == 0.5 and figures["f1/majority_of_4"] == 0.5 and figures["f1/best_of_4"] == 1.0
    assert bootstrap_interval([0.25, 0.75]) == (figures["em/low"], figures["em/high"])  # questions are resampled


def test_votes() -> None:
    def vote(*predictions: str | None) -> str | None:
        return majority([row(sample=i, prediction=p) for i, p in enumerate(predictions)])

    assert vote("Rome", "the Paris", "paris.", None) == "the Paris"
    assert vote("b", "a", "a", "b") == "b" and vote(None, None) is None  # a tie goes to the earliest
    assert majority([row(prediction="x", failed=True), row(prediction="y", sample=1)]) == "y"


# -- rankings ---------------------------------------------------------------------------------------------------


def by_formula(ids: tuple[str, ...], gold: set[str], cutoff: int) -> dict[str, float]:
    """Recall, nDCG (binary gain, log2 discount) and reciprocal rank, written out."""
    found = [identity in gold for identity in ids]
    gain = sum(1 / math.log2(rank + 2) for rank, hit in enumerate(found[:cutoff]) if hit)
    ideal = sum(1 / math.log2(rank + 2) for rank in range(min(len(gold), cutoff)))
    return {
        f"recall_{cutoff}": sum(found[:cutoff]) / len(gold),
        f"ndcg_{cutoff}": gain / ideal,
        "mrr": max((1 / (rank + 1) for rank, hit in enumerate(found) if hit), default=0.0),
    }


def test_rankings_agree_with_their_formulas_and_with_trec_eval_itself() -> None:
    from pytrec_eval import RelevanceEvaluator

    rng = random.Random(3)
    names = [f"p{i}" for i in range(12)]
    rows, qrel, run = [], {}, {}
    for index in range(60):
        gold = set(rng.sample(names, rng.randrange(1, 4)))
        ids = tuple(rng.sample(names, rng.randrange(3, 11)))
        rows.append(row(f"r{index}", gold_ids=tuple(gold), searches=queries(ids, gold=tuple(gold))))
        qrel[f"r{index}"] = dict.fromkeys(gold, 1)
        run[f"r{index}"] = {identity: 1.0 / (rank + 1) for rank, identity in enumerate(ids)}
    theirs = RelevanceEvaluator(qrel, {"recall_3", "ndcg_cut_3", "ndcg_cut_10", "recip_rank"}).evaluate(run)
    for one, figures in zip(rows, score_rankings(rows), strict=True):
        assert figures is not None
        for cutoff in (1, 3, 5, 10):
            expected = by_formula(one.searches[0].ids or (), set(one.gold_ids or ()), cutoff)
            for name, value in expected.items():
                assert figures[f"queries/{name}"] == figures[f"best_query/{name}"] == pytest.approx(value, abs=1e-9)
        assert figures["queries/recall_3"] == theirs[one.qid]["recall_3"]
        assert figures["queries/ndcg_10"] == theirs[one.qid]["ndcg_cut_10"]
        assert figures["queries/mrr"] == theirs[one.qid]["recip_rank"]


def test_rankings_of_a_question_with_several_queries_or_none() -> None:
    many = row("a", searches=queries(("d9", "d2"), ("d2",), ()))  # the last found nothing
    none = row("b", searches=())
    failed = row("c", failed=True)
    unknown = row("d", gold_ids=None)
    figures = score_rankings([many, none, failed, unknown])
    assert figures[0] == {
        "queries/mrr": pytest.approx((0.5 + 1 + 0) / 3),
        "best_query/mrr": 1.0,
        "queries/recall_1": pytest.approx(1 / 3),
        "best_query/recall_1": 1.0,
        "queries/ndcg_1": pytest.approx(1 / 3),
        "best_query/ndcg_1": 1.0,
    }  # the longest ranking has two passages: cut-offs of 3 and more say nothing
    assert set(figures[1].values()) == set(figures[2].values()) == {0.0} and figures[3] is None
    twice = score_rankings([row(searches=queries(("d9", "d9", "d2")))])[0]
    assert twice is not None and twice["queries/mrr"] == 0.5  # a passage that stands twice has one rank


# -- intervals and tests ----------------------------------------------------------------------------------------


def test_randomisation_test_by_hand() -> None:
    # Of 2^3 signs of (1, 1, 1) two are as far from 0 as what was seen; of (1, 1, 0) four of eight.
    assert paired_p_values([0, 0, 0], [1, 1, 1])[0] == 0.25
    assert paired_p_values([0, 0, 5], [1, 1, 5])[0] == 0.5
    assert paired_p_values([0.3, 0.1], [0.3, 0.1]) == (1.0, 1.0)


def test_paired_tests_agree_with_scipy() -> None:
    rng = random.Random(5)
    for count, shift in ((8, 0.3), (40, 0.05), (200, 0.1), (200, 0.0)):
        before = [rng.random() for _ in range(count)]
        after = [value + rng.gauss(shift, 0.4) for value in before]
        randomised, t_test = paired_p_values(before, after)
        assert t_test == pytest.approx(stats.ttest_rel(after, before).pvalue, rel=1e-9)
        differences = [b - a for a, b in zip(before, after, strict=True)]
        theirs = stats.permutation_test(
            (differences,), lambda x, axis: x.mean(axis=axis), permutation_type="samples", vectorized=True,
            n_resamples=9999, rng=1,
        ).pvalue  # fmt: skip
        assert randomised == pytest.approx(theirs, abs=0.02)


def test_comparison_is_paired_by_question() -> None:
    before = [row("a", prediction="x"), row("b"), row("only before")]
    after = [row("b"), row("a"), row("only after", question="other")]
    found = compare(before, after)
    assert (found["f1"].n, found["f1"].before, found["f1"].after, found["f1"].gain.mean) == (2, 0.5, 1.0, 0.5)
    assert found["f1"].p_randomisation == 1.0 and "judge" not in found
    judged = [row("a", scores={"judge": 1.0}), row("b", scores={"judge": None})]
    assert compare(judged, judged)["judge"].n == 1
    with pytest.raises(DataError, match=r"no question is in both: 1 rows from 'a' on and 1 rows from 'z' on"):
        compare([row("a")], [row("z")])
    with pytest.raises(DataError, match=r"question 'a' differs: 'When was it opened\?' .* and 'Why\?'"):
        compare([row("a")], [row("a", question="Why?")])
