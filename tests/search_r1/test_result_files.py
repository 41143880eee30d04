"""Result files of every kind are read; the card; the programs that score and compare them."""

from __future__ import annotations

import json
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import compare as compare_program
import pytest
import score_results
from chat_server import chat_server, says
from result_rows import queries, row

from search_r1.codec import Codec
from search_r1.evaluation.card import Card
from search_r1.evaluation.facts import retrieval_facts
from search_r1.evaluation.files import read_results, write_results
from search_r1.evaluation.results import IssuedQuery, ResultRow
from search_r1.evaluation.summary import summarise
from search_r1.evaluation.tables import methods_table
from search_r1.published import score_rows
from search_r1.rewards.view import EpisodeView
from search_r1.testing import CharTokenizer
from verl.errors import DataError
from verl.types import Document, Origin, SearchCall, Segment, StopReason, Trajectory

INFO = "\n\n<information>Doc 1(Title: T) x</information>\n\n"
PUBLISHED: list[dict[str, Any]] = [
    {
        "data_source": "topiocqa",
        "question": "Q1",
        "golden_answers": ["cat", "cat sat"],
        "predicted_answer": "the Cat sat",
        "raw_predicted_answer": f"<think>a</think><search> q one </search>{INFO}<answer>the Cat sat</answer>",
    },
    {
        "data_source": "nq",
        "question": "Q2",
        "golden_answers": "x",
        "predicted_answer": None,
        "raw_predicted_answer": "<search>no</search><|im_start|>assistant\n<search>a<search>b</search>",
    },
]


def test_published_file(tmp_path: Path) -> None:
    path = tmp_path / "validation_results_step0.json"
    path.write_text(json.dumps(PUBLISHED))
    first, second = read_results(path)
    assert (first.qid, first.answers, first.prediction) == ("row 0", ("cat", "cat sat"), "the Cat sat")
    assert first.searches == (IssuedQuery("q one"),) and first.format_valid and first.stop is None
    assert second.answers == ("x",) and second.searches == (IssuedQuery("b"),) and not second.format_valid
    figures, published = summarise([first, second]), score_rows(PUBLISHED, path)
    assert figures["f1"] == 0.5 and figures["f1_first"] == pytest.approx(sum(r.f1_score for r in published) / 2)
    assert figures["format_valid"] == 0.5 and "recall_at_3" not in figures and "turns" not in figures
    path.write_text(json.dumps([{"question": "q"}]))
    with pytest.raises(DataError, match=r"row 0: field 'data_source' is missing"):
        read_results(path)


def test_own_file_and_what_is_wrong_with_it(tmp_path: Path) -> None:
    path, rows = tmp_path / "results_step_0.jsonl", [row("a"), row("a", sample=1), row("b", question="Où ?")]
    write_results(path, rows)
    assert read_results(path) == rows and "Où" in path.read_text(encoding="utf-8")
    good = path.read_text().splitlines()[0]
    for text, message in (
        (f"{good}\n{good}", r":2: sample 0 of question 'a' occurs before, in line 1"),
        (f"{good}\n{{", r":2: not a JSON object"),
        ("[1]", r":1: a row must be a JSON object, found list"),
        ('{"qid": "a"}', r":1: not a row of a result file"),
        ("\n", r"no rows"),
        (good.replace('"qid"', '"quid"'), r":1: not a row .*unknown fields \['quid'\]"),
    ):
        path.write_text(text)
        with pytest.raises(DataError, match=message):
            read_results(path)
    with pytest.raises(DataError, match="no such file"):
        read_results(tmp_path / "nothing.jsonl")
    path.write_bytes(b'{"qid": "\xff"}')
    with pytest.raises(DataError, match="not UTF-8"):
        read_results(path)


def test_trajectories_need_their_tokenizer(tmp_path: Path) -> None:
    codec = Codec(CharTokenizer())
    ids = codec.encode("<think>t</think><answer> x </answer>")
    segments = (Segment(Origin.PROMPT, (65,)), Segment(Origin.MODEL, ids, (0.0,) * len(ids), 0))
    record = {
        "qid": "a", "question": "?", "answers": ["x"], "history": None, "gold_passage_ids": ["d"], "messages": None,
    }  # fmt: skip
    search = SearchCall(0, "q", (Document("d", "", ""),))
    trajectory = Trajectory("a#2", "a", segments, StopReason.ANSWERED, (search,), ("answer",), "x", row=record)
    path = tmp_path / "step_0.jsonl"
    path.write_text(json.dumps(trajectory.to_record()))
    assert read_results(path, lambda: codec) == [ResultRow.of(trajectory, EpisodeView.of(trajectory, codec))]
    (read,) = read_results(path, lambda: codec)
    assert (read.sample, read.format_valid, read.searches) == (2, True, (IssuedQuery("q", 0, ("d",), (True,)),))
    with pytest.raises(DataError, match=r"step_0\.jsonl:1: holds token ids; .*--model FOLDER"):
        read_results(path)


# -- card -------------------------------------------------------------------------------------------------------

FACTS = {"data": {"files": {"a.jsonl": "sha256 12"}, "rows": 2}, "retrieval": {"corpus": None}, "code": {"commit": "c"}}


class Cells(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag not in ("meta",):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def test_a_card_says_the_same_in_all_three_forms(tmp_path: Path) -> None:
    rows = [row("a", sample=i, searches=queries(("d2", "d9"))) for i in range(2)]
    rows += [row("b", sample=i, prediction="no", data_source="x<y|z", rewrite=None, searches=()) for i in range(2)]
    card = Card("Title & more", FACTS, summarise(rows), {"key": 1})
    paths = card.write(tmp_path / "deep" / "card_step_0")
    assert [path.name for path in paths] == ["card_step_0.json", "card_step_0.md", "card_step_0.html"]
    record = json.loads(paths[0].read_text())
    assert record == {"title": card.title, "facts": FACTS, "figures": summarise(rows), "config": {"key": 1}}
    markdown, page = paths[1].read_text(), Cells()
    page.feed(paths[2].read_text())
    assert page.open == [] and "<y" not in paths[2].read_text()
    for line in (
        "| F1 (words, best reference) | 0.500 | 0.000 to 1.000 | 2 |",
        "| Best query against the gold rewrite (F1) | 0.000 | 0.000 to 0.000 | 1 |",
        "| em/pass_at_2 | 0.500 |  | 2 |",
        "| best_query/mrr | 0.500 |  | 2 |",
        r"| source_x<y\|z | 1 | 0.000 | 0.000 | 0.000 |",
        "| files.a.jsonl | sha256 12 |",
        "| corpus | not known |",
    ):
        assert line in markdown.splitlines()
        cells = line.replace(r"\|", "|").strip("| ").split(" | ")
        assert all(cell in page.texts for cell in cells if cell)


def test_what_the_service_says_of_itself_is_in_the_facts() -> None:
    config = score_results.task_config(["retriever.topk=5"])
    info = {"manifest": {"corpus": {"sha256": "ab"}, "kind": "bm25"}, "retriever": "bm25", "limits": {"max_topk": 9}}
    facts = retrieval_facts(config, info)
    assert facts["corpus"] == {"sha256": "ab"} and facts["index"] == {"kind": "bm25"} and facts["topk"] == 5
    assert facts["retriever"] == {"retriever": "bm25"}
    assert retrieval_facts(config, None)["corpus"] is None  # a published server says nothing
    assert retrieval_facts(score_results.task_config(["do_search=false"]), info) == {"search": "off"}


def test_table_of_methods() -> None:
    policy = [row("a"), row("b", data_source="nq", prediction="no", has_gold=False, gold_ids=None)]
    lines = methods_table({"policy": policy, "gold_query": policy[:1]}).splitlines()
    assert lines[0].split(" | ")[:4] == ["| method", "topiocqa: F1", "nq: F1", "all: n"]
    assert lines[2].startswith("| policy | 100.0 [100.0, 100.0] | 0.0 [0.0, 0.0] | 2 | 50.0 [0.0, 100.0] | ")
    assert lines[2].endswith(" | 100.0 | 1.00 | 100.0 |")
    assert lines[3].startswith("| gold_query | 100.0 [100.0, 100.0] | - | 1 | ")


# -- programs ---------------------------------------------------------------------------------------------------


def test_scoring_a_file_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "results_step_0.jsonl"
    write_results(path, [row("a"), row("b", prediction="『1793』")])
    with chat_server(lambda request, _: says("Score: 4", 50, 5)) as server:
        judge = [f"judge.url={server.url}", "judge.model=m", f"judge.cache_path={tmp_path / 'c.sqlite'}"]
        arguments = [str(path), "reward_model.normaliser=multilingual", "evaluation.judge=true", *judge]
        assert score_results.main([*arguments, "judge.input_price=1"]) == 0
        assert len(server.requests) == 2
        assert "| Judge | 0.750 | 0.750 to 0.750 | 2 |" in capsys.readouterr().out
        card = json.loads((tmp_path / "results_step_0_scored" / "card.json").read_text())
        assert card["figures"]["em"] == 1.0 and card["figures"]["judge_usage/cost"] == pytest.approx(1e-4)
        facts = card["facts"]
        assert facts["scoring"]["normaliser"] == "multilingual" and facts["scoring"]["judge"]["prompt"] == "graded-1"
        assert len(facts["data"]["sha256"]) == 64
        scored = read_results(tmp_path / "results_step_0_scored" / "results.jsonl")
        assert [one.scores for one in scored] == [{"judge": 0.75}] * 2
        # From the cache; options may stand between keys.
        assert score_results.main([arguments[0], "--output", str(tmp_path / "again"), *arguments[1:]]) == 0
        assert len(server.requests) == 2
    again = json.loads((tmp_path / "again" / "card.json").read_text())["figures"]
    assert again["judge_usage/cached"] == 2 and again["judge"] == 0.75


def test_an_answer_without_a_grade_is_not_available(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "r.jsonl"
    write_results(path, [row("a"), row("b", prediction="bad"), row("c", prediction=None)])

    def answer(request: dict[str, Any], number: int) -> Any:
        return says("no idea" if '"bad"' in request["messages"][0]["content"] else "Score: 5")

    with chat_server(answer) as server:
        judge = [f"judge.url={server.url}", "judge.model=m", "judge.cache_path=null"]
        assert score_results.main([str(path), "evaluation.judge=true", *judge]) == 0
    figures = json.loads((tmp_path / "r_scored" / "card.json").read_text())["figures"]
    assert figures["judge"] == 0.5 and figures["n/judge"] == 2 and figures["judge_usage/failures"] == 1


def test_scoring_a_published_file_gives_the_published_figures(tmp_path: Path) -> None:
    path = tmp_path / "validation_results_step0.json"
    path.write_text(json.dumps(PUBLISHED))
    assert score_results.main([str(path)]) == 0
    figures = json.loads((tmp_path / "validation_results_step0_scored" / "card.json").read_text())["figures"]
    assert figures["f1_first"] == pytest.approx(sum(one.f1_score for one in score_rows(PUBLISHED, path)) / 2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing.json"], "no such file"),
        (["x.jsonl", "reward_model.normaliser=squadd"], "reward_model.normaliser: Input should be"),
        (["x.jsonl", "evaluation.judge=true"], "set judge.url and judge.model"),
        (["x.jsonl", "wrong"], "not of the form key.path=value"),
    ],
)
def test_mistakes_end_with_one_message(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert score_results.main(arguments) == 2
    assert message in capsys.readouterr().err


def test_comparing_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before, after = tmp_path / "before.jsonl", tmp_path / "after.jsonl"
    write_results(before, [row(str(i), prediction="no") for i in range(12)])
    write_results(after, [row(str(i), prediction="1793" if i < 11 else "no") for i in reversed(range(12))])
    out = tmp_path / "out.json"
    assert compare_program.main([f"start={before}", str(after), "--json", str(out), "--table"]) == 0
    said = capsys.readouterr().out
    assert f"| {after} | em | 12 | 0.0000 | 0.9167 | +0.9167 [+0.7500, +1.0000] | 0.0010 |" in said
    assert f"| {after} | rewrite_f1 | 12 | 1.0000 | 1.0000 | +0.0000 [+0.0000, +0.0000] | 1.0000 | 1.0000 |" in said
    assert "| start | 0.0 [0.0, 0.0] | 12 |" in said  # the table of methods
    assert json.loads(out.read_text())["after"][str(after)]["em"]["gain"]["mean"] == pytest.approx(11 / 12)
    write_results(after, [row("z")])
    assert compare_program.main([str(before), str(after)]) == 2
    assert "no question is in both" in capsys.readouterr().err


def test_the_programs_run_as_programs() -> None:
    import subprocess

    for name in ("compare", "score_results"):
        command = [sys.executable, f"scripts/{name}.py", "--help"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        assert "validation_results_stepN.json" in done.stdout
