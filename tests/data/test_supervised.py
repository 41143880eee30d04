"""Rows of supervised training: encoding, weights, and errors that name the place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from training_cases import byte_tokenizer

from verl.data.batch import Scored
from verl.data.supervised import RowFormat, load_rows
from verl.errors import DataError

TOKENIZER = byte_tokenizer()
FORM = RowFormat(max_length=40)


def write(path: Path, *rows: Any) -> str:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return str(path)


def load(tmp_path: Path, *rows: Any, form: RowFormat = FORM) -> list[Scored]:
    return load_rows([write(tmp_path / "rows.jsonl", *rows)], TOKENIZER, form)


def test_segments_are_encoded_alone_and_model_text_is_trained(tmp_path: Path) -> None:
    row = {"segments": [["prompt", "ab"], ["model", "cd<|im_end|>"], ["env", "e"], ["model", "f", 2.5]]}
    (loaded,) = load(tmp_path, row)
    assert TOKENIZER.decode(loaded.token_ids) == "abcd<|im_end|>ef"
    assert len(loaded.token_ids) == 7
    assert loaded.columns["weights"] == (0, 0, 1, 1, 1, 0, 2.5)
    assert loaded.mask == (False, False, True, True, True, False, True)


def test_weight_zero_is_not_trained(tmp_path: Path) -> None:
    (loaded,) = load(tmp_path, {"segments": [["model", "abc", 0], ["model", "d"]]})
    assert loaded.mask == (False, False, False, True)


def test_the_first_token_is_never_a_target(tmp_path: Path) -> None:
    (loaded,) = load(tmp_path, {"segments": [["model", "ab"]]})
    assert loaded.mask == (False, True)


def test_prompt_and_response_columns_go_through_the_chat_template(tmp_path: Path) -> None:
    (loaded,) = load(tmp_path, {"question": "hi", "answer": "yo"}, form=RowFormat(max_length=99))
    text = TOKENIZER.decode(loaded.token_ids)
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nyo<|im_end|>"
    trained = [token for token, mask in zip(loaded.token_ids, loaded.mask, strict=True) if mask]
    assert TOKENIZER.decode(trained) == "yo<|im_end|>"


def test_parquet_rows_with_chat_prompts_and_inner_keys(tmp_path: Path) -> None:
    file = tmp_path / "rows.parquet"
    table = {"prompt": [[{"role": "user", "content": "q"}]], "extra": [{"reply": "r"}]}
    pq.write_table(pa.table(table), file)
    form = RowFormat(max_length=99, prompt_key="prompt", response_key="extra", response_dict_keys=("reply",))
    (loaded,) = load_rows([str(file)], TOKENIZER, form)
    assert TOKENIZER.decode(loaded.token_ids).endswith("assistant\nr<|im_end|>")


@pytest.mark.parametrize(("truncation", "text"), [("left", "f" + "c" * 4), ("right", "ab" + "c" * 3)])
def test_long_rows_are_cut_as_configured(tmp_path: Path, truncation: str, text: str) -> None:
    row = {"segments": [["prompt", "ab"], ["model", "ccc"], ["prompt", "f"], ["model", "cccc"]]}
    (loaded,) = load(tmp_path, row, form=RowFormat(max_length=5, truncation=truncation))
    assert TOKENIZER.decode(loaded.token_ids) == text


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("{not json", r"rows\.jsonl:2: not JSON"),
        ("[1]", r"rows\.jsonl:2: a row is a JSON object, not list"),
        ({"segments": [["user", "x"]]}, "origin 'user' is none of prompt, model, env"),
        ({"segments": [["model"]]}, r"a segment is \[origin, text\]"),
        ({"segments": [["model", "x", -1]]}, "weight -1 is not a number of at least 0"),
        ({"segments": [["prompt", "xyz"]]}, "no token to train on"),
        ({"segments": [["model", "x" * 41]]}, r"41 tokens, more than data\.max_length=40; raise it"),
        ({"q": "x", "answer": "y"}, r"no column 'question' \(there is: q, answer\)"),
        ({"question": "x", "answer": 3}, "answer is not text"),
    ],
)
def test_a_malformed_row_names_its_line(tmp_path: Path, row: Any, message: str) -> None:
    good = {"segments": [["prompt", "a"], ["model", "b"]]}
    with pytest.raises(DataError, match=message) as caught:
        load(tmp_path, good, row)
    assert "rows.jsonl:2" in str(caught.value)


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="does not exist"):
        load_rows([str(tmp_path / "no.jsonl")], TOKENIZER, FORM)
    (tmp_path / "rows.csv").write_text("a,b\n")
    with pytest.raises(DataError, match=r"unknown form '\.csv'"):
        load_rows([str(tmp_path / "rows.csv")], TOKENIZER, FORM)
