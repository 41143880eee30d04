"""Reading a corpus: what a line may be, what is refused and how, and random access to the mapped file."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from retrieval_server.corpus import CorpusReader, PassageStore, parse_passage, sampled_sha256, split_contents
from retrieval_server.errors import CorpusError
from retrieval_server.types import Document


@pytest.mark.parametrize(
    ("contents", "title", "text"),
    [
        ('"Rome"\nA city.', "Rome", "A city."),
        ("Rome\nA city.\nOld.", "Rome", "A city.\nOld."),
        ('"He said "hi""\nx', 'He said "hi"', "x"),
        ('"Rome (city)"\nx', "Rome (city)", "x"),
        ('"\nx', '"', "x"),
        ("no title here", "", "no title here"),
        ("", "", ""),
    ],
)
def test_title_and_text_come_from_the_first_line(contents: str, title: str, text: str) -> None:
    assert split_contents(contents) == (title, text)


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"id": "a", "contents": '"T"\nx'}, ("a", '"T"\nx', "T", "x")),
        ({"id": "a", "title": "T", "text": "x"}, ("a", '"T"\nx', "T", "x")),
        ({"id": "a", "text": "x"}, ("a", "x", "", "x")),
        ({"id": 7, "contents": "x"}, ("7", "x", "", "x")),
        ({"id": "a", "contents": "c", "title": "T", "text": "x", "url": "u"}, ("a", "c", "T", "x")),
        ({"id": "a", "contents": "c", "title": None, "text": None}, ("a", "c", "", "c")),
    ],
)
def test_forms_of_a_line(row: dict[str, object], expected: tuple[str, ...]) -> None:
    document = parse_passage(json.dumps(row).encode())
    assert (document.id, document.contents, document.title, document.text) == expected
    assert json.loads(document.encoded) == dict(zip(("id", "contents", "title", "text"), expected, strict=True))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"id": "b", "contents": ', "not JSON (Expecting value at column 25)"),
        (b'["b"]', "a JSON list, not an object"),
        (b'{"contents": "x"}', "no 'id'; the line has the keys contents"),
        (b'{"id": null, "contents": "x"}', "'id' is None"),
        (b'{"id": "", "contents": "x"}', "'id' is ''"),
        (b'{"id": true, "contents": "x"}', "'id' is True"),
        (b'{"id": "b", "title": "x", "question": "q"}', "neither 'contents' nor 'text'; the line has the keys id, q"),
        (b'{"id": "b", "contents": 3}', "'contents' is a int, not a string"),
        (b'{"id": "b", "contents": "\xff"}', "not UTF-8"),
        (b'{"id": "b", "contents": "\\ud800"}', "half of a surrogate pair"),
        (b'{"id": "a", "contents": "x"}', "id 'a' was already used in line 1"),
        (b"[" * 100_000, "not JSON"),
    ],
)
def test_a_bad_line_is_reported_with_file_and_number(tmp_path: Path, line: bytes, message: str) -> None:
    path = tmp_path / "c.jsonl"
    path.write_bytes(b'{"id": "a", "contents": "x"}\n\n' + line + b"\n")
    with pytest.raises(CorpusError) as caught:
        list(CorpusReader(path))
    assert str(caught.value).startswith(f"{path}, line 3: ")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "prefix",
    [b"", b"\xef\xbb\xbf", b"\n \n", b'{"id": "z", "contents": "\xc3\xa9"}\r\n'],
    ids=["plain", "bom", "blank", "crlf"],
)
def test_offsets_find_every_passage_again(tmp_path: Path, prefix: bytes) -> None:
    rows = [{"id": str(i), "contents": f'"T{i}"\n{"é" * i}'} for i in range(5)]
    path = tmp_path / "c.jsonl"
    path.write_bytes(
        prefix + "\n".join(json.dumps(r, ensure_ascii=False) for r in rows).encode()
    )  # no newline at the end
    lines = list(reader := CorpusReader(path))
    store = PassageStore(path, np.array([line.start for line in lines], np.int64))
    assert [store[row] for row in range(len(store))] == [line.document for line in lines]
    assert [line.document.id for line in lines][-5:] == ["0", "1", "2", "3", "4"]
    assert reader.size == path.stat().st_size
    for outside in (-1, len(store)):
        with pytest.raises(IndexError):
            store[outside]
    store.close()


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=30), min_size=1, max_size=8))
def test_any_unicode_text_comes_back(tmp_path_factory: pytest.TempPathFactory, texts: list[str]) -> None:
    path = tmp_path_factory.mktemp("u") / "c.jsonl"
    path.write_text(
        "".join(json.dumps({"id": str(i), "text": t}) + "\n" for i, t in enumerate(texts)), encoding="utf-8"
    )
    store = PassageStore(path, np.array([line.start for line in CorpusReader(path)], np.int64))
    assert [store[i].text for i in range(len(texts))] == texts
    store.close()


@given(st.text(), st.text(), st.text(), st.text())
def test_the_wire_form_is_json_of_the_four_fields(id: str, contents: str, title: str, text: str) -> None:
    fields = {"id": id, "contents": contents, "title": title, "text": text}
    try:
        encoded = Document.of(id, contents, title, text).encoded
        assert json.loads(encoded.decode("utf-8")) == fields and list(json.loads(encoded)) == list(fields)
    except UnicodeEncodeError:
        assert any("\ud800" <= character <= "\udfff" for value in fields.values() for character in value)


def test_the_sampled_digest_sees_both_ends_and_the_size(tmp_path: Path) -> None:
    path = tmp_path / "big"
    content = bytearray(b"x" * 10_000_000)
    digests = set()
    for position in (None, 0, len(content) - 1):
        changed = bytearray(content)
        if position is not None:
            changed[position] = 0
        path.write_bytes(changed)
        digests.add(sampled_sha256(path))
    path.write_bytes(content[:-1])
    assert len(digests | {sampled_sha256(path)}) == 4


@pytest.mark.parametrize("name", ["absent.jsonl", "c.jsonl.gz", "folder"])
def test_what_is_no_corpus_file_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "c.jsonl.gz").write_bytes(b"")
    with pytest.raises(CorpusError, match=name):
        list(CorpusReader(tmp_path / name))
