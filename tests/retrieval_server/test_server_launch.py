"""From the command line and YAML files to what is served: published flags, overrides, every mistake at once."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import yaml

from retrieval_server.errors import IndexFolderError, SettingsError
from retrieval_server.flags import index_kind, launch
from retrieval_server.launch import SPECS, read_config, resolve
from retrieval_server.settings import Settings
from retrieval_server.specs import Bm25Spec, DenseSpec, LuceneSpec, RerankSpec

SHIPPED = sorted((Path(__file__).parents[2] / "configs" / "retrieval").glob("*.yaml"))


def faiss_file(folder: Path, name: str = "e5_Flat.index") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(b"IxFI")
    return folder / name


def lucene_folder(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "segments_2").write_bytes(b"?")
    return folder


def flags(*words: str | Path) -> Any:
    return launch([str(word) for word in words])


def config(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "server.yaml"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_a_shipped_file_describes_its_backend(path: Path) -> None:
    sections = read_config(path)
    told = resolve(sections["backend"], sections["server"], str(path))
    assert told.port == 8002
    assert launch(["--config", str(path)]) == told


def test_there_is_a_shipped_file_for_every_backend() -> None:
    assert {yaml.safe_load(path.read_text())["backend"]["name"] for path in SHIPPED} == set(SPECS)


def test_the_published_bm25_line(built: tuple[Path, Path]) -> None:
    index, corpus = built
    told = flags("--index_path", index, "--corpus_path", corpus, "--topk", "5", "--retriever_name", "bm25")
    assert told.backend == Bm25Spec(index_path=index, corpus_path=corpus)
    assert (told.settings, told.host, told.port) == (Settings(topk=5), "127.0.0.1", 8002)
    assert flags("--index_path", index, "--corpus_path", corpus).backend == told.backend


def test_the_published_dense_line(tmp_path: Path) -> None:
    index = faiss_file(tmp_path)
    told = flags(
        "--index_path", index, "--corpus_path", "c.jsonl", "--topk", "3", "--retriever_name", "e5",
        "--retriever_model", "intfloat/e5-base-v2", "--faiss_gpu",
    )  # fmt: skip
    assert told.backend == DenseSpec(
        index_path=index, corpus_path=Path("c.jsonl"), encoder="e5", model_path="intfloat/e5-base-v2", faiss_gpu=True
    )
    default_model = flags("--index_path", index, "--corpus_path", "c.jsonl", "--retriever_name", "e5").backend
    assert default_model.model_path == "intfloat/e5-base-v2"
    assert (
        flags("--index_path", index, "--corpus_path", "c.jsonl", "--retriever_name", "bge").backend.model_path is None
    )


def test_the_published_rerank_line(built: tuple[Path, Path]) -> None:
    index, corpus = built
    pair = ("--index_path", index, "--corpus_path", corpus)
    told = flags(
        *pair, "--retrieval_topk", "20", "--reranking_topk", "4", "--reranker_model", "m", "--reranker_batch_size", "8"
    )
    first = Bm25Spec(index_path=index, corpus_path=corpus)
    assert told.backend == RerankSpec(first=first, model_path="m", depth=20, batch_size=8)
    assert told.settings.topk == 4
    short = flags(*pair, "--reranking_topk", "3")
    assert short.backend == RerankSpec(first=first, model_path="cross-encoder/ms-marco-MiniLM-L12-v2", depth=10)
    with pytest.raises(SettingsError, match="--topk 5 and --reranking_topk 3 both say"):
        flags(*pair, "--reranking_topk", "3", "--topk", "5")


def test_the_kind_of_an_index_comes_from_its_manifest_or_its_files(built: tuple[Path, Path], tmp_path: Path) -> None:
    assert index_kind(built[0]) == index_kind(built[0] / "bm25") == "bm25"
    assert index_kind(faiss_file(tmp_path / "one")) == index_kind(tmp_path / "one") == "dense"
    assert index_kind(faiss_file(tmp_path / "pieces", "part_aa").parent) == "dense"
    assert index_kind(lucene_folder(tmp_path / "lucene")) == "lucene"
    lucene_folder(tmp_path / "published" / "bm25")
    assert index_kind(tmp_path / "published") == "lucene"
    with pytest.raises(IndexFolderError, match="does not exist"):
        index_kind(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(IndexFolderError, match="not an index of this service"):
        index_kind(tmp_path / "empty")


def test_of_several_indexes_the_name_decides(built: tuple[Path, Path], tmp_path: Path) -> None:
    manifest = json.loads((built[0] / "bm25" / "manifest.json").read_text())
    for folder, kind in (("bm25", "bm25"), ("e5", "dense"), ("bge", "dense"), (".e5.partial", "dense")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "manifest.json").write_text(json.dumps({**manifest, "kind": kind}))
    pair = ("--index_path", tmp_path, "--corpus_path", "c", "--retriever_name")
    assert flags(*pair, "bm25").backend == Bm25Spec(index_path=tmp_path / "bm25", corpus_path=Path("c"))
    e5 = flags(*pair, "e5").backend
    assert e5 == DenseSpec(index_path=tmp_path / "e5", corpus_path=Path("c"), encoder="e5")
    for name in ("dense", "gte", "lucene"):
        with pytest.raises(IndexFolderError, match=r"holds 3 indexes \(bge, bm25, e5\); name one"):
            flags(*pair, name)
    with pytest.raises(IndexFolderError, match="holds 3 indexes"):
        flags(*pair[:-1])


def test_bm25_over_a_lucene_index_is_lucene_as_published(tmp_path: Path) -> None:
    index = lucene_folder(tmp_path / "bm25")
    assert flags("--index_path", index, "--retriever_name", "bm25").backend == LuceneSpec(index_path=index)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "nothing to serve: give --index_path"),
        (("--index_path", "INDEX"), "--corpus_path is missing: bm25 returns passages"),
        (("--index_path", "INDEX", "--corpus_path", "c", "--retriever_name", "bm52"), "did you mean 'bm25'"),
        (("--index_path", "INDEX", "--corpus_path", "c", "--retriever_name", "e5"), "is an index of kind 'bm25'"),
        (("--index_path", "INDEX", "--corpus_path", "c", "--retriever_name", "proxy"), "describe it in --config"),
        (("--indexpath", "INDEX"), "--indexpath is not a known flag; did you mean --index_path?"),
        (("--index_path", "INDEX", "--corpus_path", "c", "--topk", "0"), "^topk is 0; it must be at least 1$"),
    ],
)
def test_flags_that_describe_nothing(built: tuple[Path, Path], words: tuple[str, ...], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        flags(*(built[0] if word == "INDEX" else word for word in words))


def test_encoder_flags_have_no_effect_on_bm25_and_that_is_said(
    built: tuple[Path, Path], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    told = flags("--index_path", built[0], "--corpus_path", built[1], "--faiss_gpu", "--retriever_model", "m")
    assert told.backend.name == "bm25"
    assert "no effect of --faiss_gpu" in caplog.text and "no effect of --retriever_model" in caplog.text


def test_flags_override_the_file(tmp_path: Path) -> None:
    path = config(
        tmp_path,
        """
        backend:
          name: rerank
          model_path: m
          first: {name: bm25, index_path: a, corpus_path: b}
        server: {topk: 7, port: 9000, host: 0.0.0.0, access_log: true, cache_units: 0}
        """,
    )
    told = flags("--config", path)
    assert (told.settings, told.host, told.port) == (Settings(topk=7, access_log=True, cache_units=0), "0.0.0.0", 9000)
    changed = flags(
        "--config", path, "--topk", "2", "--port", "0", "--no-access_log", "--index_path", "x", "--reranker_model", "n"
    )
    first = Bm25Spec(index_path=Path("x"), corpus_path=Path("b"))
    assert changed.backend == RerankSpec(first=first, model_path="n")
    assert (changed.settings, changed.host, changed.port) == (Settings(topk=2, cache_units=0), "0.0.0.0", 0)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--index_path", "x"), "--index_path has no meaning for the backend 'proxy'"),
        (("--retriever_name", "bm25"), "the file describes the backend 'proxy'"),
    ],
)
def test_flags_that_contradict_the_file(tmp_path: Path, words: tuple[str, ...], message: str) -> None:
    path = config(tmp_path, "backend: {name: proxy, replicas: [http://a]}")
    with pytest.raises(SettingsError, match=message):
        flags("--config", path, *words)


def test_every_mistake_of_a_file_is_shown_at_once(tmp_path: Path) -> None:
    path = config(
        tmp_path,
        """
        backend:
          name: hybrid
          rrk_k: 3
          weight: 7
          first: {name: bm25, index_path: a, corpus: b}
          second: {name: dnse}
        server: {topk: 0, prot: 1, max_batch: many, max_queue: 9}
        """,
    )
    with pytest.raises(SettingsError) as refused:
        flags("--config", path)
    lines = str(refused.value).splitlines()
    assert lines[0] == f"--config {path} has 8 mistakes:"
    assert sorted(line.partition(". ")[2] for line in lines[1:]) == sorted(
        [
            "backend.rrk_k is not a known key; did you mean backend.rrf_k?",
            "backend.weight is 7: Input should be less than or equal to 1",
            "backend.first.corpus is not a known key; did you mean backend.first.corpus_path?",
            "backend.second.name 'dnse' is unknown (did you mean 'dense'?); known: " + ", ".join(SPECS),
            "topk is 0; it must be at least 1",
            "server.prot is not a known key; did you mean server.port?",
            "server.max_batch is 'many': Input should be a valid integer, unable to parse string as an integer",
            "max_queries 4096 is above max_queue 9: the largest request could never be accepted",
        ]
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("backend: [", "is not YAML"),
        ("- a", "holds a list"),
        ("backnd: {}", "backnd is not a known key; did you mean backend"),
        ("backend: bm25", "backend is 'bm25': it must be a mapping"),
        ("backend: {name: bm25, name: dense}", "key 'name' is given twice"),
        ("server: {port: 1}", "nothing to serve"),
        ("backend: {index_path: a}", "backend.name is missing; known: bm25"),
    ],
)
def test_a_file_that_is_no_configuration(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        flags("--config", config(tmp_path, text))


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="cannot be read: No such file"):
        flags("--config", tmp_path / "none.yaml")
