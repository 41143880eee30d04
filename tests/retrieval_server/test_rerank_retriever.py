"""Reranking over a first stage: the order, the depth, each query's own documents, and loading from a spec."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from retrieval_helpers import PASSAGES, ScriptedRetriever, open_index
from tiny_cross_encoder import CountingScorer, random_model, save

from retrieval_server.backends import load
from retrieval_server.backends.cross_encoder import load_cross_encoder
from retrieval_server.backends.rerank import RerankRetriever, passage_text
from retrieval_server.errors import SettingsError
from retrieval_server.specs import Bm25Spec, RerankSpec
from retrieval_server.types import LoadProgress


def test_the_passage_is_shown_as_published() -> None:
    assert passage_text('"Rome"\nRome is a city.\nOld.') == '(Title: "Rome") Rome is a city.\nOld.'
    assert passage_text("one line") == "(Title: one line) "


def reranker(depth: int = 3) -> tuple[RerankRetriever, ScriptedRetriever, CountingScorer]:
    first = ScriptedRetriever({"n3 q": ["n1", "n2", "n3", "n4", "n5"], "n1": ["n2", "n1"], "same": ["x", "y"]})
    scorer = CountingScorer()
    return RerankRetriever(first, scorer, depth), first, scorer


def ids(results: Any) -> list[list[str]]:
    return [[hit.document.id for hit in hits] for hits in results]


def test_the_cross_encoder_decides_and_ties_keep_the_order_of_the_first_stage() -> None:
    retriever, first, _ = reranker()
    results = retriever.search(["n3 q", "n1", "same", "nothing"], 3)
    assert ids(results) == [["n3", "n1", "n2"], ["n1", "n2"], ["x", "y"], []]
    assert [hit.score for hit in results[0]] == [1.0, 0.0, 0.0]
    assert first.calls == [(["n3 q", "n1", "same", "nothing"], 3)]


def test_each_query_is_scored_against_its_own_documents_only() -> None:
    retriever, _, scorer = reranker()
    retriever.search(["n3 q", "n1"], 3)
    [pairs] = scorer.calls
    expected = [("n3 q", "n1"), ("n3 q", "n2"), ("n3 q", "n3"), ("n1", "n2"), ("n1", "n1")]
    assert pairs == [(query, f'(Title: "Title {name}") Text {name}') for query, name in expected]


def test_shorter_lists_are_the_beginning_of_longer_ones_and_the_depth_bounds_them() -> None:
    retriever, _, _ = reranker(depth=4)
    full = retriever.search(["n3 q"], 1000)[0]
    assert len(full) == 4
    for k in range(1, 7):
        assert retriever.search(["n3 q"], k)[0] == full[:k]
    assert retriever.search([], 3) == []


def test_scores_that_round_to_one_keep_their_order() -> None:
    class Saturated(CountingScorer):
        def logits(self, pairs: Any) -> list[float]:
            return [50.0 + len(pairs) - position for position in range(len(pairs), 0, -1)]

    retriever, _, _ = reranker()
    saturated = RerankRetriever(retriever.first, Saturated(), 3, activation=lambda logit: min(1.0, logit))
    assert ids(saturated.search(["n3 q"], 3)) == [["n3", "n2", "n1"]]


def test_searches_from_several_threads_take_turns() -> None:
    retriever, _, scorer = reranker()
    inside = threading.Semaphore(1)
    clashes = []
    logits = scorer.logits

    def guarded(pairs: Any) -> list[float]:
        if not inside.acquire(blocking=False):
            clashes.append(pairs)
        threading.Event().wait(0.01)
        try:
            return logits(pairs)
        finally:
            inside.release()

    scorer.logits = guarded  # type: ignore[method-assign]
    work = [lambda: retriever.search(["n1"], 2), lambda: retriever.order(["n1"], [["n1", "n1 n1"]])] * 4
    threads = [threading.Thread(target=task) for task in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert clashes == []
    assert len(scorer.calls) == 8


def test_stages_info_and_closing() -> None:
    retriever, first, _ = reranker()
    retriever.search(["n1"], 2)
    assert set(retriever.timings()) == {"search", "rerank"}
    assert retriever.size is None
    assert retriever.info()["corpus"] == {"sha256": "abc"}
    retriever.close()
    assert first.closed
    alone = RerankRetriever(None, CountingScorer(), 3)
    assert alone.info()["corpus"] == {}
    alone.close()


def test_loads_from_a_spec_and_ranks_as_the_model_says(built: tuple[Path, Path], tmp_path: Path) -> None:
    spec = RerankSpec(
        first=Bm25Spec(index_path=built[0], corpus_path=built[1]),
        model_path=save(tmp_path, random_model()),
        depth=4,
        max_length=64,
        dtype="float32",
    )
    progress = LoadProgress()
    retriever = load(spec, progress)
    assert progress.snapshot() == ("ready", 1.0)
    assert retriever.size == len(PASSAGES)
    found = open_index(*built).search(["lake boat fishing"], 4)[0]
    scorer, activation = load_cross_encoder(spec)
    logits = scorer.logits([("lake boat fishing", passage_text(hit.document.contents)) for hit in found])
    expected = sorted(zip(logits, (hit.document.id for hit in found), strict=True), reverse=True)
    hits = retriever.search(["lake boat fishing"], 10)[0]
    assert [hit.document.id for hit in hits] == [name for _, name in expected]
    assert [hit.score for hit in hits] == pytest.approx([activation(logit) for logit, _ in expected], abs=1e-6)
    assert retriever.info()["reranker"] == {"model_path": str(tmp_path), "depth": 4, "max_length": 64}
    retriever.close()


def test_a_cross_encoder_that_cannot_be_loaded_closes_the_first_stage(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    first = ScriptedRetriever({})
    monkeypatch.setattr("retrieval_server.backends.composite.load", lambda spec, progress: first)
    spec = RerankSpec(first=Bm25Spec(index_path=tmp_path, corpus_path=tmp_path), model_path=str(tmp_path))
    with pytest.raises(SettingsError, match="cannot be loaded"):
        load(spec, LoadProgress())
    assert first.closed
