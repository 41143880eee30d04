"""Fusion of two rankings: against values computed by hand and a second implementation, and what it promises."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from retrieval_helpers import PASSAGES, ScriptedRetriever, document, make_plan, open_index, write_corpus

from retrieval_server.backends import load
from retrieval_server.backends.bm25_build import build
from retrieval_server.backends.hybrid import HybridRetriever, fuse, reciprocal_ranks, weighted_scores
from retrieval_server.errors import CorpusError
from retrieval_server.specs import Bm25Spec, HybridSpec
from retrieval_server.types import Hit, LoadProgress

RRF = [partial(reciprocal_ranks, rrf_k=60)] * 2


def hits(*pairs: tuple[str, float]) -> list[Hit]:
    return [Hit(document(name), score) for name, score in pairs]


def shown(fused: Sequence[Hit]) -> list[tuple[str, float]]:
    return [(hit.document.id, hit.score) for hit in fused]


def weighted(weight: float) -> list[Any]:
    return [partial(weighted_scores, weight=share) for share in (weight, 1 - weight)]


def test_rrf_by_hand() -> None:
    fused = fuse([hits(("a", 9), ("b", 8), ("c", 7)), hits(("c", 0.3), ("d", 0.2))], RRF)
    assert shown(fused) == [("c", 1 / 63 + 1 / 61), ("a", 1 / 61), ("b", 1 / 62), ("d", 1 / 62)]


def test_weighted_by_hand() -> None:
    first, second = hits(("a", 10), ("b", 6), ("c", 2)), hits(("c", 0.9), ("a", 0.4), ("d", -0.1))
    # normalised: a 1, b 0.5, c 0 | c 1, a 0.5, d 0
    assert shown(fuse([first, second], weighted(0.75))) == [
        ("a", 0.75 * 1 + 0.25 * 0.5),
        ("b", 0.75 * 0.5),
        ("c", 0.25),
        ("d", 0.0),
    ]


def test_lists_whose_scores_are_equal_and_lists_that_are_empty() -> None:
    assert shown(fuse([hits(("a", 3)), []], weighted(0.5))) == [("a", 0.5)]
    assert shown(fuse([[], hits(("b", 3), ("c", 3))], weighted(0.25))) == [("b", 0.75), ("c", 0.75)]
    assert fuse([[], []], RRF) == []


def test_a_document_that_a_list_repeats_counts_once_with_its_best_place() -> None:
    fused = fuse([hits(("a", 3), ("a", 2), ("b", 1)), []], RRF)
    assert shown(fused) == [("a", 1 / 61), ("b", 1 / 62)]


names = st.lists(st.sampled_from("abcdefghij"), unique=True, max_size=8)


@given(names, names, st.sampled_from([0, 1, 60]))
def test_rrf_agrees_with_the_formula_and_breaks_ties_by_the_lists(first: list[str], second: list[str], k: int) -> None:
    def score(name: str) -> float:
        return sum(1 / (k + ranking.index(name) + 1) for ranking in (first, second) if name in ranking)

    def place(name: str) -> tuple[Any, ...]:
        far = len(first) + len(second)
        return (-score(name), *(ranking.index(name) if name in ranking else far for ranking in (first, second)))

    lists = [[Hit(document(name), float(-rank)) for rank, name in enumerate(ranking)] for ranking in (first, second)]
    fused = shown(fuse(lists, [partial(reciprocal_ranks, rrf_k=k)] * 2))
    expected = sorted({*first, *second}, key=place)
    assert fused == [(name, score(name)) for name in expected]


@given(names, names, st.floats(0, 1), st.data())
def test_weighted_scores_stay_between_0_and_1_and_ignore_scale_and_offset(
    first: list[str], second: list[str], weight: float, data: st.DataObject
) -> None:
    def drawn(ranking: list[str]) -> list[float]:
        numbers = st.integers(-1000, 1000).map(float)
        return sorted(data.draw(st.lists(numbers, min_size=len(ranking), max_size=len(ranking))), reverse=True)

    scores = [drawn(first), drawn(second)]

    def fused(scale: float, offset: float) -> list[tuple[str, float]]:
        lists = [
            hits(*((name, scale * score + offset) for name, score in zip(ranking, own, strict=True)))
            for ranking, own in zip((first, second), scores, strict=True)
        ]
        return shown(fuse(lists, weighted(weight)))

    plain = fused(1.0, 0.0)
    assert all(-1e-12 <= score <= 1 + 1e-12 for _, score in plain)
    assert [score for _, score in plain] == sorted((score for _, score in plain), reverse=True)
    assert fused(4.0, 2048.0) == plain  # powers of two and whole numbers: exact


def scripted(depth: int = 4) -> tuple[HybridRetriever, ScriptedRetriever, ScriptedRetriever]:
    first = ScriptedRetriever({"q": list("abcdef"), "r": ["x"]}, size=20)
    second = ScriptedRetriever({"q": list("fexyab")}, size=20)
    return HybridRetriever([first, second], RRF, depth, {"method": "rrf"}), first, second


def test_shorter_lists_are_the_beginning_of_longer_ones_and_the_depth_bounds_them() -> None:
    hybrid, first, second = scripted()
    full = hybrid.search(["q"], 1000)[0]
    assert sorted(hit.document.id for hit in full) == sorted({*"abcd", *"fexy"})
    for k in range(1, 12):
        assert hybrid.search(["q"], k)[0] == full[:k]
    assert {k for _, k in first.calls + second.calls} == {4}


def test_a_query_has_the_same_list_alone_and_in_a_batch() -> None:
    hybrid, _, _ = scripted()
    batch = hybrid.search(["q", "r", "nothing", "q"], 3)
    assert batch == [hybrid.search([query], 3)[0] for query in ("q", "r", "nothing", "q")]
    assert [hit.document.id for hit in batch[1]] == ["x"]
    assert batch[2] == []
    assert hybrid.search([], 3) == []


def test_stages_size_info_and_closing() -> None:
    hybrid, first, second = scripted()
    second.timings = lambda: {"encode": 2.0, "search": 3.0}  # type: ignore[attr-defined]
    hybrid.search(["q"], 1)
    stages = hybrid.timings()
    assert set(stages) == {"encode", "search", "fuse"}
    assert stages["encode"] == 2.0
    assert 3.0 <= stages["search"] < 4.0  # the first part measures nothing: its time is a search too
    assert hybrid.size == 20
    first.size = None
    assert hybrid.size is None
    info = hybrid.info()
    assert info["corpus"] == {"sha256": "abc"}
    assert [part["retriever"] for part in info["parts"]] == ["scripted", "scripted"]
    hybrid.close()
    assert first.closed
    assert second.closed


def test_loads_from_a_spec_and_finds_what_its_parts_find(built: tuple[Path, Path]) -> None:
    part = Bm25Spec(index_path=built[0], corpus_path=built[1])
    hybrid = load(HybridSpec(first=part, second=part), LoadProgress())
    alone = open_index(*built)
    for query in ("lake", "boat festival", "zürich", "quantum"):
        expected = [hit.document for hit in alone.search([query], 10)[0]]
        found = hybrid.search([query], 10)[0]
        assert [hit.document for hit in found] == expected
        assert [hit.score for hit in found] == [2 / (60 + rank) for rank in range(1, len(expected) + 1)]
    hybrid.close()


def test_the_weight_of_a_spec_is_the_share_of_the_first_part(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = iter([ScriptedRetriever({"q": ["a", "b", "c"]}), ScriptedRetriever({"q": ["c", "b", "a"]})])
    monkeypatch.setattr("retrieval_server.backends.composite.load", lambda spec, progress: next(parts))
    part = Bm25Spec(index_path=Path("i"), corpus_path=Path("c"))
    hybrid = load(HybridSpec(first=part, second=part, method="weighted", weight=0.75), LoadProgress())
    assert shown(hybrid.search(["q"], 3)[0]) == [("a", 0.75), ("b", 0.5), ("c", 0.25)]
    assert hybrid.info()["fusion"] == {"method": "weighted", "rrf_k": 60, "weight": 0.75, "depth": 100}


def test_parts_with_different_corpora_are_refused_with_both(built: tuple[Path, Path], tmp_path: Path) -> None:
    other = write_corpus(tmp_path / "other.jsonl", PASSAGES[:3])
    build(make_plan(other, tmp_path / "index"))
    spec = HybridSpec(
        first=Bm25Spec(index_path=built[0], corpus_path=built[1]),
        second=Bm25Spec(index_path=tmp_path / "index", corpus_path=other),
    )
    with pytest.raises(CorpusError, match=r"corpus.jsonl with 6 passages.*other.jsonl with 3 passages"):
        load(spec, LoadProgress())
