"""The quality table: trec_eval's figures against the definitions computed here, and what the table counts."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from pathlib import Path

import pytest
from retrieval_helpers import PASSAGES, ScriptedRetriever, make_plan, write_corpus

from benchmarks import retrieval_quality as quality
from retrieval_server.backends.bm25_build import build


def by_definition(ranking: Sequence[str], judged: dict[str, int]) -> dict[str, float]:
    """The four measures, straight from their definitions."""
    relevant = {passage for passage, grade in judged.items() if grade > 0}
    gain = sum(judged.get(passage, 0) / math.log2(rank + 2) for rank, passage in enumerate(ranking[:10]))
    ideal = sorted(judged.values(), reverse=True)[:10]
    best = sum(grade / math.log2(rank + 2) for rank, grade in enumerate(ideal))
    first = next((rank for rank, passage in enumerate(ranking, 1) if passage in relevant), None)
    return {
        "nDCG@10": gain / best,
        "R@3": len(relevant & set(ranking[:3])) / len(relevant),
        "R@10": len(relevant & set(ranking[:10])) / len(relevant),
        "MRR@10": 0.0 if first is None else 1 / first,
    }


def test_measures_equal_their_definitions() -> None:
    draw = random.Random(7)
    passages = [f"p{i:02}" for i in range(30)]
    qrels = {
        f"q{i}": {passage: draw.choice([0, 1, 1, 3]) for passage in draw.sample(passages, 12)} | {"p00": 2}
        for i in range(40)
    }
    ranked = {qid: draw.sample(passages, draw.choice([0, 1, 2, 5, 10])) for qid in qrels}
    found = quality.score(ranked, qrels)
    assert set(found) == set(qrels)
    for qid, measures in found.items():
        assert measures == pytest.approx(by_definition(ranked[qid], qrels[qid]), abs=1e-6)


def test_a_hand_computed_case() -> None:
    """Relevant at rank 2 and not found: 1/log2(3) over 1 + 1/log2(3)."""
    measures = quality.score({"q": ["x", "a", "y"]}, {"q": {"a": 1, "b": 1}})["q"]
    assert measures == pytest.approx({"nDCG@10": 0.386853, "R@3": 0.5, "R@10": 0.5, "MRR@10": 0.5}, abs=1e-6)


def test_the_order_served_counts_and_not_the_order_of_ids() -> None:
    """trec_eval would sort equal scores by id."""
    for first, second in (("a", "b"), ("b", "a")):
        assert quality.score({"q": [first, second]}, {"q": {first: 1}})["q"]["MRR@10"] == 1


ROWS = [
    {"qid": "s:1", "dataset": "s", "question": "fishing", "history": [], "rewrite": None},
    {"qid": "s:2", "dataset": "s", "question": "it", "history": ["lake", "deep"], "rewrite": "boats"},
    {"qid": "t:1", "dataset": "t", "question": "unheardof", "history": [], "rewrite": ""},
    {"qid": "t:2", "dataset": "t", "question": "not judged", "history": [], "rewrite": "x"},
    {"qid": "t:3", "dataset": "t", "question": "judged not relevant", "history": [], "rewrite": "x"},
]
QRELS = "s:1 0 lake:0 1\ns:1 0 town:2 1\ns:2 0 town:2 1\nt:1 0 town:5 2\nt:3 0 town:5 0\n"


@pytest.fixture
def data(tmp_path: Path) -> Path:
    (tmp_path / "conversations.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (tmp_path / "qrels.trec").write_text(QRELS)
    write_corpus(tmp_path / "passages.jsonl")
    return tmp_path


def test_turns_are_searched_for_in_three_ways_and_unanswered_ones_are_zero(data: Path) -> None:
    qrels = quality.read_qrels(data / "qrels.trec")
    turns = quality.read_turns(data / "conversations.jsonl", qrels)
    assert [turn.qid for turn in turns] == ["s:1", "s:2", "t:1"]
    answers = {"fishing": ["lake:0"], "it": ["river:1", "town:2"], "lake deep it": ["town:2"], "boats": []}
    retriever = ScriptedRetriever(answers)
    ranked = {kind: quality.rankings(retriever, turns, kind) for kind in quality.QUERIES}
    assert [queries for queries, _ in retriever.calls] == [
        ["fishing", "it", "unheardof"], ["fishing", "lake deep it", "unheardof"], ["boats"],
    ]  # fmt: skip
    table = {kind: quality.cells(quality.score(ranked[kind], qrels), turns, at_least=2) for kind in quality.QUERIES}
    assert {kind: {name: cell.turns for name, cell in row.items()} for kind, row in table.items()} == {
        "raw": {"s": 2, "all": 3}, "history": {"s": 2, "all": 3}, "rewrite": {"all": 1},
    }  # fmt: skip
    assert table["raw"]["s"].means["R@3"] == pytest.approx((0.5 + 1) / 2)
    assert table["raw"]["all"].means["MRR@10"] == pytest.approx((1 + 0.5 + 0) / 3)
    assert table["rewrite"]["all"].means == dict.fromkeys(quality.MEASURES, 0.0)


def test_the_program_prints_a_table_and_judges_the_comparison(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    build(make_plan(data / "passages.jsonl", data / "one", stemmer="lucene"))
    build(make_plan(data / "passages.jsonl", data / "two", stemmer="none"))
    (data / "two.yaml").write_text(
        f"backend: {{name: bm25, index_path: {data}/two, corpus_path: {data}/passages.jsonl}}\n"
    )
    command = ["--data", str(data), "--backend", f"one={data}/one", "--backend", f"two={data}/two.yaml"]
    assert quality.main([*command, "--min_turns", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == (
        "| set | query | turns | one: nDCG@10 / R@3 / R@10 / MRR@10 | two: nDCG@10 / R@3 / R@10 / MRR@10 |"
    )
    assert [line.split(" | ")[:3] for line in lines[2:]] == [
        ["| s", "raw", "2"], ["| s", "history", "2"], ["| s", "rewrite", "1"],
        ["| t", "raw", "1"], ["| t", "history", "1"],
        ["| all", "raw", "3"], ["| all", "history", "3"], ["| all", "rewrite", "1"],
    ]  # fmt: skip
    assert "| 0.500 / 0.500 / 0.500 / 0.500 |" in lines[2]
    assert quality.main([*command, "--compare", "one", "two", "--within", "1"]) == 0
    assert "Largest difference in nDCG@10, one minus two:" in capsys.readouterr().out


def test_backends_that_differ_too_much_fail_the_run(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    build(make_plan(data / "passages.jsonl", data / "all"))
    other = write_corpus(data / "other.jsonl", [(id, title, "nothing") for id, title, _ in PASSAGES])
    build(make_plan(other, data / "nothing"))
    (data / "nothing.yaml").write_text(f"backend: {{name: bm25, index_path: {data}/nothing, corpus_path: {other}}}\n")
    command = ["--data", str(data), "--backend", f"a={data}/all", "--backend", f"b={data}/nothing.yaml"]
    assert quality.main([*command, "--compare", "a", "b"]) == 1
    assert "a minus b: +1.000 (all, rewrite)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--backend", "a=/none"], "error: index /none does not exist"),
        (["--backend", "a=/none", "--compare", "a", "b"], "error: --compare b: no such --backend; given: a"),
    ],
)
def test_mistakes_are_one_line(data: Path, capsys: pytest.CaptureFixture[str], flags: list[str], message: str) -> None:
    assert quality.main(["--data", str(data), *flags]) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith(message)
