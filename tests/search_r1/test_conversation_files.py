"""Reading data files: fields, places in errors, subsets."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from search_r1.datasets.load import load_rows
from search_r1.datasets.rows import Row
from verl.errors import DataError

ROW: dict[str, Any] = {
    "qid": "c1_2",
    "conv_id": "c1",
    "turn_id": 2,
    "question": "When?",
    "history": ["Who wrote it?", "Ann Lee."],
    "answers": ["1990"],
    "rewrite": "When did Ann Lee write it?",
    "gold_passage_ids": ["d7"],
    "topic_shift": False,
    "kind": "why",
    "answerable": True,
    "dialogue_act": "directAnswer",
}


def write(path: Path, *rows: Any) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def test_jsonl_row(tmp_path: Path) -> None:
    (row,) = load_rows([write(tmp_path / "a.jsonl", "", ROW)])
    assert row == Row(
        qid="c1_2",
        question="When?",
        answers=("1990",),
        history=("Who wrote it?", "Ann Lee."),
        conv_id="c1",
        turn_id=2,
        rewrite="When did Ann Lee write it?",
        gold_passage_ids=("d7",),
        topic_shift=False,
        kind="why",
        answerable=True,
        dialogue_act="directAnswer",
    )
    assert row.depth == 2 and row.data_source == "conversation"
    assert Row.from_json(json.loads(json.dumps(row.to_json()))) == row


def test_missing_supervision_is_none(tmp_path: Path) -> None:  # T30
    bare = {"qid": 1, "question": "Why?", "answers": "x", "rewrite": " ", "gold_passage_ids": []}
    (row,) = load_rows([write(tmp_path / "a.jsonl", bare)])
    assert (row.qid, row.answers, row.history, row.rewrite, row.gold_passage_ids) == ("1", ("x",), (), None, None)
    assert row.depth == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"answers": []}, r"a\.jsonl:2: answers: must be a non-empty list of strings; found \[\]"),
        ({"question": None}, r"a\.jsonl:2: question: must be a non-empty string; found None"),
        ({"history": ["only a question"]}, r"a\.jsonl:2: history: must end with an answer .*has 1 entries"),
        ({"turn_id": "2"}, r"a\.jsonl:2: turn_id: must be a whole number or null; found '2'"),
        ({"topic_shift": 1}, r"a\.jsonl:2: topic_shift: must be true, false or null"),
        ({"qid": None}, r"a\.jsonl:2: qid: is required"),
        ({"qid": "first"}, r"a\.jsonl:2: qid 'first' occurs before, at .*a\.jsonl:1"),
    ],
)
def test_malformed_row_names_file_line_column_and_value(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    path = write(tmp_path / "a.jsonl", {**ROW, "qid": "first"}, {**ROW, **change})
    with pytest.raises(DataError, match=message):
        load_rows([path])


def test_blank_references_are_left_out_and_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    some = {**ROW, "qid": "some", "answers": ["", "1990", " "]}
    none = {**ROW, "qid": "none", "answers": [""]}
    path = write(tmp_path / "a.jsonl", ROW, some, none)
    with caplog.at_level(logging.WARNING):
        rows = load_rows([path])
    assert [(row.qid, row.answers) for row in rows] == [("c1_2", ("1990",)), ("some", ("1990",))]
    assert [record.getMessage() for record in caplog.records] == [
        f"3 blank references left out, and with them 1 rows that have no other; the first at {path}:2"
    ]
    with pytest.raises(DataError, match=r"b\.jsonl: no rows with a reference \(1 without\)"):
        load_rows([write(tmp_path / "b.jsonl", none)])


def test_files_that_are_no_data(tmp_path: Path) -> None:
    for path, message in (
        (write(tmp_path / "b.jsonl", "{oops"), r"b\.jsonl:1: not a JSON object"),
        (write(tmp_path / "l.jsonl", "[1]"), r"l\.jsonl:1: a row must be a JSON object, found list"),
        (write(tmp_path / "e.jsonl"), "no rows"),
        (tmp_path / "none.jsonl", r"none\.jsonl: no such file; set data\.train_files"),
        (tmp_path / "a.csv", r"unknown kind of data file; known: \.jsonl, \.parquet"),
        (write(tmp_path / "x.parquet", "no"), r"x\.parquet: not a readable parquet file"),
    ):
        with pytest.raises(DataError, match=message):
            load_rows([path])


def test_unknown_column_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write(tmp_path / "a.jsonl", {**ROW, "rewrit": "x"}, {**ROW, "qid": "other", "rewrit": "x"})
    with caplog.at_level(logging.WARNING):
        assert len(load_rows([path])) == 2
    assert [r.getMessage() for r in caplog.records] == [
        f"{path}:1: column 'rewrit' is not read (did you mean 'rewrite'?)"
    ]


def test_subset_is_the_same_each_time_and_in_file_order(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", *({**ROW, "qid": f"{i:03d}"} for i in range(100)))
    chosen = [row.qid for row in load_rows([path], limit=10)]
    assert len(chosen) == 10 and chosen == sorted(chosen) == [row.qid for row in load_rows([path], limit=10)]
    assert len(load_rows([path], limit=500)) == 100


def published(**changes: Any) -> dict[str, Any]:
    return {
        "data_source": "topiocqa",
        "prompt": [{"role": "user", "content": "<context>\n</context>\nUser query:\nWhen?"}],
        "question": "When?",
        "golden_answers": ["1990", "in 1990"],
        "reward_model": {"style": "rule", "ground_truth": {"target": ["1990"], "rewrite": "When was it?", "doc": ""}},
        "extra_info": {"split": "test", "index": 0},
        "ability": "fact-reasoning",
        **changes,
    }


def parquet(path: Path, *rows: dict[str, Any]) -> Path:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.Table.from_pylist(list(rows)), path)
    return path


def test_published_parquet_row(tmp_path: Path) -> None:
    first, second = load_rows([parquet(tmp_path / "test.parquet", published(), published())])
    assert (first.qid, second.qid) == ("topiocqa:test:0", "topiocqa:test:1")  # extra_info.index is 0 in both
    assert first.answers == ("1990",) and first.extra == {"golden_answers": ["1990", "in 1990"]}
    assert (first.rewrite, first.gold_text, first.history) == ("When was it?", None, None)
    assert first.messages == ({"role": "user", "content": "<context>\n</context>\nUser query:\nWhen?"},)
    assert Row.from_json(json.loads(json.dumps(first.to_json()))) == first


def test_parquet_files_of_two_sources_may_have_the_same_name(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    paths = [parquet(tmp_path / name / "train.parquet", published(data_source=name)) for name in ("a", "b")]
    assert [row.qid for row in load_rows(paths)] == ["a:train:0", "b:train:0"]
    with pytest.raises(DataError, match="give files of one source different names"):
        load_rows([paths[0], paths[0]])


def test_parquet_without_ground_truth_uses_golden_answers(tmp_path: Path) -> None:
    row = published()
    del row["reward_model"]
    (read,) = load_rows([parquet(tmp_path / "t.parquet", row)])
    assert read.answers == ("1990", "in 1990") and read.extra == {}


def test_parquet_errors_name_file_and_row(tmp_path: Path) -> None:
    path = parquet(tmp_path / "t.parquet", published(), published(question=""))
    with pytest.raises(DataError, match=r"t\.parquet: row 1: question: must be a non-empty string"):
        load_rows([path])
    path = parquet(tmp_path / "u.parquet", published(prompt="text"))
    with pytest.raises(DataError, match=r"u\.parquet: row 0: prompt: must be a non-empty list"):
        load_rows([path])


@pytest.mark.parametrize("name", ["question", "rewrite", "qid", "answers", "history"])
def test_half_a_surrogate_pair_is_refused_where_it_stands(tmp_path: Path, name: str) -> None:
    value: Any = ["caf\ud800", "x"] if name in ("answers", "history") else "caf\ud800"
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({**ROW, name: value}) + "\n")  # escaped: the file itself is plain ASCII
    with pytest.raises(DataError, match=rf"a\.jsonl:1: {name}: holds half of a surrogate pair"):
        load_rows([path])


def test_bytes_that_are_not_utf8_are_named_with_their_line(tmp_path: Path) -> None:
    good = json.dumps(ROW).encode()
    (tmp_path / "latin.jsonl").write_bytes(good + b'\n{"qid": "b\xff"}\n')
    with pytest.raises(DataError, match=r"latin\.jsonl:2: not UTF-8"):
        load_rows([tmp_path / "latin.jsonl"])
    (tmp_path / "deep.jsonl").write_bytes(b"[" * 200_000)
    with pytest.raises(DataError, match=r"deep\.jsonl:1: not a JSON object"):
        load_rows([tmp_path / "deep.jsonl"])
    (tmp_path / "bom.jsonl").write_bytes(b"\xef\xbb\xbf" + good)
    assert len(load_rows([tmp_path / "bom.jsonl"])) == 1


def test_a_damaged_parquet_file_is_named_with_the_row(tmp_path: Path) -> None:
    path = parquet(tmp_path / "test.parquet", *(published(question=f"When {n}?") for n in range(50)))
    data = bytearray(path.read_bytes())
    data[4:120] = b"\xff" * 116  # the first page; the footer, at the end, stays readable
    path.write_bytes(data)
    with pytest.raises(DataError, match=r"test\.parquet: damaged in or after row 0"):
        load_rows([path])
