"""What building will take, said before it runs, against what it took; and an index that asks for its own passages."""

from __future__ import annotations

import gzip
import random
from pathlib import Path

import faiss
import numpy as np
import pytest
from dense_helpers import write_texts
from retrieval_helpers import make_plan, open_index, write_corpus
from tiny_encoders import WORDS, sentence_transformer, write_encoder

from retrieval_server import selftest
from retrieval_server.backends import bm25_plan, dense_plan
from retrieval_server.backends.bm25_build import build
from retrieval_server.backends.faiss_files import make_index
from retrieval_server.build_index import main
from retrieval_server.encode_options import EncodeOptions
from retrieval_server.errors import CorpusError, SelfTestError
from retrieval_server.manifest import read_manifest
from retrieval_server.planning import Estimate


def natural(n: int) -> list[tuple[str, str, str]]:
    """Passages whose vocabulary grows with their number, as that of a language does."""
    draw = random.Random(1)
    return [
        (f"p{i}", "T", " ".join(f"w{int(20 * draw.paretovariate(0.6))}" for _ in range(draw.randint(20, 60))))
        for i in range(n)
    ]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("plan") / "c.jsonl", natural(3000))


def test_the_plan_of_bm25_from_a_sixth_of_the_corpus_is_near_what_it_takes(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bm25_plan, "_SAMPLED", 500)
    estimate = bm25_plan.estimate(make_plan(corpus, tmp_path), None)
    build(make_plan(corpus, tmp_path))
    took = sum(identity.bytes for identity in read_manifest(tmp_path / "bm25").files.values())
    assert estimate.passages == pytest.approx(3000, rel=0.03)
    assert estimate.index_bytes == pytest.approx(took, rel=0.1)
    assert estimate.copy_bytes == 0
    assert estimate.seconds > 0


def test_a_plan_grows_with_the_passages_and_knows_about_the_copy(corpus: Path, tmp_path: Path) -> None:
    packed = tmp_path / "c.jsonl.gz"
    packed.write_bytes(gzip.compress(corpus.read_bytes()))
    plan = make_plan(packed, tmp_path)
    small, large = bm25_plan.estimate(plan, 10_000), bm25_plan.estimate(plan, 1_000_000)
    assert large.copy_bytes == pytest.approx(corpus.stat().st_size / 3000 * 1_000_000, rel=1e-3)
    assert 80 < large.index_bytes / small.index_bytes < 100  # postings a hundredfold, terms less
    assert large.build_memory < 10 * small.build_memory  # bounded but for the terms
    assert not list(tmp_path.glob("bm25*")) and not list(tmp_path.glob(".bm25*"))


def test_the_command_prints_the_plan_and_builds_nothing(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--corpus_path", str(corpus), "--save_dir", str(tmp_path / "i")]
    assert main([*given, "--plan_passages", "21000000"]) == 0
    said = capsys.readouterr().out
    assert said.startswith(f"plan: bm25 over 21,000,000 passages, as {tmp_path / 'i' / 'bm25'}\n")
    for name in ("measured on", "disk", "memory", "time", "recall"):
        assert f"\n  {name}" in said
    assert not (tmp_path / "i").exists()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_encoder(tmp_path_factory.mktemp("model") / "tiny", **sentence_transformer())


@pytest.mark.parametrize("faiss_type", ["Flat", "SQfp16", "SQ8", "HNSW16", "HNSW32", "IVF20,Flat", "IVF20,SQ8"])
def test_the_plan_knows_the_size_of_every_type_of_index(faiss_type: str) -> None:
    vectors = np.random.default_rng(0).standard_normal((1500, 24)).astype(np.float32)
    index = make_index(24, faiss_type)
    planned = len(vectors) * dense_plan._vector_bytes(index) + dense_plan._list_bytes(index)
    index.train(vectors)
    index.add(vectors)
    assert planned == pytest.approx(len(faiss.serialize_index(index)), rel=0.02)


def test_the_plan_of_a_dense_index(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = write_texts(tmp_path / "c.jsonl")
    given = ["--retrieval_method", "e5", "--model_path", str(model), "--corpus_path", str(texts)]
    given += ["--save_dir", str(tmp_path / "i"), "--max_length", "32"]
    assert main([*given, "--faiss_type", "HNSW32", "--plan"]) == 0
    said = capsys.readouterr().out
    assert "plan: e5 over 300 passages" in said and "of them encoded on cpu" in said
    assert "0.6 % at 64" in said and "measured on 20,104 real passages" in said
    assert main([*given, "--faiss_type", "PQ8", "--plan"]) == 0
    assert "recall       not measured for PQ8" in capsys.readouterr().out
    assert not (tmp_path / "i").exists()


def test_the_loss_of_exact_search_is_none() -> None:
    assert dense_plan.expected_loss(EncodeOptions("e5", "m")) == "none: the search is exact"


def test_an_estimate_in_words() -> None:
    estimate = Estimate(21_015_324, "x", 9_800_000_000, 14_200_000_000, 7_500_000, 4_000, 0, 7500.0, "exact")
    assert estimate.lines("bm25", Path("i")) == [
        "plan: bm25 over 21,015,324 passages, as i",
        "  measured on  x",
        "  disk         9.8 GB and a copy of the passages, 14.2 GB; 7.5 MB more while it is built",
        "  memory       4 kB to build, 0 kB to serve",
        "  time         about 2 h 5 min",
        "  recall       exact",
    ]


def test_an_empty_corpus_cannot_be_planned_for(tmp_path: Path) -> None:
    (tmp_path / "c.jsonl").write_bytes(b"\n\n")
    with pytest.raises(CorpusError, match="has no passage"):
        bm25_plan.estimate(make_plan(tmp_path / "c.jsonl", tmp_path), None)


def test_an_index_finds_its_own_passages(corpus: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        assert main(["--corpus_path", str(corpus), "--save_dir", str(tmp_path), "--selftest"]) == 0
    assert "selftest: of 100 own passages 100 come back first, 100 in the top 3" in caplog.text


def test_a_dense_index_finds_its_own_passages_and_a_copy_of_the_corpus_is_enough(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    draw = random.Random(2)
    texts = [" ".join(draw.choices(WORDS[6:38], k=12)) for _ in range(120)]
    packed = tmp_path / "c.jsonl.gz"
    packed.write_bytes(gzip.compress(write_texts(tmp_path / "c.jsonl", texts).read_bytes()))
    given = ["--retrieval_method", "plain", "--model_path", str(model), "--corpus_path", str(packed)]
    with caplog.at_level("INFO"):
        assert main([*given, "--save_dir", str(tmp_path), "--selftest"]) == 0
    assert "selftest: of 100 own passages 100 come back first" in caplog.text


def test_an_index_of_shifted_passages_fails_its_selftest(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when rows and passages are one apart: every answer is a neighbour of the right one."""
    build(make_plan(corpus, tmp_path))
    retriever = open_index(tmp_path, corpus)
    right = retriever._passages.__class__.__getitem__
    monkeypatch.setattr(retriever._passages.__class__, "__getitem__", lambda store, row: right(store, (row + 1) % 3000))
    with pytest.raises(SelfTestError, match=r"of 100 own passages \d come back first, .* below the bound of 90%"):
        selftest.run(retriever, corpus, 0.9)
    assert main(["--corpus_path", str(corpus), "--save_dir", str(tmp_path), "--selftest"]) == 2
    assert capsys.readouterr().err.startswith("error: selftest: of 100 own passages")


def test_the_same_seed_asks_for_the_same_passages_and_all_can_be_asked_for(tmp_path: Path) -> None:
    path = write_corpus(tmp_path / "c.jsonl")
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes().replace(b"\n", b"\n\n"))
    assert {passage.id for passage in selftest.sample_passages(path, 6, 0)} >= {"lake:0", "river:1", "town:5"}
    assert selftest.sample_passages(path, 3, 1) == selftest.sample_passages(path, 3, 1)
    assert len({str(selftest.sample_passages(path, 3, seed)) for seed in range(5)}) > 1


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--workers", "-1"], "--workers is -1"),
        (["--plan_passages", "0"], "--plan_passages is 0"),
        (["--selftest_bound", "90"], "--selftest_bound is 90"),
    ],
)
def test_flags_out_of_range_are_named(
    corpus: Path, tmp_path: Path, flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--corpus_path", str(corpus), "--save_dir", str(tmp_path), *flags]) == 2
    assert message in capsys.readouterr().err
