"""What other servers of the ``/retrieve`` wire format answer, read carefully: ours, and the published ones as they are.

The published servers differ: a document may lack its id, be a bare string, come without a score; a dense one fills up
with its last passage, at the lowest number there is, when a request asks for more than it has.
"""

from __future__ import annotations

import hashlib
import json
import math
from typing import Any

from retrieval_server.corpus import split_contents
from retrieval_server.types import Document, Hit

_PADDING_SCORE = -3e38
"""FAISS gives -3.4e38 to a place for which it found nothing."""


class WrongShapeError(Exception):
    """An answer with status 200 that is not in the wire format."""


def encode_request(queries: list[str], k: int, published: bool) -> bytes:
    """Return the request's body; for a published server also with the name that its reranking variant reads."""
    request: dict[str, Any] = {"queries": queries, "topk": k, "return_scores": True}
    if published:
        request["topk_rerank"] = k
    return json.dumps(request).encode()


def decode_answer(body: bytes, n_queries: int, k: int) -> list[list[Hit]]:
    """Return the hits of each query [Q], at most k each; raises WrongShapeError saying what is wrong."""
    try:
        answer = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise WrongShapeError(f"not JSON ({error})") from None
    result = answer.get("result") if isinstance(answer, dict) else None
    if not isinstance(result, list):
        raise WrongShapeError(f"no list of results in {body[:80]!r}")
    if len(result) != n_queries:
        raise WrongShapeError(f"{len(result)} results for {n_queries} queries")
    return [_hits(entries, k) for entries in result]


def _hits(entries: Any, k: int) -> list[Hit]:
    if not isinstance(entries, list):
        raise WrongShapeError(f"a result is a {type(entries).__name__}, not a list")
    hits = [_hit(entry, rank) for rank, entry in enumerate(entries, start=1)]
    return [hit for hit in hits if hit.score > _PADDING_SCORE][:k]


def _hit(entry: Any, rank: int) -> Hit:
    """Read one entry; without a score it has 1 / rank, which keeps the order."""
    if not isinstance(entry, dict) or "document" not in entry:
        raise WrongShapeError(f"a hit is {str(entry)[:60]!r}, not an object with a document")
    score = entry.get("score", 1.0 / rank)
    if isinstance(score, bool) or not isinstance(score, int | float) or not math.isfinite(score):
        raise WrongShapeError(f"a score is {score!r}")
    document = entry["document"]
    return Hit(_document({"contents": document} if isinstance(document, str) else document), float(score))


def _document(fields: Any) -> Document:
    contents = fields.get("contents") if isinstance(fields, dict) else None
    if not isinstance(contents, str):
        raise WrongShapeError(f"a document is {str(fields)[:60]!r}, without contents")
    title, text = split_contents(contents)
    identifier = fields.get("id")
    try:
        if identifier is None:  # the published BM25 and web servers: the same contents are the same document
            identifier = f"sha256:{hashlib.sha256(contents.encode()).hexdigest()[:16]}"
        return Document.of(str(identifier), contents, _text(fields, "title", title), _text(fields, "text", text))
    except UnicodeEncodeError:
        raise WrongShapeError("a document is not valid Unicode") from None


def _text(fields: dict[str, Any], name: str, otherwise: str) -> str:
    value = fields.get(name)
    return value if isinstance(value, str) else otherwise
