"""FAISS indexes of every kind: the protocol's promises, and files that are whole, in pieces, cut short or foreign."""

from __future__ import annotations

from pathlib import Path

import faiss
import numpy as np
import pytest
from test_exact_search import brute_force, clustered

from retrieval_server.backends.faiss_files import index_pieces, make_index, read_index, streams, write_streamed
from retrieval_server.backends.faiss_search import FaissSearch, one_by_one
from retrieval_server.errors import IndexFolderError, SettingsError

N, DIM = 1200, 16
VECTORS, QUERIES = clustered(N, DIM), clustered(40, DIM, 1)


def build(factory: str) -> faiss.Index:
    index = make_index(DIM, factory)
    index.train(VECTORS)
    index.add(VECTORS)
    return index


@pytest.mark.parametrize(
    "factory", ["SQ8", "SQbf16", "HNSW8", "HNSW8,SQ8", "IVF32,Flat", "IVF32,SQ8", "PCA8,IVF8,SQ8", "PCA8,HNSW8"]
)
def test_a_list_depends_neither_on_the_batch_nor_on_k(factory: str) -> None:
    search = FaissSearch(build(factory), ef_search=16 if "HNSW" in factory else None)
    whole = search.search(QUERIES, 100)
    assert sum(len(rows) for _, rows in whole) > 40 * 50
    for scores, rows in whole:
        assert (rows >= 0).all() and len(set(rows.tolist())) == len(rows) <= 100
        keys = list(zip((-scores).tolist(), rows.tolist(), strict=True))
        assert keys == sorted(keys)
    for k in (1, 3, 16, 17, 64):
        for size in (1, 7, 40):
            for start in range(0, 40, size):
                for i, (scores, rows) in enumerate(search.search(QUERIES[start : start + size], k), start):
                    assert rows.tolist() == whole[i][1][:k].tolist()
                    assert scores.tolist() == whole[i][0][:k].tolist()


@pytest.mark.parametrize("factory", ["SQ8", "HNSW8", "HNSW2", "IVF32,Flat"])
def test_more_than_there_are_gives_fewer(factory: str) -> None:
    for _, rows in FaissSearch(build(factory)).search(QUERIES[:3], 5000):
        assert 0 < len(rows) <= N and (rows >= 0).all()
        assert len(set(rows.tolist())) == len(rows)  # no row stands in for those that were not found


def test_faiss_computes_every_query_on_its_own() -> None:
    """Which lists of an IVF index are visited follows from these products."""
    vectors, queries = clustered(3000, 200), clustered(64, 200, 1)
    index = faiss.IndexFlatIP(200)
    index.add(vectors)
    faiss.cvar.distance_compute_blas_threshold = 20
    one_by_one()
    together = index.search(queries, 9)
    for i in range(64):
        scores, rows = index.search(queries[i : i + 1], 9)
        assert scores[0].tolist() == together[0][i].tolist() and rows[0].tolist() == together[1][i].tolist()


def test_looking_further_finds_more() -> None:
    def recall(search: FaissSearch) -> float:
        found = search.search(QUERIES, 10)
        expected = [brute_force(VECTORS, query, 10)[1][-1] for query in QUERIES]
        return float(
            np.mean([(scores >= worst - 1e-5).mean() for (scores, _), worst in zip(found, expected, strict=True)])
        )

    ivf, hnsw = build("IVF32,Flat"), build("HNSW8")
    assert recall(FaissSearch(ivf, nprobe=1)) < recall(FaissSearch(ivf, nprobe=32)) == 1.0
    assert recall(FaissSearch(hnsw, ef_search=1)) < recall(FaissSearch(hnsw, ef_search=400))
    assert FaissSearch(build("IVF32,Flat")).parameters == {"nprobe": 10}
    assert FaissSearch(build("HNSW8")).parameters == {"ef_search": 128}


@pytest.mark.parametrize(
    ("factory", "options", "message"),
    [
        ("HNSW8", {"nprobe": 4}, "nprobe 4 has no meaning .* IndexHNSWFlat"),
        ("IVF32,Flat", {"ef_search": 4}, "ef_search 4 has no meaning"),
        ("IVF32,Flat", {"nprobe": 33}, "nprobe 33 is more than the 32 lists"),
    ],
)
def test_a_parameter_without_effect_is_refused(factory: str, options: dict[str, int], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        FaissSearch(build(factory), **options)


@pytest.mark.parametrize("factory", ["Flat", "SQfp16", "SQ8", "HNSW8", "IVF8,Flat"])
@pytest.mark.parametrize("parts", [1, 3])
def test_a_file_is_read_whole_or_in_pieces(tmp_path: Path, factory: str, parts: int) -> None:
    index = build(factory)
    data = faiss.serialize_index(index).tobytes()
    size = -(-len(data) // parts)
    for i in range(parts):
        name = "e5_Flat.index" if parts == 1 else f"part_a{'abc'[i]}"
        (tmp_path / name).write_bytes(data[i * size : (i + 1) * size])
    read: list[int] = []
    loaded = read_index(index_pieces(tmp_path), read.append)
    assert (loaded.size, loaded.dim, sum(read) >= len(data)) == (N, DIM, True)
    if factory == "Flat":
        assert loaded.faiss_index is None
        assert np.array_equal(loaded.vectors, VECTORS)
        assert loaded.vectors.flags.aligned
    else:
        assert np.array_equal(loaded.faiss_index.search(QUERIES, 5)[1], index.search(QUERIES, 5)[1])
        assert (loaded.vectors is not None) == (factory == "SQfp16")
    if factory == "SQfp16":
        assert np.array_equal(loaded.vectors, VECTORS.astype(np.float16))


def test_where_an_index_may_be(tmp_path: Path) -> None:
    for name in ("part_ab", "part_aa"):
        (tmp_path / name).write_bytes(b"")
    parts = [tmp_path / "part_aa", tmp_path / "part_ab"]
    assert index_pieces(tmp_path) == index_pieces(tmp_path / "part_ab") == parts
    (tmp_path / "e5_Flat.index").write_bytes(b"")
    assert index_pieces(tmp_path) == index_pieces(tmp_path / "e5_Flat.index") == [tmp_path / "e5_Flat.index"]
    (tmp_path / "bge_Flat.index").write_bytes(b"")
    with pytest.raises(IndexFolderError, match=r"2 FAISS files \(bge_Flat.index, e5_Flat.index\); name one"):
        index_pieces(tmp_path)
    with pytest.raises(IndexFolderError, match="does not exist"):
        index_pieces(tmp_path / "none")
    (tmp_path / "sub").mkdir()
    with pytest.raises(IndexFolderError, match="found: nothing"):
        index_pieces(tmp_path / "sub")


@pytest.mark.parametrize("factory", ["Flat", "SQ8", "HNSW8"])
@pytest.mark.parametrize("cut", [0, 3, 30, 44, 100, -1])
def test_a_file_that_is_cut_short_is_refused(tmp_path: Path, factory: str, cut: int) -> None:
    path = tmp_path / "x.index"
    path.write_bytes(faiss.serialize_index(build(factory)).tobytes()[:cut])
    with pytest.raises(IndexFolderError, match=str(path)) as caught:
        read_index([path])
    assert "\n" not in str(caught.value)


def test_both_sizes_are_shown_when_a_part_is_missing(tmp_path: Path) -> None:
    data = faiss.serialize_index(build("Flat")).tobytes()
    (tmp_path / "part_aa").write_bytes(data[:40_000])
    with pytest.raises(IndexFolderError, match=f"40000 bytes, .* 1200 vectors of 16 dimensions, which are {len(data)}"):
        read_index(index_pieces(tmp_path))


def test_what_is_not_served_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.index"
    for index, message in (
        (faiss.IndexFlatL2(DIM), "L2 distance"),
        (faiss.index_factory(DIM, "HNSW8"), "L2 distance"),
        (faiss.index_factory(DIM, "IDMap,Flat", faiss.METRIC_INNER_PRODUCT), "ids of its own"),
    ):
        faiss.write_index(index, str(path))
        with pytest.raises(IndexFolderError, match=message):
            read_index([path])
    path.write_text("this is some text and no index at all")
    with pytest.raises(IndexFolderError, match="not a whole FAISS index"):
        read_index([path])
    with pytest.raises(SettingsError, match="--faiss_type 'Flatt' is not an index that FAISS builds"):
        make_index(DIM, "Flatt")


@pytest.mark.parametrize("factory", ["Flat", "SQfp16", "SQ8", "SQbf16"])
def test_a_streamed_file_is_the_one_that_faiss_writes(tmp_path: Path, factory: str) -> None:
    index = make_index(DIM, factory)
    assert streams(index)
    index.train(VECTORS)
    write_streamed(index, N, (VECTORS[i : i + 100] for i in range(0, N, 100)), tmp_path / "streamed")
    index.add(VECTORS)
    assert (tmp_path / "streamed").read_bytes() == faiss.serialize_index(index).tobytes()
    assert not streams(build("HNSW8"))
    with pytest.raises(IndexFolderError, match="100 vectors came, 1200 were announced"):
        write_streamed(make_index(DIM, "Flat"), N, [VECTORS[:100]], tmp_path / "short")
