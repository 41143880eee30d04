"""Building a dense index: against the pipeline by hand, killed, continued, refused, and of every type."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import faiss
import numpy as np
import pytest
from dense_helpers import (
    BATCH,
    QUERIES,
    TEXTS,
    N,
    build_dense,
    dense_plan,
    expected_scores,
    ids,
    load_dense,
    write_texts,
)
from tiny_encoders import sentence_transformer, write_encoder

from retrieval_server.backends import dense_build, embeddings
from retrieval_server.backends.encoder import Encoder
from retrieval_server.build_index import main
from retrieval_server.building import WORK
from retrieval_server.encode_options import EncodeOptions
from retrieval_server.errors import CorpusError, IndexFolderError, SettingsError
from retrieval_server.manifest import read_manifest


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_encoder(tmp_path_factory.mktemp("model") / "e5-tiny", **sentence_transformer())


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_texts(tmp_path_factory.mktemp("corpus") / "corpus.jsonl")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory, model: Path, corpus: Path) -> Path:
    """The folder --save_dir of a Flat index with kept embeddings; not to be changed."""
    folder = tmp_path_factory.mktemp("built")
    build_dense(corpus, folder, model, save_embedding=True)
    return folder


def test_the_whole_is_e5_by_hand(built: Path, corpus: Path, model: Path) -> None:
    scores = expected_scores(model, QUERIES)
    retriever = load_dense(built, corpus)
    assert retriever.size == N
    for i, hits in enumerate(retriever.search(QUERIES, 10)):
        order = sorted(range(N), key=lambda row: (-round(scores[i, row], 6), row))[:10]
        assert [hit.document.id for hit in hits] == [f"p{row}" for row in order]
        np.testing.assert_allclose([hit.score for hit in hits], scores[i, order], atol=2e-6)
        assert hits[0].document.contents == TEXTS[order[0]]


def test_the_manifest_says_how_it_was_made(built: Path, model: Path) -> None:
    manifest = read_manifest(built / "e5")
    told = manifest.parameters
    assert (manifest.kind, told["method"], told["faiss_type"], told["dtype"]) == ("dense", "e5", "Flat", "float32")
    assert told["passage_encoding"] == {
        "pooling": "mean", "normalize": True, "query_prefix": "query: ", "passage_prefix": "passage: "
    }  # fmt: skip
    assert manifest.statistics["dimension"] == 32 and manifest.statistics["passage_model_path"] == str(model)
    assert set(manifest.files) == {"e5_Flat.index", "starts.npy"}
    assert sorted(path.name for path in built.iterdir()) == ["e5", "emb_e5.memmap"]


def test_files_are_those_of_the_published_layout(built: Path) -> None:
    kept = np.memmap(built / "emb_e5.memmap", np.float32, "r").reshape(N, 32)
    index = faiss.read_index(str(built / "e5" / "e5_Flat.index"))
    assert (type(index), index.ntotal) == (faiss.IndexFlatIP, N)
    assert np.array_equal(index.reconstruct_n(0, N), kept)


def test_kept_embeddings_make_the_same_index_without_encoding(
    built: Path, corpus: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Encoder, "encode_passages", None)
    build_dense(corpus, tmp_path, model, embedding_path=built / "emb_e5.memmap")
    first, second = (read_manifest(folder / "e5").files["e5_Flat.index"] for folder in (built, tmp_path))
    assert first == second
    short = tmp_path / "short.memmap"
    short.write_bytes((built / "emb_e5.memmap").read_bytes()[:-4])
    with pytest.raises(
        SettingsError, match=rf"has {N * 128 - 4} bytes, but {N} passages of 32 dimensions .* {N * 128}"
    ):
        build_dense(corpus, tmp_path, model, embedding_path=short)
    bad = np.fromfile(built / "emb_e5.memmap", np.float32)
    bad[32 * 17 + 5] = np.inf
    bad.tofile(short)
    with pytest.raises(SettingsError, match="row 17 is not finite"):
        build_dense(corpus, tmp_path, model, embedding_path=short)


@pytest.mark.parametrize("faiss_type", ["SQfp16", "SQ8", "HNSW8", "IVF4,Flat", "IVF", "IVF,SQ8"])
def test_every_type_finds_what_flat_finds(
    faiss_type: str, built: Path, corpus: Path, model: Path, tmp_path: Path
) -> None:
    manifest = build_dense(corpus, tmp_path, model, embedding_path=built / "emb_e5.memmap", faiss_type=faiss_type)
    assert manifest.parameters["file"] == f"e5_{faiss_type.replace(',', '_')}.index"
    exact = ids(load_dense(built, corpus), QUERIES)
    found = ids(load_dense(tmp_path, corpus, **({"nprobe": 4} if "IVF" in faiss_type else {})), QUERIES)
    overlap = [len(set(a) & set(b)) / 10 for a, b in zip(exact, found, strict=True)]
    assert np.mean(overlap) > 0.9


def test_float16_embeddings_on_disk(corpus: Path, model: Path, built: Path, tmp_path: Path) -> None:
    build_dense(corpus, tmp_path, model, embedding_dtype="float16")
    index = faiss.read_index(str(tmp_path / "e5" / "e5_Flat.index"))
    exact = np.memmap(built / "emb_e5.memmap", np.float32, "r").reshape(N, 32)
    assert np.array_equal(index.reconstruct_n(0, N), exact.astype(np.float16).astype(np.float32))


def test_a_compressed_corpus_is_served_from_the_index(model: Path, corpus: Path, built: Path, tmp_path: Path) -> None:
    import gzip

    packed = tmp_path / "corpus.jsonl.gz"
    packed.write_bytes(gzip.compress(corpus.read_bytes()))
    build_dense(packed, tmp_path / "index", model)
    assert ids(load_dense(tmp_path / "index", None), QUERIES) == ids(load_dense(built, corpus), QUERIES)


def count_encoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record how many passages are encoded, call by call."""
    counts: list[int] = []
    encode = Encoder.encode_passages
    monkeypatch.setattr(
        Encoder, "encode_passages", lambda self, texts, limit: counts.append(len(texts)) or encode(self, texts, limit)
    )
    return counts


def test_a_building_that_was_interrupted_goes_on_and_ends_the_same(
    built: Path, corpus: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embeddings, "BLOCK_ROWS", 64)
    counts = count_encoded(monkeypatch)
    counting = Encoder.encode_passages

    def fail_at_third(self: Encoder, texts: list[str], limit: int) -> np.ndarray:
        if len(counts) == 2:
            raise KeyboardInterrupt
        return counting(self, texts, limit)

    monkeypatch.setattr(Encoder, "encode_passages", fail_at_third)
    with pytest.raises(KeyboardInterrupt):
        build_dense(corpus, tmp_path, model)
    raw = tmp_path / ".e5.partial" / WORK / "embeddings.raw"
    with raw.open("ab") as file:  # half a block that was being written
        file.write(b"half a block")
    counts.clear()
    monkeypatch.setattr(Encoder, "encode_passages", counting)
    build_dense(corpus, tmp_path, model)
    assert counts == [64, 64, N - 4 * 64]
    whole = [read_manifest(folder / "e5").files for folder in (built, tmp_path)]
    assert whole[0] == whole[1]
    assert not (tmp_path / ".e5.partial").exists() and not (tmp_path / "e5" / WORK).exists()


@pytest.mark.parametrize("change", ["corpus", "weights", "max_length", "prefix", "damaged journal", "lost vectors"])
def test_what_another_building_left_is_not_used(
    change: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embeddings, "BLOCK_ROWS", 100)
    corpus = write_texts(tmp_path / "corpus.jsonl")
    fill = dense_build._Writer._fill
    monkeypatch.setattr(dense_build._Writer, "_fill", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        build_dense(corpus, tmp_path / "index", model)
    monkeypatch.setattr(dense_build._Writer, "_fill", fill)
    options: dict[str, object] = {}
    work = tmp_path / "index" / ".e5.partial" / WORK
    if change == "corpus":
        write_texts(corpus, [*TEXTS[:-1], "another passage"])
    elif change == "weights":
        model = write_encoder(tmp_path / "other", seed=5, **sentence_transformer())
    elif change == "max_length":
        options["max_length"] = 24
    elif change == "prefix":
        options["passage_prefix"] = "the "
    elif change == "damaged journal":
        (work / "embeddings.json").write_text('{"rows": "many"}')
    else:
        (work / "embeddings.raw").write_bytes(b"short")
    counts = count_encoded(monkeypatch)
    build_dense(corpus, tmp_path / "index", model, **options)
    assert sum(counts) == N


def test_building_twice_does_nothing_and_another_encoder_builds_again(
    corpus: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build_dense(corpus, tmp_path, model)
    counts = count_encoded(monkeypatch)
    build_dense(corpus, tmp_path, model)
    assert counts == []
    build_dense(corpus, tmp_path, write_encoder(tmp_path / "new", seed=3, **sentence_transformer()))
    assert sum(counts) == N
    build_dense(corpus, tmp_path, model, method="bge")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bge", "e5", "new"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"faiss_type": "Flatt"}, "--faiss_type 'Flatt' is not an index that FAISS builds"),
        ({"faiss_type": "IVF4000,Flat"}, "IVF4000,Flat has 4000 lists for 300 passages"),
        ({"model_path": "/no/such/model"}, "/no/such/model: no such folder"),
        ({"faiss_gpu": True}, "the installed FAISS finds no GPU"),
        ({"device": "cuda:5"}, "cuda:5"),
        ({"embedding_path": Path("/no/such/file")}, "--embedding_path /no/such/file cannot be read"),
    ],
)
def test_what_cannot_be_built_is_said_in_one_line_before_anything_is_encoded(
    options: dict[str, object],
    message: str,
    corpus: Path,
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Encoder, "encode_passages", None)
    with pytest.raises(SettingsError, match=message) as caught:
        build_dense(corpus, tmp_path, model, **options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_length": 4}, "--max_length is 4; it must be at least 8"),
        ({"batch_size": 0}, "--batch_size is 0"),
        ({"use_fp16": True, "dtype": "float32"}, "both choose the precision"),
        ({"save_embedding": True, "embedding_dtype": "float16"}, "--save_embedding keeps float32"),
        ({"method": "../e5"}, "cannot be the name of a file"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        EncodeOptions(**{"method": "e5", "model_path": "m", **options})  # type: ignore[arg-type]


def test_a_damaged_line_is_found_before_anything_is_encoded(
    corpus: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = count_encoded(monkeypatch)
    damaged = tmp_path / "damaged.jsonl"
    damaged.write_bytes(corpus.read_bytes() + b"{broken\n")
    with pytest.raises(CorpusError, match="line 307: not JSON"):
        build_dense(damaged, tmp_path, model)
    empty = tmp_path / "empty.jsonl"
    empty.write_text("\n")
    with pytest.raises(CorpusError, match="has no passage"):
        build_dense(empty, tmp_path, model)
    assert counts == []


def test_a_full_disk_is_reported_and_the_building_can_go_on(
    corpus: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    counts = count_encoded(monkeypatch)
    monkeypatch.setattr(embeddings, "BLOCK_ROWS", 100)
    sync = os.fsync
    monkeypatch.setattr(embeddings.os, "fsync", lambda fd: full(fd) if len(counts) == 2 else sync(fd))
    with pytest.raises(IndexFolderError, match=r"No space left on device .* MB free"):
        build_dense(corpus, tmp_path, model)
    monkeypatch.setattr(embeddings.os, "fsync", sync)
    counts.clear()
    build_dense(corpus, tmp_path, model)
    assert counts == [100, 100]


@pytest.mark.parametrize("flags", [[], ["--use_fp16"]])
def test_the_published_command_builds_and_half_precision_follows_the_flag(
    flags: list[str], corpus: Path, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    import torch

    monkeypatch.setattr(dense_build, "pick_dtype", lambda wanted, device: torch.bfloat16)
    status = main(
        ["--retrieval_method", "e5", "--model_path", str(model), "--corpus_path", str(corpus), "--max_length", "32",
         "--save_dir", str(tmp_path), "--batch_size", "512", "--pooling_method", "mean", "--faiss_type", "Flat", *flags]
    )  # fmt: skip
    assert status == 0 and capsys.readouterr().out == f"{tmp_path / 'e5'}\n"
    assert read_manifest(tmp_path / "e5").parameters["dtype"] == ("bfloat16" if flags else "float32")
    assert ids(load_dense(tmp_path / "e5", corpus), BATCH)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--retrieval_method", "e5"], "name the encoder with --model_path"),
        (["--retrieval_method", "bm52"], "did you mean 'bm25'"),
        (["--retrieval_method", "e5", "--model_path", "m", "--max_length", "2"], "--max_length is 2"),
    ],
)
def test_the_command_says_what_is_missing(arguments: list[str], message: str, corpus: Path, capsys: object) -> None:
    assert main([*arguments, "--corpus_path", str(corpus)]) == 2
    assert message in capsys.readouterr().err  # type: ignore[attr-defined]


@pytest.mark.slow
def test_a_killed_building_goes_on(corpus: Path, model: Path, built: Path, tmp_path: Path) -> None:
    """SIGKILL in a process of its own, at several points, until one building gets through."""
    code = (
        "import sys, time; from retrieval_server.backends import embeddings;"
        "from retrieval_server.build_index import main;"
        "embeddings.BLOCK_ROWS = 20; write = embeddings.write_durably;"
        "embeddings.write_durably = lambda *a: (write(*a), time.sleep(0.2)); sys.exit(main(sys.argv[1:]))"
    )
    command = [
        sys.executable, "-c", code, "--retrieval_method", "e5", "--model_path", model, "--corpus_path", corpus,
        "--max_length", "32", "--save_dir", tmp_path,
    ]  # fmt: skip
    journal = tmp_path / ".e5.partial" / WORK / "embeddings.json"
    seen = []
    for _ in range(3):
        process = subprocess.Popen(command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        begun = seen[-1] if seen else 0
        while not journal.exists() or json.loads(journal.read_text())["rows"] < begun + 60:
            assert process.poll() is None
            time.sleep(0.02)
        process.send_signal(signal.SIGKILL)
        process.wait(10)
        seen.append(json.loads(journal.read_text())["rows"])
    assert seen == sorted(seen) and seen[0] >= 60
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and f"{seen[-1]} of {N} passages were encoded before" in done.stderr
    assert read_manifest(tmp_path / "e5").files == read_manifest(built / "e5").files


def test_a_plan_without_an_encoder_is_refused(corpus: Path, model: Path, tmp_path: Path) -> None:
    import dataclasses

    with pytest.raises(SettingsError, match="give --model_path"):
        dense_build.build(dataclasses.replace(dense_plan(corpus, tmp_path, model), encode=None))
