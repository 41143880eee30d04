"""Building: complete or not at all; and at load every mismatch is refused with both values shown."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import bm25s
import pytest
from retrieval_helpers import PASSAGES, make_plan, open_index, write_corpus

from retrieval_server.backends.bm25_build import build
from retrieval_server.build_index import main
from retrieval_server.errors import CorpusError, IndexFolderError, RetrievalServerError
from retrieval_server.manifest import read_manifest


@pytest.fixture
def copy(built: tuple[Path, Path], tmp_path: Path) -> tuple[Path, Path]:
    """(index folder itself, corpus) that a test may damage."""
    index, corpus = built
    return shutil.copytree(index / "bm25", tmp_path / "bm25"), shutil.copy(corpus, tmp_path / "corpus.jsonl")


def test_the_manifest_says_what_was_indexed(built: tuple[Path, Path]) -> None:
    index, corpus = built
    manifest = read_manifest(index / "bm25")
    assert (manifest.kind, manifest.corpus.file) == ("bm25", "corpus.jsonl")
    assert (manifest.corpus.passages, manifest.corpus.bytes) == (len(PASSAGES), corpus.stat().st_size)
    digest = subprocess.run(["sha256sum", corpus], capture_output=True, text=True, check=True).stdout.split()[0]
    assert manifest.corpus.sha256 == digest
    assert manifest.parameters["k1"] == 0.9
    assert set(manifest.files) == {path.name for path in (index / "bm25").iterdir()} - {"manifest.json"}
    assert manifest.versions["bm25s"] == bm25s.__version__


def test_both_the_save_dir_and_the_index_inside_it_open(built: tuple[Path, Path]) -> None:
    index, corpus = built
    assert open_index(index, corpus).size == open_index(index / "bm25", corpus).size == len(PASSAGES)


def test_the_same_input_gives_the_same_bytes_in_another_process(built: tuple[Path, Path], tmp_path: Path) -> None:
    index, corpus = built
    command = [sys.executable, "-m", "retrieval_server.build_index", "--corpus_path", corpus, "--save_dir", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONHASHSEED": "7"})
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{tmp_path / 'bm25'}\n"
    assert read_manifest(tmp_path / "bm25").files == read_manifest(index / "bm25").files


def test_building_twice_does_nothing_and_any_change_builds_again(copy: tuple[Path, Path]) -> None:
    index, corpus = copy
    stamp = (index / "manifest.json").stat().st_mtime_ns

    def rebuilt(**changes: object) -> bool:
        build(make_plan(corpus, index.parent, **changes))
        nonlocal stamp
        before, stamp = stamp, (index / "manifest.json").stat().st_mtime_ns
        return stamp != before

    assert not rebuilt()
    assert rebuilt(force=True)
    assert rebuilt(k1=1.2)
    assert not rebuilt(k1=1.2)
    write_corpus(corpus, PASSAGES[:3])
    assert rebuilt(k1=1.2)
    (index / "data.csc.index.npy").write_bytes(b"damaged")
    assert rebuilt(k1=1.2)
    assert open_index(index, corpus).size == 3
    assert sorted(path.name for path in index.parent.iterdir()) == ["bm25", "corpus.jsonl"]


def test_a_failed_build_keeps_the_old_index_and_leaves_nothing(copy: tuple[Path, Path]) -> None:
    index, corpus = copy
    good = corpus.read_bytes()
    corpus.write_bytes(good + b'{"id": "lake:0", "contents": "again"}\n')
    with pytest.raises(CorpusError, match="line 7: id 'lake:0' was already used in line 1"):
        build(make_plan(corpus, index.parent))
    corpus.write_bytes(good)
    assert open_index(index, corpus).size == len(PASSAGES)
    assert sorted(path.name for path in index.parent.iterdir()) == ["bm25", "corpus.jsonl"]


def test_a_killed_build_leaves_the_old_index_and_can_be_started_again(copy: tuple[Path, Path], tmp_path: Path) -> None:
    index, corpus = copy
    old = corpus.read_bytes()
    waiting = (
        "import sys, retrieval_server.corpus as c, retrieval_server.build_index as b\n"
        "def wait(self): print('reading', flush=True); sys.stdin.read()\n"
        "c.CorpusReader.raw_lines = wait\n"
        "b.main(['--corpus_path', sys.argv[1], '--save_dir', sys.argv[2], '--force'])"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", waiting, corpus, tmp_path], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with process:
        assert process.stdout is not None and process.stdout.readline() == b"reading\n"
        with pytest.raises(IndexFolderError, match="another process is building"):
            build(make_plan(corpus, tmp_path))
        process.send_signal(signal.SIGKILL)
    assert (tmp_path / ".bm25.partial").exists()
    assert open_index(index, corpus).size == len(PASSAGES)
    corpus.write_bytes(old.splitlines(keepends=True)[0])
    build(make_plan(corpus, tmp_path))
    assert open_index(index, corpus).size == 1
    assert not (tmp_path / ".bm25.partial").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "has no passage"),
        (b"\n\n", "has no passage"),
        (b'{"id": "a", "contents": "it is a"}\n', "no passage has a term left"),
    ],
)
def test_a_corpus_without_content_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "c.jsonl").write_bytes(content)
    with pytest.raises(CorpusError, match=message):
        build(make_plan(tmp_path / "c.jsonl", tmp_path / "i"))


def test_a_missing_corpus_leaves_no_folder_behind(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match=r"absent\.jsonl cannot be read: No such file"):
        build(make_plan(tmp_path / "absent.jsonl", tmp_path / "i"))
    assert not (tmp_path / "i").exists()


def test_the_command_line_reports_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    corpus = write_corpus(tmp_path / "c.jsonl")
    given = ["--corpus_path", str(corpus), "--save_dir", str(tmp_path)]
    assert main([*given, "--retrieval_method", "bm52"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: --retrieval_method 'bm52' is unknown (did you mean 'bm25'?); known: ")
    assert error.count("\n") == 1
    assert main([*given, "--use_fp16", "--model_path", "m"]) == 0
    assert "no effect of --model_path, --use_fp16" in caplog.text
    assert open_index(tmp_path, corpus).size == len(PASSAGES)


def flip_a_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-10])


def edit_manifest(folder: Path, change: Callable[[dict[str, object]], object]) -> None:
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text())
    change(manifest)
    path.write_text(json.dumps(manifest))


DAMAGE: dict[str, tuple[Callable[[Path, Path], object], str]] = {
    "truncated corpus": (lambda i, c: truncate(c), r"has 565 bytes, but .* with 575 bytes .*truncated"),
    "longer corpus": (lambda i, c: c.write_bytes(c.read_bytes() + b"\n"), r"has 576 bytes, .* with 575 bytes"),
    "other corpus of the same size": (lambda i, c: flip_a_byte(c), r"sha256 [0-9a-f]{16}, but .* with [0-9a-f]{16}"),
    "missing corpus": (lambda i, c: c.unlink(), r"corpus.jsonl cannot be read: No such file"),
    "flipped byte": (lambda i, c: flip_a_byte(i / "data.csc.index.npy"), r"data.* damaged: sha256 \w{16}, .* \w{16}"),
    "truncated array": (lambda i, c: truncate(i / "indices.csc.index.npy"), r"has \d+ bytes, its manifest says \d+"),
    "flipped byte of the vocabulary": (lambda i, c: flip_a_byte(i / "vocab.index.json"), r"vocab.* damaged"),
    "missing file": (lambda i, c: (i / "starts.npy").unlink(), r"starts.npy is missing"),
    "no manifest": (lambda i, c: (i / "manifest.json").unlink(), r"has no manifest.json \(found: data"),
    "half a manifest": (lambda i, c: truncate(i / "manifest.json"), r"manifest.json is not JSON"),
    "foreign manifest": (lambda i, c: edit_manifest(i, lambda m: m.pop("format")), r"format None, expected 'chatr1-"),
    "later format": (lambda i, c: edit_manifest(i, lambda m: m.update(format_version=9)), r"version 9, .* reads 1"),
    "field missing": (lambda i, c: edit_manifest(i, lambda m: m.pop("corpus")), r"corpus: Field required"),
    "other backend": (lambda i, c: edit_manifest(i, lambda m: m.update(kind="dense")), r"kind 'dense', .* 'bm25'"),
    "other analyzer": (
        lambda i, c: edit_manifest(i, lambda m: m["parameters"].update(stemmer="german")),  # type: ignore[attr-defined]
        r"behaves differently: fingerprint \w{16} .*, here \w{16}",
    ),
    "index is a file": (lambda i, c: (shutil.rmtree(i), i.write_bytes(b"faiss")), r"is a file \(5 bytes\)"),
    "no index": (lambda i, c: shutil.rmtree(i), r"bm25 does not exist; build it with"),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_a_wrong_pair_is_refused_at_load(copy: tuple[Path, Path], case: str) -> None:
    index, corpus = copy
    damage, message = DAMAGE[case]
    damage(index, corpus)
    with pytest.raises(RetrievalServerError, match=message) as caught:
        open_index(index, corpus)
    assert "\n" not in str(caught.value)


def test_arrays_that_do_not_fit_each_other_are_refused_even_with_matching_hashes(copy: tuple[Path, Path]) -> None:
    """The compiled search trusts them: a posting outside of the corpus would write to memory that is not ours."""
    import numpy as np

    from retrieval_server.corpus import file_sha256

    index, corpus = copy
    path = index / "indices.csc.index.npy"
    postings = np.load(path)
    postings[0] = 6
    np.save(path, postings)
    edit_manifest(index, lambda m: m["files"][path.name].update(sha256=file_sha256(path)))  # type: ignore[index]
    with pytest.raises(IndexFolderError, match="postings outside of the corpus 1, expected 0"):
        open_index(index, corpus)


def test_two_indexes_in_one_folder_must_be_named(copy: tuple[Path, Path], tmp_path: Path) -> None:
    shutil.copytree(copy[0], tmp_path / "other")
    with pytest.raises(IndexFolderError, match=r"holds 2 indexes \(bm25, other\)"):
        open_index(tmp_path, copy[1])
