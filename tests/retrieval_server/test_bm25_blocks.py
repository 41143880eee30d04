"""Building BM25 in blocks: equal to bm25s byte for byte, however it is cut, divided among processes or interrupted."""

from __future__ import annotations

import json
import random
import resource
import subprocess
import sys
from collections.abc import Iterable
from functools import partial
from pathlib import Path

import bm25s
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from retrieval_helpers import make_plan, open_index, write_corpus

from retrieval_server.analyzer import Analyzer
from retrieval_server.backends import bm25_analysis, bm25_build
from retrieval_server.backends.bm25_merge import ArrayWriter
from retrieval_server.backends.bm25_vocabulary import Vocabulary
from retrieval_server.corpus import CorpusReader
from retrieval_server.errors import CorpusError, IndexFolderError, SettingsError
from retrieval_server.manifest import read_manifest

plan = partial(make_plan, stemmer="english")
ARRAYS = ("data.csc.index.npy", "indices.csc.index.npy", "indptr.csc.index.npy")
WORDS = [f"{a}{b}" for a in ["lake", "river", "boat", "café", "don't", "zürich", "x"] for b in ("", "s", "ing", "7")]


def passages(n: int, seed: int = 5) -> list[tuple[str, str, str]]:
    """Passages of 0 to 30 words with frequent and rare ones."""
    draw = random.Random(seed)
    weights = [1 / rank for rank in range(1, len(WORDS) + 1)]
    return [(f"p{i}", "the", " ".join(draw.choices(WORDS, weights, k=draw.randint(0, 30)))) for i in range(n)]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(corpus of 300 passages, its index, built in one block)."""
    folder = tmp_path_factory.mktemp("blocks")
    corpus = write_corpus(folder / "c.jsonl", passages(300))
    bm25_build.build(plan(corpus, folder))
    return corpus, folder / "bm25"


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bm25_analysis, "BLOCK_BYTES", 2000)
    monkeypatch.setattr(bm25_build, "POSTINGS_AT_ONCE", 50)


def by_bm25s(corpus: Path, folder: Path, vocabulary: dict[str, int]) -> None:
    """Write what bm25s makes of the same terms with the same numbers."""
    analyzer = Analyzer("english", "english")
    ids = [[vocabulary[term] for term in analyzer.terms(line.document.contents)] for line in CorpusReader(corpus)]
    index = bm25s.BM25(k1=0.9, b=0.4, method="lucene", backend="numpy")
    index.index((ids, vocabulary), create_empty_token=False, show_progress=False)
    index.save(folder, show_progress=False)


def test_the_arrays_are_those_of_bm25s_byte_for_byte(
    reference: tuple[Path, Path], small_blocks: None, tmp_path: Path
) -> None:
    corpus, _ = reference
    bm25_build.build(plan(corpus, tmp_path))
    ours = tmp_path / "bm25"
    vocabulary = json.loads((ours / "vocab.index.json").read_text(encoding="utf-8"))
    assert list(vocabulary) == sorted(vocabulary) and list(vocabulary.values()) == list(range(len(vocabulary)))
    by_bm25s(corpus, tmp_path / "theirs", vocabulary)
    for name in (*ARRAYS, "params.index.json", "vocab.index.json"):
        assert (ours / name).read_bytes() == (tmp_path / "theirs" / name).read_bytes(), name


@pytest.mark.parametrize("workers", [1, 2])
def test_blocks_and_workers_do_not_show_in_the_index(
    reference: tuple[Path, Path], small_blocks: None, tmp_path: Path, workers: int
) -> None:
    corpus, whole = reference
    bm25_build.build(plan(corpus, tmp_path, workers=workers))
    assert read_manifest(tmp_path / "bm25").files == read_manifest(whole).files


KILLED = """
import os, signal, sys
from retrieval_server import building
from retrieval_server.backends import bm25_analysis, bm25_build
from retrieval_server.build_index import main
bm25_analysis.BLOCK_BYTES = 2000
def kill_at(module, name, call):
    original, calls = getattr(module, name), [0]
    def counted(*arguments, **options):
        calls[0] += 1
        if calls[0] == call:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*arguments, **options)
    setattr(module, name, counted)
module, name, call = sys.argv[1:4]
kill_at({"analysis": bm25_analysis, "build": bm25_build, "building": building}[module], name, int(call))
main(["--corpus_path", sys.argv[4], "--save_dir", sys.argv[5], "--stemmer", "english"])
"""


def run(code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code, *map(str, arguments)], capture_output=True, text=True)


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "gzip"])
def test_killed_at_every_stage_and_continued_equals_uninterrupted(
    reference: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, packed: bool
) -> None:
    import gzip

    corpus, whole = reference
    if packed:
        content = corpus.read_bytes()
        corpus = tmp_path / "c.jsonl.gz"
        corpus.write_bytes(gzip.compress(content))
    # After five blocks; after three more, of which the last is on disk but not on record; merging; describing.
    stages = [("analysis", "write_durably", 6), ("analysis", "write_block", 4), ("build", "write_postings", 1)]
    stages.append(("building", "write_manifest", 1))
    for module, name, call in stages[:: 2 if packed else 1]:
        assert run(KILLED, module, name, call, corpus, tmp_path).returncode == -9
    partial = tmp_path / ".bm25.partial"
    records = sorted(partial.glob("work/*.json"))
    assert len(records) > 5

    done: list[object] = []
    monkeypatch.setattr(bm25_analysis, "write_block", lambda *block: done.append(block))
    monkeypatch.setattr(bm25_analysis, "BLOCK_BYTES", 2000)
    bm25_build.build(plan(corpus, tmp_path))
    assert done == []  # nothing was indexed a second time
    files = dict(read_manifest(tmp_path / "bm25").files)
    copy = files.pop("passages.jsonl", None)
    assert files == read_manifest(whole).files
    assert (copy is not None) == packed
    assert not partial.exists() and not (tmp_path / "bm25" / "work").exists()
    assert open_index(tmp_path, corpus).size == 300


def interrupted(corpus: Path, save_dir: Path) -> None:
    assert run(KILLED, "analysis", "write_durably", 6, corpus, save_dir).returncode == -9


def test_an_interrupted_building_of_something_else_is_not_continued(
    reference: tuple[Path, Path], small_blocks: None, tmp_path: Path
) -> None:
    corpus, _ = reference
    interrupted(corpus, tmp_path)
    bm25_build.build(plan(corpus, tmp_path, stemmer="none"))
    bm25_build.build(plan(corpus, tmp_path / "fresh", stemmer="none"))
    assert read_manifest(tmp_path / "bm25").files == read_manifest(tmp_path / "fresh" / "bm25").files


def test_blocks_of_other_bytes_are_not_taken_over_even_when_samples_agree(
    reference: tuple[Path, Path], small_blocks: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus = tmp_path / "c.jsonl"
    content = reference[0].read_bytes()
    corpus.write_bytes(content)
    interrupted(corpus, tmp_path)
    state = tmp_path / ".bm25.partial" / "work" / "state.json"
    corpus.write_bytes(content.replace(b"lake", b"sand", 1))
    from retrieval_server.manifest import identify_sources

    changed = json.loads(state.read_text())
    changed["sources"] = [source.model_dump() for source in identify_sources(corpus)]
    state.write_text(json.dumps(changed))  # as if the samples of both were the same
    bm25_build.build(plan(corpus, tmp_path))
    assert "sand" in json.loads((tmp_path / "bm25" / "vocab.index.json").read_text())


LIMITED = """
import resource, sys
from retrieval_server.backends import bm25_analysis
from retrieval_server.build_index import main
bm25_analysis.BLOCK_BYTES = 2000
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]), resource.RLIM_INFINITY))
sys.exit(main(["--corpus_path", sys.argv[2], "--save_dir", sys.argv[3], "--stemmer", "english"]))
"""


def test_a_full_disk_is_one_line_and_the_building_goes_on_when_there_is_room(
    reference: tuple[Path, Path], tmp_path: Path
) -> None:
    """The limit on the size of a file stands for the disk: first the merged arrays do not fit, then they do."""
    corpus, whole = reference
    largest = max(identity.bytes for identity in read_manifest(whole).files.values())
    full = run(LIMITED, largest - 1, corpus, tmp_path)
    assert full.returncode == 2
    assert full.stderr.splitlines()[-1].startswith(f"error: {tmp_path / 'bm25'} cannot be written: File too large")
    assert not (tmp_path / "bm25").exists()
    again = run(LIMITED, resource.RLIM_INFINITY, corpus, tmp_path)
    assert again.returncode == 0, again.stderr
    assert "going on with the building" in again.stderr
    assert read_manifest(tmp_path / "bm25").files == read_manifest(whole).files


def test_a_killed_worker_is_reported_and_its_building_can_be_continued(
    reference: tuple[Path, Path], small_blocks: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus, whole = reference
    with monkeypatch.context() as patch:
        patch.setattr(bm25_analysis, "_work", _die)
        with pytest.raises(SettingsError, match="a worker process was killed"):
            bm25_build.build(plan(corpus, tmp_path, workers=2))
    bm25_build.build(plan(corpus, tmp_path))
    assert read_manifest(tmp_path / "bm25").files == read_manifest(whole).files


def _die(*_: object) -> None:
    import os
    import signal

    os.kill(os.getpid(), signal.SIGKILL)


def test_a_bad_line_is_named_from_a_worker_too(
    reference: tuple[Path, Path], small_blocks: None, tmp_path: Path
) -> None:
    lines = reference[0].read_bytes().splitlines(keepends=True)
    lines[200] = b'{"id": "x"}\n'
    corpus = tmp_path / "c.jsonl"
    corpus.write_bytes(b"".join(lines))
    with pytest.raises(CorpusError, match=r"c\.jsonl, line 201: neither 'contents' nor 'text'"):
        bm25_build.build(plan(corpus, tmp_path, workers=2))
    lines[200] = lines[10]
    corpus.write_bytes(b"".join(lines))
    with pytest.raises(CorpusError, match=r"c\.jsonl, line 201: id 'p10' was already used in line 11"):
        bm25_build.build(plan(corpus, tmp_path))


def test_a_term_that_occurs_everywhere_does_not_need_memory_for_all_its_postings(
    tmp_path: Path, small_blocks: None
) -> None:
    corpus = write_corpus(tmp_path / "c.jsonl", [(f"p{i}", "T", f"everywhere word{i % 7}") for i in range(200)])
    bm25_build.build(plan(corpus, tmp_path))
    vocabulary = json.loads((tmp_path / "bm25" / "vocab.index.json").read_text())
    by_bm25s(corpus, tmp_path / "theirs", vocabulary)
    for name in ARRAYS:
        assert (tmp_path / "bm25" / name).read_bytes() == (tmp_path / "theirs" / name).read_bytes(), name


@pytest.mark.parametrize("pieces", [[], [[]], [[1, 2], [], [3]], [[5] * 1000]])
def test_an_array_in_pieces_has_the_bytes_of_the_whole(tmp_path: Path, pieces: list[list[int]]) -> None:
    with ArrayWriter(tmp_path / "a.npy", np.int64) as writer:
        for piece in pieces:
            writer.append(piece)
    np.save(tmp_path / "b.npy", np.array([value for piece in pieces for value in piece], np.int64))
    assert (tmp_path / "a.npy").read_bytes() == (tmp_path / "b.npy").read_bytes()


def make_vocabulary(folder: Path, terms: Iterable[str]) -> tuple[Vocabulary, dict[str, int]]:
    expected = {term: number for number, term in enumerate(sorted(set(terms)))}
    text, starts = "{", []
    for term, number in expected.items():
        text += ", " if number else ""
        starts.append(len(text.encode()) + 1)
        text += f'"{term}": {number}'
    path = folder / "v.json"
    path.write_text(text + "}", encoding="utf-8")
    return Vocabulary(path, np.array(starts, np.int64)), expected


@settings(max_examples=30)
@given(st.sets(st.text("abcé日𝕏'.", min_size=1, max_size=4), max_size=200), st.lists(st.text(max_size=4), max_size=10))
def test_the_mapped_vocabulary_answers_like_a_dictionary(
    tmp_path_factory: pytest.TempPathFactory, terms: set[str], asked: list[str]
) -> None:
    vocabulary, expected = make_vocabulary(tmp_path_factory.mktemp("v"), terms)
    assert len(vocabulary) == len(expected)
    for term in [*terms, *asked, "", "zzz", "\ud800", 'a": 0, "b']:
        assert vocabulary.number(term) == expected.get(term)
    vocabulary.close()


def test_a_vocabulary_that_is_shorter_than_its_table_is_refused(tmp_path: Path) -> None:
    make_vocabulary(tmp_path, ["aa", "bb"])
    with pytest.raises(IndexFolderError, match=r"has 18 bytes, but its terms begin at 2 to 99"):
        Vocabulary(tmp_path / "v.json", np.array([2, 99]))
