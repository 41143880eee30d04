"""scripts/eval_f1.py: the published figures, to the letter."""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from search_r1.published import predictions_path, read_predictions, score_rows, table, write_scored
from verl.errors import DataError

INFO = "\n\n<information>Doc 1(Title: T) x &lt;/search> y</information>\n\n"
GOOD = "<think>a</think><search>q</search>" + INFO + "<answer>the Cat sat</answer>"
ROWS: list[dict[str, Any]] = [
    {
        "data_source": "topiocqa",
        "question": "Q1",
        "golden_answers": ["cat", "cat sat"],
        "predicted_answer": "the Cat sat",
        "raw_predicted_answer": GOOD,
    },
    {
        "data_source": "topiocqa",
        "question": "Q2",
        "golden_answers": ["x"],
        "predicted_answer": None,
        "raw_predicted_answer": "<think>a</think><search>q</search>" + INFO + "<search>r</search>",
    },
    {
        "data_source": "nq",
        "question": "Q3",
        "golden_answers": "x",
        "predicted_answer": "x",
        "raw_predicted_answer": "<|im_start|>assistant\n<think>a</think><answer>x</answer>",
    },
]


def test_scored_rows() -> None:
    first, second, third = score_rows(ROWS, Path("p.json"))
    assert (first.f1_score, first.f1_max) == (pytest.approx(2 / 3), 1.0)  # "cat sat" against "cat", then itself
    assert (first.golden_answer, first.format_valid, first.format_reason, first.search_count) == (
        "cat",
        True,
        "valid",
        1,
    )
    assert (second.f1_score, second.f1_max, second.format_valid, second.search_count) == (0.0, 0.0, False, 2)
    assert second.format_reason == "<search> after information"
    assert third.format_valid and third.f1_score == 1.0


@pytest.mark.parametrize(
    ("raw", "count"),
    [
        ("<search>a</search> <search>b\n</search>", 2),
        ("<search>a<search>b</search></search><search>c", 1),
        ("</search><search>", 0),
        ("<search>" * 200_000, 0),  # a pattern that looks for the end from every start takes minutes
    ],
)
def test_closed_searches_are_counted_in_one_pass(raw: str, count: int) -> None:
    started = time.process_time()
    (row,) = score_rows([{**ROWS[0], "raw_predicted_answer": raw}], Path("p.json"))
    assert row.search_count == count and time.process_time() - started < 5


def test_files_and_table(tmp_path: Path) -> None:
    path = tmp_path / "validation_results_step0.json"
    path.write_text(json.dumps(ROWS))
    assert predictions_path(str(path.with_suffix(""))) == path
    done = subprocess.run(
        [sys.executable, "scripts/eval_f1.py", "--predictions", str(path.with_suffix(""))],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[2],
    )
    assert done.stdout.splitlines()[:5] == [
        "| Dataset | Examples | Avg F1 | Avg F1 (best reference) | Format Accuracy | Avg #Search | File |",
        "|---|---|---|---|---|---|---|",
        "| topiocqa | 2 | 0.3333 | 0.5000 | 0.5000 | 1.5000 | validation_results_step0.json |",
        "| nq | 1 | 1.0000 | 1.0000 | 1.0000 | 0.0000 | validation_results_step0.json |",
        "| Meta-Average | 3 | 0.6667 | 0.7500 | 0.7500 | 0.7500 | - |",
    ]
    written = json.loads((tmp_path / "validation_results_step0_eval_f1.json").read_text())
    assert list(written[0]) == [
        "data_source",
        "question",
        "golden_answer",
        "predicted_answer",
        "f1_score",
        "format_valid",
        "format_reason",
        "search_count",
        "f1_max",
    ]


def test_characters_are_written_as_they_are(tmp_path: Path) -> None:
    scored = score_rows([{**ROWS[0], "question": "Où ?"}], Path("p.json"))
    assert "Où ?" in write_scored(scored, tmp_path / "p.json").read_text(encoding="utf-8")
    assert list(table([], Path("p.json")))[2:] == []


def test_what_cannot_be_scored_is_named(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    with pytest.raises(DataError, match=r"p\.json: no such file"):
        read_predictions(path)
    for text, message in (
        ("{", "not JSON"),
        ("[" * 200_000, "not JSON"),
        ("{}", "must hold a list"),
        ("[]", "must hold a list of at least one object"),
        ("[{}, 3]", "row 1: must be an object, found 3"),
    ):
        path.write_text(text)
        with pytest.raises(DataError, match=message):
            read_predictions(path)
    for row, message in (
        ({"question": "q"}, "row 0: field 'data_source' is missing"),
        ({**ROWS[0], "golden_answers": []}, "row 0: golden_answers must be"),
        ({**ROWS[0], "predicted_answer": 3}, "row 0: predicted_answer must be"),
        ({**ROWS[0], "raw_predicted_answer": ["x"]}, "row 0: raw_predicted_answer must be"),
        ({**ROWS[0], "data_source": ["nq"]}, "row 0: data_source must be"),
        ({**ROWS[0], "data_source": float("nan")}, "row 0: data_source must be .* found nan"),
        ({**ROWS[0], "question": "caf\ud800"}, "row 0: question must be a string of valid Unicode"),
    ):
        with pytest.raises(DataError, match=message):
            score_rows([row], path)
