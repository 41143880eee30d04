"""Serving dense indexes, ours and bare FAISS files: what is answered, and what is refused with both values."""

from __future__ import annotations

import gzip
import json
import shutil
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import pytest
from dense_helpers import QUERIES, TEXTS, N, build_dense, expected_scores, ids, load_dense, write_texts
from tiny_encoders import reference, sentence_transformer, token_ids, write_encoder

from retrieval_server import backends
from retrieval_server.backends.encoder import Encoder
from retrieval_server.errors import CorpusError, IndexFolderError, SettingsError
from retrieval_server.manifest import read_manifest
from retrieval_server.specs import DenseSpec
from retrieval_server.types import LoadProgress


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_encoder(tmp_path_factory.mktemp("model") / "e5-tiny", **sentence_transformer())


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_texts(tmp_path_factory.mktemp("corpus") / "corpus.jsonl")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory, model: Path, corpus: Path) -> Path:
    """The folder --save_dir of a Flat index; not to be changed, copy it first."""
    folder = tmp_path_factory.mktemp("built")
    build_dense(corpus, folder, model)
    return folder


@pytest.fixture
def bare(built: Path, tmp_path: Path) -> Path:
    """The FAISS file alone, as it is published."""
    return Path(shutil.copy(built / "e5" / "e5_Flat.index", tmp_path / "e5_Flat.index"))


def test_the_same_list_alone_in_any_batch_and_for_any_k(built: Path, corpus: Path) -> None:
    for options in ({}, {"dtype": "bfloat16"}, {"search": "faiss"}, {"search": "torch"}, {"batch_size": 3}):
        retriever = load_dense(built, corpus, **options)
        together = retriever.search(QUERIES, 30)
        for i, query in enumerate(QUERIES):
            for k in (1, 7, 30):
                assert retriever.search([query], k) == [together[i][:k]]
        assert retriever.search(list(reversed(QUERIES)), 5) == [hits[:5] for hits in reversed(together)]


def test_equal_passages_come_in_the_order_of_the_corpus(built: Path, corpus: Path) -> None:
    (hits,) = load_dense(built, corpus).search([TEXTS[40]], N)
    scores = {hit.document.id: hit.score for hit in hits}
    assert scores["p11"] == scores["p40"] == scores["p250"]
    order = [hit.document.id for hit in hits if hit.document.id in ("p11", "p40", "p250")]
    assert order == ["p11", "p40", "p250"]


def test_more_than_there_are_gives_all_and_no_queries_give_nothing(built: Path, corpus: Path) -> None:
    retriever = load_dense(built, corpus)
    (hits,) = retriever.search(["rome"], 10 * N)
    assert sorted(hit.document.id for hit in hits) == sorted(f"p{i}" for i in range(N))
    assert retriever.search([], 3) == []


@pytest.mark.parametrize("query", ["rome " * 20_000, "unknownword", "\u0000", "?", "é" * 300, "\u4f60\u597d"])
def test_a_strange_query_is_answered(query: str, built: Path, corpus: Path) -> None:
    for (hits,) in (load_dense(built, corpus).search([query], 3),):
        assert len(hits) == 3 and all(np.isfinite(hit.score) for hit in hits)


def test_the_question_of_a_long_history_decides(built: Path, corpus: Path) -> None:
    retriever = load_dense(built, corpus, max_query_length=16)
    query = " ".join([*TEXTS[:9], TEXTS[77]])
    assert ids(retriever, [query]) == ids(retriever, [" ".join(query.split()[-12:])])


def test_timings_and_info(built: Path, corpus: Path, model: Path) -> None:
    retriever = load_dense(built, corpus)
    retriever.search(QUERIES, 3)
    assert set(retriever.timings()) == {"encode", "search", "passages"} and min(retriever.timings().values()) > 0
    info = json.loads(json.dumps(retriever.info()))
    assert info["corpus"]["passages"] == N and info["manifest"]["parameters"]["method"] == "e5"
    assert info["encoder"] == {
        "dimension": 32, "device": "cpu", "dtype": "float32", "max_query_length": 64, "pooling": "mean",
        "normalize": True, "query_prefix": "query: ", "batch_deviation": 0.0,
    }  # fmt: skip
    assert info["search"] == {"index": "IndexFlatIP", "vectors": N, "dimension": 32, "device": "cpu"}
    assert (retriever.name, retriever.parallel, retriever.size) == ("dense", 1, N)
    retriever.close()


@pytest.mark.parametrize("where", ["save_dir", "folder", "file"])
def test_an_index_opens_by_any_of_its_paths(where: str, built: Path, corpus: Path) -> None:
    path = {"save_dir": built, "folder": built / "e5", "file": built / "e5" / "e5_Flat.index"}[where]
    progress = LoadProgress()
    retriever = backends.load(DenseSpec(index_path=path, corpus_path=corpus), progress)
    assert "manifest" in retriever.info() and progress.snapshot() == ("ready", 1.0)


@pytest.mark.parametrize("where", ["file", "folder", "parts", "first part"])
def test_a_bare_file_is_served_as_published(where: str, bare: Path, built: Path, corpus: Path, model: Path) -> None:
    path = {"file": bare, "folder": bare.parent, "parts": bare.parent, "first part": bare.parent / "part_aa"}[where]
    if "part" in where:
        data = bare.read_bytes()
        for i, name in enumerate(("part_aa", "part_ab", "part_ac")):
            (bare.parent / name).write_bytes(data[i * 13_000 : (i + 1) * 13_000])
        assert len(data) <= 3 * 13_000
        bare.unlink()
    # The family comes from the name of the file, or of the model: here no flag says e5.
    retriever = load_dense(path, corpus, model_path=str(model))
    assert ids(retriever, QUERIES) == ids(load_dense(built, corpus), QUERIES)
    assert retriever.info()["corpus"]["passages"] == N and "manifest" not in retriever.info()
    assert retriever.info()["corpus"]["sha256"] == load_dense(built, corpus).info()["corpus"]["sha256"]


def test_prefix_and_pooling_of_a_bare_file_can_be_told(bare: Path, corpus: Path, model: Path) -> None:
    retriever = load_dense(bare, corpus, model_path=str(model), encoder="plain", query_prefix="who ", pooling="cls")
    scores = retriever.search(["rome"], 1)[0][0].score
    query = reference(model, token_ids("who rome"), "cls")
    vectors = faiss.read_index(str(bare)).reconstruct_n(0, N)
    assert scores == pytest.approx((vectors @ query).max(), abs=1e-5)


@pytest.mark.parametrize("factory", ["SQ8", "HNSW8", "IVF4,Flat"])
def test_bare_files_of_other_types(factory: str, bare: Path, corpus: Path, model: Path, tmp_path: Path) -> None:
    vectors = faiss.read_index(str(bare)).reconstruct_n(0, N)
    index = faiss.index_factory(32, factory, faiss.METRIC_INNER_PRODUCT)
    index.train(vectors)
    index.add(vectors)
    path = tmp_path / "sub" / "e5_other.index"
    path.parent.mkdir()
    faiss.write_index(index, str(path))
    retriever = load_dense(path, corpus, model_path=str(model))
    expected = expected_scores(model, QUERIES).argmax(axis=1)
    assert sum(found[0] == f"p{row}" for found, row in zip(ids(retriever, QUERIES), expected, strict=True)) >= 10
    assert retriever.info()["search"]["index"] == type(index).__name__


def refused(error: type[Exception], message: str, index: Path, corpus: Path | None, **options: Any) -> None:
    with pytest.raises(error, match=message) as caught:
        load_dense(index, corpus, **options)
    assert "\n" not in str(caught.value)


def test_a_bare_file_with_the_wrong_corpus_or_encoder_is_refused(
    bare: Path, corpus: Path, model: Path, tmp_path: Path
) -> None:
    name = str(model)
    shorter = write_texts(tmp_path / "shorter.jsonl", TEXTS[:-1])
    refused(CorpusError, r"has 299 passages, but the index .* has 300 vectors", bare, shorter, model_path=name)
    wide = str(write_encoder(tmp_path / "wide", dim=48))
    refused(IndexFolderError, "has 32 dimensions, but the encoder .*wide gives 48", bare, corpus, model_path=wide)
    refused(SettingsError, "name the encoder", bare, corpus)
    refused(SettingsError, "give the corpus", bare, None, model_path=name)
    gz = tmp_path / "corpus.jsonl.gz"
    gz.write_bytes(gzip.compress(corpus.read_bytes()))
    refused(CorpusError, "compressed or in shards", bare, gz, model_path=name)
    bare.write_bytes(bare.read_bytes()[:-1])
    refused(IndexFolderError, "incomplete download", bare, corpus, model_path=name)
    faiss.write_index(faiss.IndexFlatIP(32), str(bare))
    refused(IndexFolderError, "holds no vectors", bare, corpus, model_path=name)
    damaged = np.full((N, 32), 0.1, np.float32)
    damaged[5, 5] = np.nan
    index = faiss.IndexFlatIP(32)
    index.add(damaged)
    faiss.write_index(index, str(bare))
    refused(IndexFolderError, "the index is damaged: .* not finite", bare, corpus, model_path=name)


def test_an_index_with_another_encoder_corpus_or_setting_is_refused(
    built: Path, corpus: Path, model: Path, tmp_path: Path
) -> None:
    other = write_encoder(tmp_path / "other", seed=9, **sentence_transformer())
    refused(
        IndexFolderError, r"fingerprint \w{16}, but .* with \w{16}: another model", built, corpus, model_path=str(other)
    )
    shorter = write_texts(tmp_path / "shorter.jsonl", TEXTS[:-1])
    refused(CorpusError, r"has \d+ bytes, but the index was built from corpus.jsonl with \d+", built, shorter)
    refused(SettingsError, "pooling is 'cls', but .* built for 'mean'", built, corpus, pooling="cls")
    refused(SettingsError, "query_prefix is 'q: ', but .* built for 'query: '", built, corpus, query_prefix="q: ")
    refused(SettingsError, "encoder is 'bge', but .* built for 'e5'", built, corpus, encoder="bge")
    refused(SettingsError, "nprobe 4 has no meaning for exact search", built, corpus, nprobe=4)
    refused(SettingsError, "ef_search 9 has no meaning", built, corpus, ef_search=9)
    refused(SettingsError, "neither FAISS nor PyTorch finds a GPU", built, corpus, faiss_gpu=True)
    refused(SettingsError, "search 'faiss' under faiss_gpu", built, corpus, faiss_gpu=True, search="faiss")
    moved = str(shutil.copytree(model, tmp_path / "moved"))
    assert load_dense(built, corpus, model_path=moved, encoder="e5", pooling="mean").size == N


def test_a_quantised_index_cannot_be_searched_by_torch(corpus: Path, model: Path, tmp_path: Path) -> None:
    build_dense(corpus, tmp_path, model, faiss_type="SQ8")
    refused(
        SettingsError, r"search 'torch' needs plain vectors .* IndexScalarQuantizer", tmp_path, corpus, search="torch"
    )
    refused(SettingsError, "searched on a GPU by FAISS alone", tmp_path, corpus, faiss_gpu=True)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: _flip(f / "e5_Flat.index"), "is damaged: sha256"),
        (lambda f: (f / "starts.npy").unlink(), "starts.npy is missing"),
        (lambda f: _rewrite(f, lambda m: m["statistics"].pop("query_model_path")), "does not describe an encoder"),
        (lambda f: _rewrite(f, lambda m: m.update(kind="bm25")), "kind 'bm25', the retriever is 'dense'"),
        (lambda f: _rewrite(f, lambda m: m["corpus"].update(passages=299)), "vectors 300, expected 299"),
        (lambda f: _resized(f), "dimension 16, expected 32"),
    ],
)
def test_a_damaged_index_is_refused(damage: Any, message: str, built: Path, corpus: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(built / "e5", tmp_path / "e5")
    damage(copy)
    refused(IndexFolderError, message, copy, corpus)


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[5000] ^= 1
    path.write_bytes(data)


def _rewrite(folder: Path, change: Any) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    change(manifest)
    (folder / "manifest.json").write_text(json.dumps(manifest))


def _resized(folder: Path) -> None:
    index = faiss.IndexFlatIP(16)
    index.add(np.ones((N, 16), np.float32))
    faiss.write_index(index, str(folder / "e5_Flat.index"))
    from retrieval_server.corpus import file_sha256

    path = folder / "e5_Flat.index"
    entry = {"bytes": path.stat().st_size, "sha256": file_sha256(path)}
    _rewrite(folder, lambda manifest: manifest["files"].update({"e5_Flat.index": entry}))


def test_two_encoders_for_queries_and_passages(corpus: Path, tmp_path: Path) -> None:
    """DPR: each side its own model, the pooled output, no normalisation."""
    queries, passages = (write_encoder(tmp_path / name, seed=i) for i, name in enumerate(("question", "context")))
    build_dense(corpus, tmp_path, passages, method="dpr", query_model_path=str(queries))
    (hits,) = load_dense(tmp_path, corpus).search(["rome"], 1)
    query = reference(queries, token_ids("rome"), "pooler", normalize=False)
    row = int(hits[0].document.id[1:])
    tokens = token_ids(TEXTS[row])
    tokens = tokens if len(tokens) <= 32 else [*tokens[:31], 3]
    assert hits[0].score == pytest.approx(query @ reference(passages, tokens, "pooler", normalize=False), rel=1e-5)
    assert read_manifest(tmp_path / "dpr").parameters["query_encoding"]["normalize"] is False


def test_a_failing_query_does_not_break_the_next_ones(
    built: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    retriever = load_dense(built, corpus)
    expected = ids(retriever, QUERIES)
    with monkeypatch.context() as broken:
        broken.setattr(Encoder, "_forward", lambda *_: np.full((1, 32), np.nan, np.float32))
        with pytest.raises(FloatingPointError, match="dtype float32"):
            retriever.search(["rome"], 3)
    assert ids(retriever, QUERIES) == expected
