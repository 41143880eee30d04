"""The answers of the published servers, defects included, written from their described behaviour and without a model.

Every kind finds passages by shared words, in corpus order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel

PASSAGES = [("7", "Nile", "A long river."), ("8", "Oslo", "A city by a fjord."), ("9", 'The "Fram"', "A ship (1892).")]
LOWEST = -3.4028234663852886e38


class Query(BaseModel):
    """The request of the plain servers; other fields are ignored."""

    queries: list[str]
    topk: int | None = None
    return_scores: bool = False


def contents(row: int) -> str:
    _, title, text = PASSAGES[row]
    return f'"{title}"\n{text}'


def rows_of(query: str) -> list[int]:
    words = set(query.lower().split())
    texts = (f"{title} {text}".lower().replace(".", "").split() for _, title, text in PASSAGES)
    return [row for row, text in enumerate(texts) if words & set(text)]


def dense(query: str, k: int) -> list[dict[str, Any]]:
    """Neighbours that are missing have row -1: the last line of the corpus, with the lowest score."""
    found = [(row, 1.0) for row in rows_of(query)][:k]
    found += [(-1, LOWEST)] * (k - len(found))
    return [{"document": {"id": PASSAGES[row][0], "contents": contents(row)}, "score": score} for row, score in found]


def bm25(query: str, k: int) -> list[dict[str, Any]]:
    """No id, and the title without its quotes; a query that Lucene cannot take raises."""
    if "poison" in query:
        raise RuntimeError("TooManyClauses")
    return [
        {
            "document": {
                "title": PASSAGES[row][1].replace('"', ""),
                "text": PASSAGES[row][2],
                "contents": contents(row),
            },
            "score": 2.5,
        }
        for row in rows_of(query)[:k]
    ]


def rerank_chatr1(query: str, k: int) -> list[dict[str, Any]]:
    """Its own number of passages whatever is asked, titles quoted once more."""
    return [
        {"document": {"contents": f'""{PASSAGES[row][1]}""\n{PASSAGES[row][2]}'}, "score": 0.5}
        for row in rows_of(query)[:3]
    ]


def rerank_search_r1(query: str, k: int) -> list[dict[str, Any]]:
    """A document is a bare string."""
    return [{"document": contents(row), "score": 0.5} for row in rows_of(query)[:3]]


def web(query: str, k: int) -> list[dict[str, Any]]:
    """No scores, and more than topk documents where the engine had an answer box."""
    return [{"document": {"contents": contents(row)}} for row in [*rows_of(query), *range(3)]]


KINDS: dict[str, Callable[[str, int], list[dict[str, Any]]]] = {
    "dense": dense,
    "bm25": bm25,
    "rerank_chatr1": rerank_chatr1,
    "rerank_search_r1": rerank_search_r1,
    "web": web,
}


def published_app(kind: str) -> FastAPI:
    """Build one of the servers. None has a health or info route."""
    app = FastAPI()

    @app.post("/retrieve")
    def retrieve(request: Query) -> dict[str, Any]:
        results = [KINDS[kind](query, request.topk or 3) for query in request.queries]
        if kind in ("dense", "bm25") and not request.return_scores and results:
            return {"result": _without_scores(results)}
        return {"result": results}

    return app


def _without_scores(results: Sequence[list[dict[str, Any]]]) -> list[Any]:
    """The published mistake: a list of results is unpacked as a pair, which works for two queries, and is wrong."""
    first, _scores = [[hit["document"] for hit in hits] for hits in results]
    return first
