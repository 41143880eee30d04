"""A corpus in any format and in shards is one corpus; damage is named by file and place."""

from __future__ import annotations

import gzip
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest
import zstandard
from pyarrow import parquet
from retrieval_helpers import make_plan, open_index, write_corpus

from retrieval_server import corpus_files, unique_ids
from retrieval_server.backends.bm25_build import build
from retrieval_server.build_index import main
from retrieval_server.corpus import CorpusReader, PassageStore
from retrieval_server.errors import CorpusError, RetrievalServerError
from retrieval_server.manifest import identify, read_manifest

ROWS = [{"id": f"p{i}", "contents": f'"Tïtle {i}"\nText of lake {i}.'} for i in range(9)]


def as_lines(rows: list[dict[str, str]]) -> bytes:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def packed(format: str, rows: list[dict[str, str]], path: Path) -> Path:
    """Write rows to ``path`` in a format."""
    if format == "parquet":
        parquet.write_table(pa.Table.from_pylist(rows), path, row_group_size=2)
        return path
    content = as_lines(rows)
    half = len(content) // 2
    compress: dict[str, Callable[[bytes], bytes]] = {
        "jsonl": bytes,
        "gz": gzip.compress,
        "zst": zstandard.ZstdCompressor(write_checksum=True).compress,
    }
    pack = compress[format]
    path.write_bytes(pack(content[:half]) + pack(content[half:]))  # two frames, as parallel compressors write
    return path


def sharded(format: str, folder: Path) -> Path:
    """Write ROWS as three shards; the name's ending is that of the format."""
    folder.mkdir()
    ending = "parquet" if format == "parquet" else {"jsonl": "jsonl"}.get(format, f"jsonl.{format}")
    for number in range(3):
        packed(format, ROWS[3 * number : 3 * number + 3], folder / f"train-{number:05d}-of-00003.{ending}")
    (folder / "README.md").write_text("not a shard")
    return folder


@pytest.mark.parametrize("shards", [False, True], ids=["file", "shards"])
@pytest.mark.parametrize("format", ["jsonl", "gz", "zst", "parquet"])
def test_every_format_is_the_same_corpus(tmp_path: Path, format: str, shards: bool) -> None:
    path = sharded(format, tmp_path / "c") if shards else packed(format, ROWS, tmp_path / "c.any")
    reader = CorpusReader(path, tmp_path / "copy.jsonl")
    lines = list(reader)
    assert [(line.document.id, line.document.contents) for line in lines] == [tuple(row.values()) for row in ROWS]
    assert reader.needs_copy == (format != "jsonl" or shards)
    assert reader.served.read_bytes() == as_lines(ROWS)
    assert (reader.passages, reader.size, reader.fraction) == (9, len(as_lines(ROWS)), 1)
    identity = identify(reader)
    plain = CorpusReader(packed("jsonl", ROWS, tmp_path / "plain.jsonl"))
    list(plain)
    assert (identity.sha256, identity.sampled_sha256) == (plain.sha256, identify(plain).sampled_sha256)
    import numpy as np

    store = PassageStore(reader.served, np.array([line.start for line in lines]))
    assert [store[row] for row in range(9)] == [line.document for line in lines]
    store.close()


@pytest.mark.parametrize("format", ["gz", "zst", "parquet"])
def test_an_index_of_a_packed_corpus_is_served_without_it(tmp_path: Path, format: str) -> None:
    path = packed(format, ROWS, tmp_path / f"c.{format}")
    build(make_plan(path, tmp_path))
    plain = packed("jsonl", ROWS, tmp_path / "c.jsonl")
    build(make_plan(plain, tmp_path / "plain"))
    files = dict(read_manifest(tmp_path / "bm25").files)
    assert files.pop("passages.jsonl").sha256 == read_manifest(tmp_path / "plain" / "bm25").corpus.sha256
    assert files == read_manifest(tmp_path / "plain" / "bm25").files
    for corpus in (None, path, plain):
        retriever = open_index(tmp_path, corpus)  # type: ignore[arg-type]
        assert retriever.search(["lake 7"], 1)[0][0].document.id == "p7"
        retriever.close()


def test_a_folder_with_one_plain_file_is_that_file(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    write_corpus(folder / "part.jsonl")
    build(make_plan(folder, tmp_path))
    assert not (tmp_path / "bm25" / "passages.jsonl").exists()
    assert open_index(tmp_path, folder).size == open_index(tmp_path, folder / "part.jsonl").size == 6


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(save_dir of an index of three gzip shards, their folder)."""
    folder = tmp_path_factory.mktemp("pair")
    build(make_plan(sharded("gz", folder / "shards"), folder))
    return folder, folder / "shards"


def damage_shard(shards: Path) -> Path:
    shard = shards / "train-00001-of-00003.jsonl.gz"
    content = bytearray(shard.read_bytes())
    content[20] ^= 1
    shard.write_bytes(content)
    return shards


OTHER_CORPORA: dict[str, tuple[Callable[[Path, Path], Path | None], str]] = {
    "one shard more": (
        lambda shards, tmp: (packed("gz", ROWS, shards / "x.jsonl.gz"), shards)[1],
        r"is 4 gzip file\(s\) of \d+ bytes, but .* from shards, 3 file\(s\) of \d+ bytes",
    ),
    "a changed shard": (
        lambda shards, tmp: damage_shard(shards),
        r"is train-00001-of-00003.jsonl.gz with sampled sha256 \w{16}, but .* shards, \w{16}",
    ),
    "another plain file": (
        lambda shards, tmp: packed("jsonl", ROWS[1:], tmp / "other.jsonl"),
        r"has \d+ bytes, but .* from shards with \d+ bytes",
    ),
}


@pytest.mark.parametrize("case", OTHER_CORPORA)
def test_another_corpus_is_refused_though_the_index_has_its_own(
    pair: tuple[Path, Path], tmp_path: Path, case: str
) -> None:
    change, message = OTHER_CORPORA[case]
    shards = Path(shutil.copytree(pair[1], tmp_path / "shards"))
    assert open_index(pair[0], shards).size == 9
    with pytest.raises(CorpusError, match=message):
        open_index(pair[0], change(shards, tmp_path))  # type: ignore[arg-type]


def test_a_damaged_copy_is_refused(pair: tuple[Path, Path], tmp_path: Path) -> None:
    index = Path(shutil.copytree(pair[0] / "bm25", tmp_path / "bm25"))
    content = bytearray((index / "passages.jsonl").read_bytes())
    content[50] ^= 1
    (index / "passages.jsonl").write_bytes(content)
    with pytest.raises(RetrievalServerError, match=r"passages.jsonl is damaged: sha256 \w{16}, .* \w{16}"):
        open_index(index, None)  # type: ignore[arg-type]


def test_a_plain_index_needs_its_plain_corpus(tmp_path: Path) -> None:
    plain = packed("jsonl", ROWS, tmp_path / "c.jsonl")
    build(make_plan(plain, tmp_path))
    with pytest.raises(CorpusError, match=r"give --corpus_path, the file c.jsonl \(\d+ bytes, 9 passages\)"):
        open_index(tmp_path, None)  # type: ignore[arg-type]
    zipped = packed("gz", ROWS, tmp_path / "c.jsonl.gz")
    with pytest.raises(CorpusError, match=r"is 1 gzip file\(s\) of \d+ bytes, but .* plain JSON lines c.jsonl"):
        open_index(tmp_path, zipped)


def cut(path: Path, n: int) -> Path:
    path.write_bytes(path.read_bytes()[:n])
    return path


def parquet_of(columns: dict[str, list[object]], path: Path) -> Path:
    parquet.write_table(pa.table(columns), path)
    return path


def scrambled_parquet(path: Path) -> Path:
    rows = [{"id": f"p{i}", "contents": "x" * 40 + str(i)} for i in range(500)]
    parquet.write_table(pa.Table.from_pylist(rows), path, compression="zstd", write_page_checksum=True)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    return path


BAD = {"id": "p0", "text": 3}
DAMAGED: dict[str, tuple[Callable[[Path], Path], str]] = {
    "cut gzip": (lambda t: cut(packed("gz", ROWS, t / "c.gz"), 120), r"c.gz, after line \d: Truncated"),
    "cut zstd": (lambda t: cut(packed("zst", ROWS, t / "c.zst"), 200), r"c.zst, after line \d: Truncated"),
    "cut parquet": (lambda t: cut(packed("parquet", ROWS, t / "c.parquet"), 300), r"c.parquet, after row 0: .*magic"),
    "scrambled parquet": (lambda t: scrambled_parquet(t / "c.parquet"), r"c.parquet, after row 0: .*(CRC|checksum)"),
    "not gzip": (lambda t: packed("jsonl", ROWS, t / "c.jsonl.gz"), r"named .gz, but begins with b'\{\"id'"),
    "bad line in a gzip": (
        lambda t: (t / "c.gz").write_bytes(gzip.compress(b"\n" + json.dumps(BAD).encode())) and t / "c.gz",  # type: ignore[dict-item, return-value]
        r"c.gz, line 2: 'text' is a int",
    ),
    "bad row": (
        lambda t: parquet_of({"id": ["a", None], "contents": ["x", "y"]}, t / "c.parquet"),
        r"c.parquet, row 2: no 'id'",
    ),
    "empty row": (
        lambda t: parquet_of({"id": ["a", "b"], "text": ["x", None]}, t / "c.parquet"),
        r"c.parquet, row 2: neither 'contents' nor 'text'",
    ),
    "wrong type": (
        lambda t: parquet_of({"id": ["a"], "contents": [b"x"]}, t / "c.parquet"),
        r"c.parquet, row 1: .*bytes is not JSON serializable",
    ),
    "wrong columns": (
        lambda t: parquet_of({"id": ["a"], "passage": ["x"]}, t / "c.parquet"),
        r"c.parquet needs the columns id and contents \(or text\); it has: id, passage",
    ),
    "missing shard": (
        lambda t: ((s := sharded("gz", t / "s")) / "train-00001-of-00003.jsonl.gz").unlink() or s,
        r"has 2 of 3 shards; missing: 1",
    ),
    "mixed shards": (
        lambda t: (s := sharded("gz", t / "s"), packed("jsonl", ROWS, s / "x.jsonl"))[0],
        r"shards of several formats \(gzip, jsonl\)",
    ),
    "no shards": (lambda t: ((t / "s").mkdir(), (t / "s" / "a.txt").touch(), t / "s")[2], r"without shards .*: a.txt"),
    "repeated id in another shard": (
        lambda t: (s := sharded("zst", t / "s"), packed("zst", ROWS[:1], s / "x.jsonl.zst"))[0],
        r"x.jsonl.zst, line 1: id 'p0' was already used in .*train-00000-of-00003.jsonl.zst, line 1",
    ),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_damage_is_one_line_with_file_and_place(tmp_path: Path, case: str, capsys: pytest.CaptureFixture[str]) -> None:
    make, message = DAMAGED[case]
    path = make(tmp_path)
    assert main(["--corpus_path", str(path), "--save_dir", str(tmp_path / "i")]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    with pytest.raises(CorpusError, match=message) as caught:
        list(CorpusReader(path, tmp_path / "copy"))
    assert error == f"error: {caught.value}\n"


def test_shards_without_a_last_line_break_stay_apart(tmp_path: Path) -> None:
    folder = tmp_path / "s"
    folder.mkdir()
    (folder / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + as_lines(ROWS[:2]).strip())
    (folder / "b.jsonl").write_bytes(b"\xef\xbb\xbf" + as_lines(ROWS[2:4]).strip())
    build(make_plan(folder, tmp_path))
    retriever = open_index(tmp_path, folder)
    assert [retriever.search([f"lake {i}"], 1)[0][0].document.id for i in range(4)] == ["p0", "p1", "p2", "p3"]


def test_a_file_without_line_breaks_is_not_read_into_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus_files, "MAX_LINE_BYTES", 1 << 20)
    (tmp_path / "c.jsonl").write_bytes(as_lines(ROWS) + b"x" * (3 << 20))
    with pytest.raises(CorpusError, match=r"after line 9: a line of more than 1 MiB"):
        list(CorpusReader(tmp_path / "c.jsonl"))


def test_repeats_are_found_in_slices_and_across_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    import numpy as np

    monkeypatch.setattr(unique_ids, "_SORTED_AT_ONCE", 10)
    draw = np.random.default_rng(0)
    hashes = draw.integers(0, 2**64, 200, np.uint64)
    hashes[150], hashes[199] = hashes[3], hashes[42]
    chunks = [hashes[:70], hashes[70:70], hashes[70:]]
    assert sorted(unique_ids.repeats(chunks)) == [(3, 150), (42, 199)]
    assert list(unique_ids.repeats([hashes[:100]])) == []


def test_different_ids_with_the_same_hash_are_no_repeat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unique_ids, "hash_id", lambda identifier: b"samehash")
    corpus = packed("jsonl", ROWS, tmp_path / "c.jsonl")
    assert len(list(CorpusReader(corpus))) == 9
