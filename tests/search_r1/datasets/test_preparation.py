"""Preparing a data set: what is written, joined, counted and said."""

import json
from pathlib import Path
from typing import Any

import pytest
from prepare_data import main as prepare_main
from show_prompt import main as show_main

from search_r1.datasets.catalog import SOURCES
from search_r1.datasets.checks import leakage, quantiles
from search_r1.datasets.collect import Split, collect
from search_r1.datasets.load import load_rows
from search_r1.datasets.preparation import Preparation, file_sha256, prepare
from search_r1.datasets.publish import write_parquet
from search_r1.datasets.report import report
from search_r1.datasets.rows import Row
from verl.errors import DataError

TOKENIZER = Path(__file__).resolve().parents[3] / "assets" / "tiny"


def record(conversation: int, turn: int, **changes: Any) -> dict[str, Any]:
    return {
        "Context": ["Who built the Zorn mill?", f"Ada {conversation} did."] * (turn - 1),
        "Question": f"When {turn}?",
        "Rewrite": f"When {turn} was mill {conversation} built?",
        "Answer": f"In 180{turn}.",
        "Conversation_no": conversation,
        "Turn_no": turn,
        "Conversation_source": "trec",
        **changes,
    }


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """QReCC's files: two splits that share a question, a malformed record, a repeated id, a turn without answer."""
    folder = tmp_path / "raw"
    (folder / "passages").mkdir(parents=True)
    train = [record(1, 1), record(1, 2), record(1, 3, Answer=" "), record(1, 2), record(1, 4, Question=None)]
    test = [record(8, 1, Question="when  1?"), record(9, 2)]
    (folder / "qrecc_train.json").write_text(json.dumps(train, indent=1))
    (folder / "qrecc_test.json").write_text(json.dumps(test, indent=1))
    (folder / "qrels.json").write_text(json.dumps({"1_1": {"p1": 1, "gone": 1}, "9_2": {"p2": 1}}))
    passages = [{"id": f"p{n}", "contents": f'"Mill {n}"\nText {n}.'} for n in range(4)]
    (folder / "passages" / "a.jsonl").write_text("".join(json.dumps(passage) + "\n" for passage in passages))
    return folder


def test_what_is_written_can_be_trained_on(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    prepared = prepare(Preparation("qrecc", folder, out, pin_corpus=True))
    assert prepared.files == {
        "train.parquet": 2, "test.parquet": 2, "conversations.jsonl": 5, "qrels.trec": 2, "passages.jsonl": 4,
    }  # fmt: skip
    first, second = load_rows([out / "train.parquet"])
    assert (first.qid, first.answers, first.rewrite) == ("qrecc:train:1_1", ("In 1801.",), "When 1 was mill 1 built?")
    assert (first.gold_passage_ids, first.gold_text, first.kind) == (("p1", "gone"), "Text 1.", "trec")
    assert first.corpus_sha256 == file_sha256(out / "passages.jsonl")
    assert second.history == ("Who built the Zorn mill?", "Ada 1 did.")
    assert second.messages is not None
    assert "Assistant: Ada 1 did.\n</context>\n\nUser query:\nWhen 2?\n" in second.messages[0]["content"]
    assert (out / "qrels.trec").read_text() == "qrecc:train:1_1 0 p1 1\nqrecc:test:9_2 0 p2 1\n"
    turns = [json.loads(line) for line in (out / "conversations.jsonl").read_text().splitlines()]
    assert [turn["qid"] for turn in turns if not turn["answers"]] == ["qrecc:train:1_3"]
    assert turns[0]["dataset"] == "qrecc" and turns[0]["history"] == []
    assert not list(out.glob(".*"))


def test_figures(folder: Path, tmp_path: Path) -> None:
    figures = prepare(Preparation("qrecc", folder, tmp_path / "out")).figures()
    assert list(figures["splits"]) == ["train", "test"]
    train = figures["splits"]["train"]
    assert {name: train[name] for name in ("read", "rows", "with_reference", "conversations", "references")} == {
        "read": 5, "rows": 3, "with_reference": 2, "conversations": 1, "references": 2,
    }  # fmt: skip
    assert train["dropped"] == {"duplicate_id": 1, "malformed": 1}
    assert train["details"]["malformed"][0].endswith("Question: must be a non-empty string; found None")
    assert train["have"] == {
        "history": 2, "rewrite": 3, "gold_passage_ids": 1, "gold_text": 1, "topic_shift": 0, "kind": 3,
        "answerable": 0, "dialogue_act": 0,
    }  # fmt: skip
    assert (train["gold_ids_not_in_corpus"], train["rows_with_gold_not_in_corpus"]) == (1, 1)
    assert train["lengths"]["question"] == [7, 7, 7, 7, 7]
    between = [shared for shared in figures["shared"] if shared["first"] != shared["second"]]
    assert between == [
        {"first": "train", "second": "test", "questions": 1, "rewrites": 0,
         "examples": (("qrecc:train:1_1", "qrecc:test:8_1"),)}
    ]  # fmt: skip
    assert figures["inputs"][str(folder / "qrecc_test.json")] == file_sha256(folder / "qrecc_test.json")


def test_strict_stops_at_the_first(folder: Path) -> None:
    with pytest.raises(DataError, match=r"qrecc_train\.json: qrecc:train:1_2 \(duplicate_id; without --strict"):
        collect(SOURCES["qrecc"], folder, strict=True)
    records = [record(1, 1), record(1, 2, Turn_no=None)]
    (folder / "qrecc_train.json").write_text(json.dumps(records, indent=1))
    with pytest.raises(
        DataError, match=r"qrecc_train\.json:11: Turn_no: must be a whole number; found None \(malformed"
    ):
        collect(SOURCES["qrecc"], folder, strict=True)
    (folder / "qrecc_train.json").write_text('[{"Turn_no": 1}]')
    with pytest.raises(DataError, match=r"no rows; the first of 1 drops: .*qrecc_train\.json:1: Conversation_no"):
        collect(SOURCES["qrecc"], folder / "qrecc_train.json", strict=False)


def test_a_corpus_of_ones_own_is_joined_and_not_copied(folder: Path, tmp_path: Path) -> None:
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text('{"id": "gone", "title": "Mill", "text": "Found."}\n')
    out = tmp_path / "out"
    prepared = prepare(Preparation("qrecc", folder, out, corpus=corpus))
    assert prepared.corpus is not None and prepared.corpus.sha256 == file_sha256(corpus)
    assert load_rows([out / "train.parquet"])[0].gold_text == "Found."
    assert not (out / "passages.jsonl").exists() and "passages.jsonl" not in prepared.files


def test_a_passage_is_called_what_its_corpus_calls_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "in").mkdir()
    rows = [{"qid": "q 1", "question": "When?", "answers": ["1801"], "gold_passage_ids": ["Zorn_mill:1"], "gold": 1}]
    (tmp_path / "in" / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "in" / "passages.jsonl").write_text('{"id": "Zorn mill:1", "contents": "Built in 1801."}\n')
    prepared = prepare(Preparation("own", tmp_path / "in", tmp_path / "out"))
    (row,) = load_rows([tmp_path / "out" / "train.parquet"])
    assert (row.gold_passage_ids, row.gold_text) == (("Zorn mill:1",), "Built in 1801.")
    assert json.loads((tmp_path / "out" / "passages.jsonl").read_text())["id"] == "Zorn mill:1"
    assert prepared.files["qrels.trec"] == 0
    assert "train: 1 pairs are not in `qrels.trec`: an id has white space." in report(prepared.figures(), [])
    assert "column 'gold' is not read" in caplog.text


def test_malformed_passages_are_counted_or_stop(folder: Path, tmp_path: Path) -> None:
    with (folder / "passages" / "a.jsonl").open("a") as file:
        file.write('{"id": "p9"}\n')
    figures = prepare(Preparation("qrecc", folder, tmp_path / "out")).figures()
    assert (figures["corpus"]["passages"], figures["corpus"]["malformed"]) == (4, 1)
    assert "5: text: must be a non-empty string; found missing" in report(figures, [])
    (folder / "qrecc_train.json").write_text(json.dumps([record(1, 1)]))
    with pytest.raises(DataError, match=r"a\.jsonl:5: text: .* \(without --strict it is counted\)"):
        prepare(Preparation("qrecc", folder, tmp_path / "out", strict=True))


def test_rewrites_from_elsewhere(folder: Path, tmp_path: Path) -> None:
    (folder / "qrecc_train.json").write_text(json.dumps([record(1, 1, Rewrite=""), record(1, 2)]))
    file = tmp_path / "rewrites.jsonl"
    file.write_text('{"id": "1_1", "rewrite": "silver"}\n{"id": "qrecc:train:1_2", "rewrite": "silver"}\n')
    out = tmp_path / "out"
    prepare(Preparation("qrecc", folder, out, rewrites=file))
    assert [row.rewrite for row in load_rows([out / "train.parquet"])] == ["silver", "When 2 was mill 1 built?"]
    file.write_text('{"id": "7_7", "rewrite": "silver"}\n')
    with pytest.raises(DataError, match="none of its 1 ids belongs to a row without a rewrite"):
        prepare(Preparation("qrecc", folder, out, rewrites=file))
    file.write_text('{"id": "1_1"}\n')
    with pytest.raises(DataError, match=r"rewrites\.jsonl:1: rewrite: must be a non-empty string; found missing"):
        prepare(Preparation("qrecc", folder, out, rewrites=file))


FULL = Row(
    qid="q1",
    question="When?",
    answers=("1801", "in 1801"),
    history=("Who?", "Ada", "", "More."),
    conv_id="c",
    turn_id=3,
    rewrite="When was it built?",
    gold_passage_ids=("p1", "p2"),
    gold_text="Text.",
    topic_shift=False,
    kind="why",
    answerable=True,
    dialogue_act="clarification",
    data_source="topiocqa",
    corpus_sha256="ab",
    messages=({"role": "user", "content": "Ask."},),
    extra={"golden_answers": ["1801"], "documents": ["a"], "ptkb": {"1": "é"}},
)


@pytest.mark.parametrize(
    "row",
    [FULL, Row(qid="q2", question="Why?", answers=("x",), history=()), Row(qid="q3", question="Why?", answers=("x",))],
)
def test_rows_come_back_from_parquet_as_they_were(tmp_path: Path, row: Row) -> None:
    assert write_parquet(tmp_path / "train.parquet", [row], "train") == 1
    assert load_rows([tmp_path / "train.parquet"]) == [row]


def test_published_columns(tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    write_parquet(tmp_path / "test.parquet", [FULL, Row(qid="q", question="Why?", answers=("x",))], "test")
    full, bare = pq.read_table(tmp_path / "test.parquet").to_pylist()
    published = ("data_source", "prompt", "question", "golden_answers", "ability", "reward_model")
    assert {name: full[name] for name in published} == {
        "data_source": "topiocqa",
        "prompt": [{"role": "user", "content": "Ask."}],
        "question": "When?",
        "golden_answers": ["1801"],
        "ability": "fact-reasoning",
        "reward_model": {
            "style": "rule",
            "ground_truth": {"target": ["1801", "in 1801"], "rewrite": "When was it built?", "doc": "Text."},
        },
    }
    assert bare["reward_model"]["ground_truth"] == {"target": ["x"], "rewrite": None, "doc": None}
    assert (bare["extra_info"]["split"], bare["extra_info"]["index"]) == ("test", 1)


def test_quantiles_are_lengths_that_occur() -> None:
    assert quantiles(list(range(1, 101))) == [1, 50, 90, 99, 100]
    assert quantiles([5, 9]) == [5, 5, 9, 9, 9] and quantiles([]) == []


def test_leakage_needs_the_same_history() -> None:
    def row(qid: str, question: str, *history: str) -> Row:
        return Row(qid=qid, question=question, answers=("x",), history=history, rewrite=f"{question} there")

    train = Split("train", [row("a", "When?", "Who?", "Ada."), row("b", "WHEN?", "who?", "ada.")])
    test = Split("test", [row("c", "When?", "Who?", "Bea."), row("d", "when?", "Who?", "Ada.")])
    inside, _, between = leakage({"train": train, "test": test})
    assert (inside.questions, inside.rewrites, inside.examples) == (1, 1, (("a", "b"),))
    assert (between.questions, between.rewrites, between.examples) == (1, 2, (("b", "d"),))


def test_the_command(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    command = ["--dataset", "qrecc", "--input", str(folder), "--output", str(out), "--tokenizer", str(TOKENIZER)]
    assert prepare_main([*command, "--template", "compact", "--max-start-length", "40"]) == 0
    printed = capsys.readouterr().out
    report = (out / "report.md").read_text()
    assert report.strip() in printed
    assert "| train | 5 | 3 | 2 | 1 | 2 | 1 duplicate_id, 1 malformed |" in report
    assert "| topic mark | not in this set | not in this set |" in report
    assert "train: 1 gold ids of 1 rows are not in it." in report
    assert "| train | test | 1 | 0 | qrecc:train:1_1 = qrecc:test:8_1 |" in report
    assert "train: with max_start_length=40, 1 of 2 prompts lose turns and 0 are refused." in report
    assert "<context>\n</context>\nUser: When 2?<|im_end|>" in report
    figures = json.loads((out / "report.json").read_text())
    assert figures["prompts"]["train"] == {"max_start_length": 40, "rows": 2, "shortened": 1, "refused": 0}
    assert prepare_main([*command, "--strict"]) == 2
    assert "prepare_data: " in capsys.readouterr().err
    assert prepare_main([*command[:2], "--input", str(tmp_path / "none"), *command[4:]]) == 2
    assert "no such file or folder" in capsys.readouterr().err


def test_without_a_tokenizer_lengths_are_characters(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert prepare_main(["--dataset", "qrecc", "--input", str(folder), "--output", str(tmp_path / "out")]) == 0
    printed = capsys.readouterr().out
    assert "## Lengths in characters" in printed and "User query:\nWhen 2?" in printed


def test_show_prompt(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prepare(Preparation("qrecc", folder, tmp_path / "out"))
    data = str(tmp_path / "out" / "train.parquet")
    command = ["--data", data, "--tokenizer", str(TOKENIZER), "--template", "compact"]
    assert show_main([*command, "--row", "1", "--questions-only"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("template compact v1\n\nqrecc:train:1_2: ")
    assert "<context>\nUser: Who built the Zorn mill?\n</context>\nUser: When 2?<|im_end|>" in printed
    assert show_main([*command, "--qid", "qrecc:train:1_2", "--max-start-length", "3"]) == 0
    assert "qrecc:train:1_2: refused, prompt_too_long" in capsys.readouterr().out
    assert show_main([*command, "--row", "7"]) == 2
    assert "--row 7: there are rows 0 to 1" in capsys.readouterr().err
    assert show_main([*command, "--qid", "x"]) == 2
    assert "no row with the qid 'x'; the first is 'qrecc:train:1_1'" in capsys.readouterr().err


def test_published_files_both_ways(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    def content(history: str) -> str:
        return f"Explain.\n<context>\n{history}</context>\nUser query:\nWhen?\n"

    published: list[dict[str, Any]] = [
        {
            "data_source": "topiocqa",
            "prompt": [{"role": "user", "content": content(history)}],
            "question": "When?",
            "golden_answers": ["1801", "in 1801"],
            "ability": "fact-reasoning",
            "reward_model": {"style": "rule", "ground_truth": {"target": ["1801"], "rewrite": "When?", "doc": "Text."}},
            "extra_info": {"split": "train", "index": index},
        }
        for index, history in enumerate(["User: Who?\nAssistant: Ada.\n", "They met.\n"])
    ]
    (tmp_path / "in").mkdir()
    pq.write_table(pa.Table.from_pylist(published), tmp_path / "in" / "train.parquet")
    prepare(Preparation("published", tmp_path / "in", tmp_path / "out", template="row"))
    written = pq.read_table(tmp_path / "out" / "train.parquet").to_pylist()
    for before, after in zip(published, written, strict=True):
        assert {name: after[name] for name in before if name != "extra_info"} == {
            name: value for name, value in before.items() if name != "extra_info"
        }
        assert after["extra_info"] == {**before["extra_info"], "notes": None}
    assert [record["history"] for record in written] == [["Who?", "Ada."], None]
    assert [record["qid"] for record in written] == ["topiocqa:train:0", "topiocqa:train:1"]
    prepare(Preparation("published", tmp_path / "in", tmp_path / "again", template="compact"))
    fresh, kept = load_rows([tmp_path / "again" / "train.parquet"])
    assert fresh.messages is not None and kept.messages is not None
    assert fresh.messages[0]["content"] == "<context>\nUser: Who?\nAssistant: Ada.\n</context>\nUser: When?"
    assert kept.messages[0]["content"] == content("They met.\n")
