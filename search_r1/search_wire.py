"""What ``/retrieve`` answers look like, for every known server: bytes in, documents out, or a reason why not."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

from search_r1.whole_text import HALF_A_PAIR, is_whole
from verl.types import Document

_PADDING_SCORE = -3e38
"""FAISS gives missing neighbours the lowest float32 as score; the published server sends the corpus's last passage."""


def encode_request(queries: Sequence[str], topk: int) -> bytes:
    """Return the published request body, UTF-8.

    Scores are always asked for: without them the published servers fail, or for two queries mix the results up.
    """
    return json.dumps({"queries": list(queries), "topk": topk, "return_scores": True}).encode()


def clean_query(query: str) -> str:
    """Return the query as valid Unicode: half a surrogate pair, which no server can read, becomes U+FFFD."""
    if query.isascii():
        return query
    return query.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def parse_answer(body: bytes, n_queries: int, topk: int) -> list[tuple[Document, ...]]:
    """Read the bytes of an answer; raises ValueError that says what is wrong with them."""
    try:
        parsed = json.loads(body)
    except RecursionError:
        raise ValueError("not JSON that can be read (nested too deeply)") from None
    return parse_response(parsed, n_queries, topk)


def parse_response(body: Any, n_queries: int, topk: int) -> list[tuple[Document, ...]]:
    """Read an answer of any known server; raises ValueError that says what is wrong with it.

    At most ``topk`` documents per query; those that only pad the list (FAISS without enough neighbours) are dropped.
    """
    if not isinstance(body, dict) or not isinstance(body.get("result"), list):
        raise ValueError(f"expected an object with a list 'result', got {_shown(body, 120)}")
    result = body["result"]
    if len(result) != n_queries:
        raise ValueError(f"{n_queries} queries but {len(result)} results")
    if not all(isinstance(items, list) for items in result):
        raise ValueError("every result must be a list of documents")
    found = (map(parse_document, items[:topk]) for items in result)
    return [tuple(d for d in documents if d.score is None or d.score > _PADDING_SCORE) for documents in found]


def parse_document(item: Any) -> Document:
    """Read one hit: ``{document, score}``, a document alone, or bare text; raises ValueError."""
    score, document = None, item
    if isinstance(item, dict) and "document" in item:
        document = item["document"]
        score = _score(item.get("score"))
    if isinstance(document, str):
        document = {"contents": document}
    if not isinstance(document, dict):
        raise ValueError(f"a document must be an object or a string, got {_shown(document, 80)}")
    identity = str(document["id"]) if document.get("id") is not None else ""
    if isinstance(document.get("title"), str) and isinstance(document.get("text"), str):
        title, text = document["title"], document["text"]
    elif isinstance(document.get("contents"), str):
        title, text = split_contents(document["contents"])
    else:
        raise ValueError(f"document {identity!r} has no text in 'contents'")
    if not all(map(is_whole, (identity, title, text))):
        raise ValueError(f"document {identity!r} {HALF_A_PAIR}")
    return Document(identity, title, text, score)


def _score(value: Any) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"a score must be a finite number, got {_shown(value, 80)}")
    return float(value)


def split_contents(contents: str) -> tuple[str, str]:
    """Split a passage's ``contents`` into title and text at the first line break; the title loses its quotes.

    Without a line break there is no title: ``split_contents("a b")`` is ``("", "a b")``.
    """
    first, found, rest = contents.partition("\n")
    if not found:
        return "", contents
    title = _unquoted(first.strip())
    while _quoted_again(title):
        title = _unquoted(title)
    return title, rest.strip()


def _unquoted(title: str) -> str:
    return title[1:-1] if len(title) >= 2 and title[0] == title[-1] == '"' else title


def _quoted_again(title: str) -> bool:
    """True for ``"Foo"`` and ``"The "Fram""``, which the published reranking server makes, not for ``"A" and "B"``."""
    inner = _unquoted(title)
    quote = inner.find('"')
    return inner != title and (quote < 1 or inner[quote - 1].isspace())


def corpus_sha256(info: Any) -> str | None:
    """Find the corpus hash in an ``/info`` answer: at the top, or inside its manifest."""
    for holder in (info, info.get("manifest") if isinstance(info, dict) else None):
        corpus = holder.get("corpus") if isinstance(holder, dict) else None
        if isinstance(corpus, dict) and isinstance(corpus.get("sha256"), str):
            return str(corpus["sha256"])
    return None


def request_limits(info: Any) -> dict[str, int]:
    """Return the limits that an ``/info`` answer names (``max_topk``, ``max_queries``, ``max_documents``)."""
    limits = info.get("limits") if isinstance(info, dict) else None
    if not isinstance(limits, dict):
        return {}
    return {name: value for name, value in limits.items() if isinstance(value, int) and value > 0}


def _shown(value: Any, length: int) -> str:
    return repr(str(value)[:length])
