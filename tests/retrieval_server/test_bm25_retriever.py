"""BM25 search against the formula, against bm25s itself, and at its edges."""

from __future__ import annotations

import math
import random
from collections import Counter
from pathlib import Path

import bm25s
import pytest
import Stemmer
from hypothesis import given
from hypothesis import strategies as st
from retrieval_helpers import PASSAGES, make_plan, open_index, write_corpus

from retrieval_server.analyzer import ENGLISH_STOPWORDS, Analyzer
from retrieval_server.backends.bm25 import MAX_QUERY_TERMS, Bm25Retriever
from retrieval_server.backends.bm25_build import build
from retrieval_server.errors import SettingsError

_WORDS = "lake river boat boats fishing town sea mirel festival deep north painted red blue green zebra"
WORDS = _WORDS.split()


def ranking(retriever: Bm25Retriever, query: str, k: int = 10) -> list[tuple[str, float]]:
    """(id, score) of the hits of one query."""
    return [(hit.document.id, hit.score) for hit in retriever.search([query], k)[0]]


def formula(passages: list[str], query: str, k1: float, b: float) -> list[float]:
    """Lucene's BM25 in float64 without its constant factor: the definition, written down once more."""
    analyzer = Analyzer("english", "english")
    bags = [Counter(analyzer.terms(passage)) for passage in passages]
    lengths = [sum(bag.values()) for bag in bags]
    mean = sum(lengths) / len(lengths)
    scores = [0.0] * len(passages)
    for term in analyzer.terms(query):
        df = sum(term in bag for bag in bags)
        idf = math.log(1 + (len(bags) - df + 0.5) / (df + 0.5))
        for row, bag in enumerate(bags):
            if term in bag:
                scores[row] += idf * bag[term] / (bag[term] + k1 * (1 - b + b * lengths[row] / mean))
    return scores


def random_passages(seed: int, n: int) -> list[tuple[str, str, str]]:
    draw = random.Random(seed)
    return [(f"p{i}", "T", " ".join(draw.choices(WORDS, k=draw.randint(1, 30)))) for i in range(n)]


@pytest.fixture(scope="module")
def random_index(tmp_path_factory: pytest.TempPathFactory) -> tuple[Bm25Retriever, list[str], Path]:
    folder = tmp_path_factory.mktemp("random")
    passages = random_passages(3, 200)
    corpus = write_corpus(folder / "c.jsonl", passages)
    build(make_plan(corpus, folder / "i", stemmer="english"))
    return (
        open_index(folder / "i", corpus),
        [f'"{title}"\n{text}' for _, title, text in passages],
        folder / "i" / "bm25",
    )


@pytest.mark.parametrize("query", ["boat festival", "the deep sea", "boats boats boats", "zebra", "fishing in mirel?"])
def test_scores_are_those_of_the_formula(random_index: tuple[Bm25Retriever, list[str], Path], query: str) -> None:
    retriever, passages, _ = random_index
    expected = {f"p{i}": s for i, s in enumerate(formula(passages, query, 0.9, 0.4)) if s > 0}
    found = dict(ranking(retriever, query, 1000))
    assert found == pytest.approx(expected, rel=1e-5)


def test_ranking_equals_bm25s_called_directly(random_index: tuple[Bm25Retriever, list[str], Path]) -> None:
    retriever, passages, folder = random_index
    oracle = bm25s.BM25.load(folder, backend="numpy")
    stemmer = Stemmer.Stemmer("english")
    draw = random.Random(1)
    for _ in range(50):
        query = " ".join(draw.choices(WORDS, k=draw.randint(1, 6)))
        tokens = bm25s.tokenize(query, stopwords="en", stemmer=stemmer, return_ids=False, show_progress=False)
        scores = oracle.get_scores(tokens[0])
        # bm25s leaves the order of equal scores open; ours is the order of the corpus.
        rows = sorted((row for row in range(len(passages)) if scores[row] > 0), key=lambda row: (-scores[row], row))
        assert ranking(retriever, query, 7) == [(f"p{row}", float(scores[row])) for row in rows[:7]]


@given(
    st.text(max_size=60)
    | st.lists(st.sampled_from(["The", "boats'", "RUNNING", "x", "é1", "a_b"]), max_size=9).map(" ".join)
)
def test_terms_equal_those_of_bm25s(text: str) -> None:
    theirs = bm25s.tokenize(
        [text], stopwords="en", stemmer=Stemmer.Stemmer("english"), return_ids=False, show_progress=False
    )
    assert Analyzer("english", "english").terms(text) == theirs[0]


def test_stop_words_are_lucenes() -> None:
    assert frozenset(bm25s.stopwords.STOPWORDS_EN) == ENGLISH_STOPWORDS


@given(st.lists(st.lists(st.sampled_from([*WORDS, "the", "unknownword"]), max_size=5).map(" ".join), max_size=6))
def test_a_batch_gives_what_its_queries_give_alone(
    random_index: tuple[Bm25Retriever, list[str], Path], queries: list[str]
) -> None:
    retriever = random_index[0]
    assert retriever.search(queries, 5) == [retriever.search([query], 5)[0] for query in queries]


def test_a_smaller_k_gives_a_prefix(random_index: tuple[Bm25Retriever, list[str], Path]) -> None:
    retriever = random_index[0]
    whole = ranking(retriever, "boat sea lake", 200)
    assert len(whole) > 100
    for k in (1, 2, 3, 10, 63, 64, 65, len(whole), 200, 100_000):
        assert ranking(retriever, "boat sea lake", k) == whole[:k]


def test_equal_scores_keep_the_order_of_the_corpus(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "c.jsonl", [(f"p{i}", "T", "same words") for i in range(20)])
    build(make_plan(corpus, tmp_path))
    assert [i for i, _ in ranking(open_index(tmp_path, corpus), "same", 5)] == ["p0", "p1", "p2", "p3", "p4"]


def test_documents_without_a_common_term_are_never_returned(built: tuple[Path, Path]) -> None:
    retriever = open_index(*built)
    assert [i for i, _ in ranking(retriever, "boats", 100)] == ["town:2", "person:3"]  # twice there: boats, boat
    assert ranking(retriever, "quantum", 3) == []
    assert ranking(retriever, "zürich CAFÉ", 3)[0][0] == "town:5"


@pytest.mark.parametrize("empty", ["", "   ", "the of and", "?!", "\x00", "quantum", "x"])
def test_a_query_without_terms_may_stand_anywhere_in_a_batch(built: tuple[Path, Path], empty: str) -> None:
    retriever = open_index(*built)
    found = retriever.search([empty, "festival", empty], 3)
    assert found[0] == found[2] == []
    assert [hit.document.id for hit in found[1]] == ["town:2"]
    assert retriever.search([empty], 3) == [[]]
    assert retriever.search([], 3) == []


def test_of_a_very_long_query_the_end_counts(built: tuple[Path, Path]) -> None:
    retriever = open_index(*built)
    query = "painted " + "lake " * MAX_QUERY_TERMS
    assert all(hit.document.id != "person:3" for hit in retriever.search([query], 10)[0])
    assert ranking(retriever, "lake " * 50_000 + "painted", 10)[-1][0] == "person:3"


@pytest.mark.parametrize(("stemmer", "found"), [("english", ["town:2", "person:3"]), ("none", ["person:3", "town:2"])])
def test_stemming_is_a_choice(tmp_path: Path, stemmer: str, found: list[str]) -> None:
    corpus = write_corpus(tmp_path / "c.jsonl")
    build(make_plan(corpus, tmp_path, stemmer=stemmer))
    retriever = open_index(tmp_path, corpus)
    assert [i for i, _ in ranking(retriever, "boats")] == found
    assert [i for i, _ in ranking(retriever, "painting")] == (["person:3"] if stemmer == "english" else [])


def test_stop_words_are_a_choice(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "c.jsonl")
    build(make_plan(corpus, tmp_path, stopwords="none"))
    assert ranking(open_index(tmp_path, corpus), "what was it")[0][0] == "empty:4"


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"stopwords": "klingon"}, "english, none"), ({"stemmer": "klingon"}, "german"), ({"b": 1.5}, "b 1.5")],
)
def test_unknown_parameters_are_named(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        build(make_plan(write_corpus(tmp_path / "c.jsonl"), tmp_path, **changes))


def test_numeric_ids_are_names_and_not_row_numbers(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "c.jsonl", [("2", "A", "lake"), ("0", "B", "river"), ("1", "C", "boat")])
    build(make_plan(corpus, tmp_path))
    hits = [hit for found in open_index(tmp_path, corpus).search(["lake", "river", "boat"], 3) for hit in found]
    assert [(hit.document.id, hit.document.text) for hit in hits] == [("2", "lake"), ("0", "river"), ("1", "boat")]


def test_the_sent_document_has_all_four_fields(built: tuple[Path, Path]) -> None:
    hit = open_index(*built).search(["Ada Tron"], 1)[0][0]
    i, title, text = PASSAGES[3]
    assert (hit.document.id, hit.document.title, hit.document.text) == (i, title, text)
    assert hit.document.contents == f'"{title}"\n{text}'
