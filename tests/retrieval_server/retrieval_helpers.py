"""A small corpus, its index, and scripted retrievers."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from retrieval_server.backends.bm25 import Bm25Retriever
from retrieval_server.building import BuildPlan
from retrieval_server.specs import Bm25Spec
from retrieval_server.types import Document, Hit, LoadProgress

PASSAGES = [
    ("lake:0", "Lake Orvel", "Lake Orvel is a deep lake in the north. Fishing there is allowed in May."),
    ("river:1", "River Sand", "River Sand runs from Lake Orvel to the sea."),
    ("town:2", "Mirel", "Mirel is a town on River Sand, known for its fishing boats and its boat festival."),
    ("person:3", "Ada Tron", "Ada Tron, born in Mirel, painted boats."),
    ("empty:4", "The", "It is what it was, and that is not it."),
    ("town:5", "Zürich", "Zürich café naïve."),
]


def write_corpus(path: Path, passages: Sequence[tuple[str, str, str]] = PASSAGES) -> Path:
    """Write passages in the published form: the quoted title, a newline, the text."""
    lines = [json.dumps({"id": i, "contents": f'"{title}"\n{text}'}, ensure_ascii=False) for i, title, text in passages]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def make_plan(corpus: Path, save_dir: Path, **changes: Any) -> BuildPlan:
    """A plan with the command line's defaults."""
    options: dict[str, Any] = {"k1": 0.9, "b": 0.4, "stopwords": "english", "stemmer": "lucene", "force": False}
    return BuildPlan(corpus, save_dir, **{**options, **changes})


def open_index(index: Path, corpus: Path) -> Bm25Retriever:
    """Load as the server does."""
    return Bm25Retriever.load(Bm25Spec(index_path=index, corpus_path=corpus), LoadProgress())


class ScriptedRetriever:
    """Answers from a dictionary, records its calls, and can be told to wait or to fail."""

    name = "scripted"
    parallel = 1

    def __init__(self, answers: dict[str, list[str]], size: int | None = None) -> None:
        self.answers = answers
        self.size = size
        self.calls: list[tuple[list[str], int]] = []
        self.gate = threading.Event()
        """Searches wait for it; set by default."""
        self.gate.set()
        self.closed = False

    def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        assert self.gate.wait(10)
        self.calls.append((list(queries), k))
        if "fail" in queries:
            raise ValueError("scripted failure")
        return [
            [Hit(document(name), float(10 - rank)) for rank, name in enumerate(self.answers.get(query, [])[:k])]
            for query in queries
        ]

    def info(self) -> dict[str, Any]:
        return {"corpus": {"sha256": "abc"}}

    def close(self) -> None:
        self.closed = True


def document(name: str) -> Document:
    """A document whose every field follows from its id."""
    return Document.of(name, f'"Title {name}"\nText {name}', f"Title {name}", f"Text {name}")
