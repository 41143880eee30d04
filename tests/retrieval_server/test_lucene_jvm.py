"""The real thing: Anserini in a JVM, against the BM25 formula computed here. Skipped where the jar or Java is missing.

To run it: ``pip install 'chatr1[lucene]'`` and ``pip install --no-deps pyserini==1.6.0``.
"""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from retrieval_helpers import write_corpus
from test_lucene_client import process_id

from retrieval_server.analyzer import Analyzer
from retrieval_server.backends import load
from retrieval_server.backends.lucene import LuceneRetriever
from retrieval_server.backends.lucene_java import JavaSetup, find_setup
from retrieval_server.errors import SettingsError
from retrieval_server.specs import LuceneSpec
from retrieval_server.types import LoadProgress

ROOT = Path(__file__).resolve().parents[2]
# No stop word, no suffix to stem.
WORDS = ["amber", "basalt", "cobalt", "drumlin", "ember", "flint", "granit", "haml", "indigo", "jasper"]
ROWS = [
    (f"p:{i}", WORDS[i % 10], " ".join(WORDS[(i * j + j * j) % 10] for j in range(1, 3 + i % 7))) for i in range(40)
]


@pytest.fixture(scope="module")
def setup() -> JavaSetup:
    try:
        return find_setup(None, None)
    except SettingsError as error:
        pytest.skip(f"needs Anserini and Java: {error}")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("collection")
    return write_corpus(folder / "corpus.jsonl", ROWS)


def build(setup: JavaSetup, corpus: Path, index: Path, *flags: str) -> Path:
    command = [setup.java_home / "bin" / "java", "-Xmx256m", "-cp", setup.jar, "io.anserini.index.IndexCollection"]
    options = ["-collection", "JsonCollection", "-input", corpus.parent, "-index", index, *flags]
    generator = ["-generator", "DefaultLuceneDocumentGenerator", "-threads", "1"]
    subprocess.run([*command, *options, *generator], check=True, capture_output=True, timeout=120)
    return index


@pytest.fixture(scope="module")
def retriever(setup: JavaSetup, corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LuceneRetriever]:
    index = build(setup, corpus, tmp_path_factory.mktemp("lucene") / "raw", "-storeRaw")
    loaded = load(LuceneSpec(index_path=index, heap_mb=256, threads=2), LoadProgress())
    assert isinstance(loaded, LuceneRetriever)
    yield loaded
    loaded.close()


def expected(query: str, k1: float = 0.9, b: float = 0.4) -> dict[str, float]:
    """BM25 by its formula; passages this short have exact lengths in Lucene too."""
    passages = {id: Counter(re.findall(r"\w+", f"{title} {text}")) for id, title, text in ROWS}
    mean = sum(map(Counter.total, passages.values())) / len(passages)
    scores: dict[str, float] = {}
    for term in query.split():
        n = sum(term in counts for counts in passages.values())
        idf = math.log(1 + (len(passages) - n + 0.5) / (n + 0.5))
        for id, counts in passages.items():
            if tf := counts[term]:
                norm = k1 * (1 - b + b * counts.total() / mean)
                scores[id] = scores.get(id, 0.0) + idf * tf / (tf + norm)
    return scores


@pytest.mark.parametrize("query", ["amber", "flint cobalt", "jasper jasper indigo", "haml ember unheardof"])
def test_scores_are_those_of_the_formula(retriever: LuceneRetriever, query: str) -> None:
    (hits,) = retriever.search([query], 1000)
    scores = {hit.document.id: hit.score for hit in hits}
    assert scores == pytest.approx(expected(query), abs=1e-3)
    assert list(scores.values()) == sorted(scores.values(), reverse=True)
    title, text = next(row[1:] for row in ROWS if row[0] == hits[0].document.id)
    assert (hits[0].document.title, hits[0].document.text) == (title, text)


def test_a_batch_is_its_single_queries_and_small_lists_are_prefixes(retriever: LuceneRetriever) -> None:
    queries = ["amber", "", "the", "flint \ud800", "\U0001f600 flint", "fl\0int", "amber", "x" * 100_000]
    batch = retriever.search(queries, 7)
    assert batch == [retriever.search([query], 7)[0] for query in queries]
    assert [len(hits) for hits in batch] == [7, 0, 0, 7, 7, 0, 7, 0]
    (whole,) = retriever.search(["amber flint"], 10**9)
    assert [retriever.search(["amber flint"], k)[0] for k in (0, 1, 5)] == [[], whole[:1], whole[:5]]


def test_of_a_query_with_too_many_terms_the_last_ones_count(retriever: LuceneRetriever) -> None:
    many = " ".join(f"word{i}" for i in range(1023))
    (kept,) = retriever.search([f"flint {many} amber amber"], 50)
    assert {hit.document.id: hit.score for hit in kept} == pytest.approx(expected("amber amber"), abs=1e-3)
    (both,) = retriever.search([f"flint {many} flint"], 50)
    assert {hit.document.id: hit.score for hit in both} == pytest.approx(expected("flint flint"), abs=1e-3)


def test_killed_under_load_it_comes_back(retriever: LuceneRetriever) -> None:
    queries = [f"amber flint word{i}" for i in range(2000)]
    restarts = retriever.info()["lucene"]["restarts"]
    threading.Timer(0.05, os.kill, (process_id(retriever._client), signal.SIGKILL)).start()
    hits = retriever.search(queries, 10)
    assert retriever.info()["lucene"]["restarts"] == restarts + 1
    assert hits == [retriever.search(["amber flint"], 10)[0]] * 2000


def test_without_stored_texts_and_with_other_parameters(setup: JavaSetup, corpus: Path, tmp_path: Path) -> None:
    index = build(setup, corpus, tmp_path / "bare")
    spec = LuceneSpec(index_path=index, corpus_path=corpus, k1=1.2, b=0.75, heap_mb=256)
    loaded = load(spec, LoadProgress())
    (hits,) = loaded.search(["flint cobalt"], 100)
    loaded.close()
    assert {hit.document.id: hit.score for hit in hits} == pytest.approx(expected("flint cobalt", 1.2, 0.75), abs=1e-3)
    rows = {row[0]: row for row in ROWS}
    assert all((hit.document.id, hit.document.title, hit.document.text) == rows[hit.document.id] for hit in hits)
    assert json.loads(hits[0].document.encoded)["contents"] == hits[0].document.contents


ANALYZE = """
import json, sys
import jnius_config
jnius_config.set_classpath(sys.argv[1])
from jnius import autoclass
analyzer = autoclass("io.anserini.analysis.DefaultEnglishAnalyzer").newDefaultInstance()
utils = autoclass("io.anserini.analysis.AnalyzerUtils")
print(json.dumps([list(utils.analyze(analyzer, text)) for text in json.load(sys.stdin)]))
"""


def test_the_lucene_analyzer_of_bm25_makes_the_same_terms(setup: JavaSetup) -> None:
    files = [Path(__file__), *ROOT.glob("docs/*.md"), *(ROOT / "retrieval_server").glob("*.py")]
    lines = [line for file in files for line in file.read_text(encoding="utf-8").splitlines()]
    texts = [line for line in lines if not set("©®™") & set(line)]  # Lucene keeps these signs as words
    texts += [
        "O’Neil's İstanbul 日本語 テスト cafe\u0301 ½ x² a·b U.S.A. 3.5 1,000",
        "technologies possibly us biology",
    ]
    done = subprocess.run(
        [sys.executable, "-c", ANALYZE, setup.jar],
        input=json.dumps(texts),
        env={**os.environ, "JAVA_HOME": str(setup.java_home)},
        check=True,
        capture_output=True,
        text=True,
        timeout=120,
    )
    analyzer = Analyzer("english", "lucene")
    for text, theirs in zip(texts, json.loads(done.stdout), strict=True):
        assert analyzer.terms(text) == theirs
