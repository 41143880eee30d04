"""What the Lucene backend makes of a process's answers: documents, batches, refusals. The process is a fake one."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from retrieval_helpers import PASSAGES, write_corpus
from test_lucene_client import FAKE, make_index, process_id, wait_until_gone

from retrieval_server.app import create_app
from retrieval_server.backends import lucene
from retrieval_server.backends.lucene import LuceneRetriever, jvm_options, stored_document
from retrieval_server.backends.lucene_client import LuceneClient, LuceneProcessError
from retrieval_server.backends.lucene_java import JavaSetup
from retrieval_server.corpus import file_sha256
from retrieval_server.errors import CorpusError, IndexFolderError
from retrieval_server.settings import Settings
from retrieval_server.specs import LuceneSpec
from retrieval_server.types import LoadProgress

IDS = [row[0] for row in PASSAGES]
Open = Callable[..., LuceneRetriever]


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Open]:
    """Load an index of the rows given, with or without a corpus; everything opened is closed."""
    setup = JavaSetup(tmp_path / "anserini-0-fatjar.jar", tmp_path / "java", 21)
    monkeypatch.setattr(lucene, "find_setup", lambda jar, java_home: setup)
    opened: list[LuceneRetriever] = []

    def open_index(rows: list[tuple[str, str | None]], corpus: Path | None = None, **more: Any) -> LuceneRetriever:
        spec = LuceneSpec(index_path=make_index(tmp_path / "index", rows), corpus_path=corpus, **more)
        opened.append(LuceneRetriever.load(spec, LoadProgress(), FAKE))
        return opened[-1]

    yield open_index
    for retriever in opened:
        retriever.close()


def raw(row: tuple[str, str, str]) -> str:
    """A stored text as Anserini keeps it: the corpus line, indented."""
    return json.dumps({"id": row[0], "contents": f'"{row[1]}"\n{row[2]}'}, indent=2, ensure_ascii=False)


STORED: list[tuple[str, str | None]] = [(row[0], raw(row)) for row in PASSAGES]
BARE: list[tuple[str, str | None]] = [(id, None) for id in reversed(IDS)]
"""Without texts, and in another order than the corpus: what a build with several threads leaves."""


def found(retriever: LuceneRetriever, *queries: str, k: int = 10) -> list[list[str]]:
    return [[hit.document.id for hit in hits] for hits in retriever.search(queries, k)]


def test_stored_texts_become_documents(load: Open) -> None:
    (hits,) = load(STORED).search(["fishing"], 2)
    assert [(hit.document.id, hit.score) for hit in hits] == [("lake:0", 1.0), ("town:2", 1.0)]
    document = hits[0].document
    assert (document.title, document.text) == PASSAGES[0][1:]
    assert document.contents == f'"{PASSAGES[0][1]}"\n{PASSAGES[0][2]}'
    assert json.loads(document.encoded)["id"] == "lake:0"


@pytest.mark.parametrize(
    ("stored", "title", "text"),
    [
        ('{"id": "x:1", "title": "T", "text": "some text"}', "T", "some text"),
        ('"T"\nsome text', "T", "some text"),  # -storeContents, or a collection whose raw form is not JSON
        ("[1]", "", "[1]"),
        ('{"contents": "without id"}', "", '{"contents": "without id"}'),
        ("half \ud800", "", "half ?"),
    ],
)
def test_a_stored_text_of_any_form_becomes_a_document(stored: str, title: str, text: str) -> None:
    document = stored_document("x:1", stored)
    assert (document.id, document.title, document.text) == ("x:1", title, text)


def test_texts_come_from_the_corpus_by_id_and_not_by_row(load: Open, tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "corpus.jsonl")
    retriever = load(BARE, corpus)
    hits = retriever.search(IDS, 1)
    assert [hit.document.id for (hit,) in hits] == IDS
    assert [(hit.document.title, hit.document.text) for (hit,) in hits] == [row[1:] for row in PASSAGES]
    assert retriever.info()["corpus"]["sha256"] == file_sha256(corpus)
    assert retriever.info()["corpus"]["passages"] == len(PASSAGES)


def test_a_batch_keeps_its_places_whatever_is_in_it(load: Open) -> None:
    retriever = load(STORED)
    queries = ["fishing", "", "town", "  ", "fishing", "unheardof", "\ud800 town"]
    answers = found(retriever, *queries)
    assert answers == [found(retriever, query)[0] for query in queries]
    assert answers[0] == answers[4] != []
    assert answers[1] == answers[3] == answers[5] == []
    assert answers[6] == answers[2] != []


def test_k_is_clipped_and_small_lists_are_prefixes(load: Open) -> None:
    retriever = load(STORED)
    (all_hits,) = found(retriever, "is in lake", k=10**12)
    assert 1 < len(all_hits) <= len(PASSAGES)
    for k in range(5):
        assert found(retriever, "is in lake", k=k) == [all_hits[:k]]
    assert retriever.search([], 3) == []


def test_large_batches_travel_in_several_messages(load: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lucene, "_HITS_PER_MESSAGE", 10)
    retriever = load(STORED)
    queries = [f"fishing {i}" for i in range(12)]
    assert found(retriever, *queries, k=2) == [found(retriever, "fishing", k=2)[0]] * 12
    calls = [json.loads(line) for line in (tmp_path / "index/calls.jsonl").read_text().splitlines()]
    assert [len(call["queries"]) for call in calls] == [5, 5, 2, 1]


def test_two_questions_at_once_need_one_search(load: Open, tmp_path: Path) -> None:
    found(load(STORED), "fishing", "fishing", "town")
    (call,) = (tmp_path / "index/calls.jsonl").read_text().splitlines()
    assert json.loads(call)["queries"] == ["fishing", "town"]


def test_an_index_without_texts_needs_a_corpus(load: Open) -> None:
    with pytest.raises(IndexFolderError, match=r"index stores no texts .*; give corpus_path"):
        load(BARE)


def test_a_foreign_corpus_is_refused_and_the_process_ended(
    load: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[int] = []
    start = LuceneClient.start

    def record(client: LuceneClient) -> dict[str, Any]:
        description = start(client)
        started.append(process_id(client))
        return description

    monkeypatch.setattr(LuceneClient, "start", record)
    other = write_corpus(tmp_path / "other.jsonl", [(f"o:{i}", "T", "text") for i in range(9)])
    with pytest.raises(CorpusError, match=r"other\.jsonl has no passage 'town:5', which \S+index has"):
        load(BARE, other)
    shorter = write_corpus(tmp_path / "shorter.jsonl", PASSAGES[:3])
    with pytest.raises(CorpusError, match=r"shorter\.jsonl has 3 passages, but \S+index has 6 documents"):
        load(BARE, shorter)
    assert len(started) == 2
    for pid in started:
        wait_until_gone(pid)


def test_an_empty_index_is_refused(load: Open) -> None:
    with pytest.raises(IndexFolderError, match="holds no document"):
        load([])


def test_a_document_that_left_the_corpus_fails_its_batch(
    load: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    retriever = load(BARE, write_corpus(tmp_path / "corpus.jsonl"))
    assert retriever._texts is not None
    monkeypatch.setattr(retriever._texts, "find", lambda id: None)
    with pytest.raises(CorpusError, match=r"document 'lake:0' of the index is not in the corpus \S+corpus\.jsonl"):
        retriever.search(["lake:0"], 1)


def test_a_failing_process_is_an_error_of_the_batch_and_info_counts(load: Open) -> None:
    retriever = load(STORED)
    with pytest.raises(LuceneProcessError, match="scripted failure"):
        retriever.search(["fail"], 1)
    assert found(retriever, "die once fishing", "town")[0] == found(retriever, "fishing")[0]
    assert retriever.info()["lucene"]["restarts"] == 1
    assert retriever.info()["lucene"]["rss_mb"] > 1


def test_the_index_may_lie_inside_the_folder_given(tmp_path: Path) -> None:
    make_index(tmp_path / "save" / "bm25", [])
    assert lucene.resolve_lucene_index(tmp_path / "save") == tmp_path / "save" / "bm25"
    make_index(tmp_path / "save" / "other", [])
    with pytest.raises(IndexFolderError, match=r"holds 2 indexes \(bm25, other\); name one"):
        lucene.resolve_lucene_index(tmp_path / "save")


def test_what_is_not_a_lucene_index_is_named(tmp_path: Path, built: tuple[Path, Path]) -> None:
    with pytest.raises(IndexFolderError, match=r"none does not exist"):
        lucene.resolve_lucene_index(tmp_path / "none")
    with pytest.raises(IndexFolderError, match=r"is a file"):
        lucene.resolve_lucene_index(built[1])
    with pytest.raises(IndexFolderError, match=r"serve it as bm25"):
        lucene.resolve_lucene_index(built[0])
    (tmp_path / "x.txt").touch()
    with pytest.raises(IndexFolderError, match=r"no segments_N file \(found: x\.txt\)"):
        lucene.resolve_lucene_index(tmp_path)


def test_the_heap_is_capped_and_new_javas_get_their_flags(tmp_path: Path) -> None:
    """An unknown flag would stop the JVM, so an older one must not get them."""
    options = {version: jvm_options(JavaSetup(tmp_path, tmp_path, version), 512) for version in (None, 17, 22, 25)}
    assert all("-Xmx512m" in flags for flags in options.values())
    new = ["--enable-native-access=ALL-UNNAMED", "--sun-misc-unsafe-memory-access=allow"]
    assert options[17] == options[None]
    assert options[22] == [*options[17], new[0]]
    assert options[25] == [*options[17], *new]


async def test_a_server_whose_lucene_process_is_killed_under_load_answers_everybody(load: Open) -> None:
    retriever = load(STORED)
    app = create_app(retriever, Settings(cache_units=0))
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server", timeout=60) as client,
    ):

        async def ask(number: int) -> tuple[int, Any]:
            if number == 20:
                os.kill(process_id(retriever._client), signal.SIGKILL)
            answer = await client.post("/retrieve", json={"queries": [f"fishing {number}"], "topk": 2})
            return answer.status_code, answer.json()

        answers = await asyncio.gather(*map(ask, range(60)))
    assert [status for status, _ in answers] == [200] * 60
    assert {tuple(document["id"] for document in body["result"][0]) for _, body in answers} == {("lake:0", "town:2")}
    assert retriever.info()["lucene"]["restarts"] == 1
