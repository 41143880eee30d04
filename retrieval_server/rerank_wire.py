"""The wire formats that reranking adds, as published: ``/rerank``, and the two topk's of a reranking ``/retrieve``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, FailFast, WithJsonSchema

from retrieval_server.settings import Settings
from retrieval_server.wire import RequestError, RetrieveRequest, check_size, checked_topk, validated


def _unwrapped(document: Any) -> Any:
    """An entry of an answer of ``/retrieve`` may be given as it is: its document counts."""
    return document["document"] if isinstance(document, dict) and "document" in document else document


class _Given(BaseModel):
    """A document to be ordered; its other fields are ignored."""

    model_config = ConfigDict(extra="ignore")

    contents: str


_CONTENTS = {"type": "object", "properties": {"contents": {"type": "string"}}, "required": ["contents"]}
_WRAPPED = {"type": "object", "properties": {"document": _CONTENTS}, "required": ["document"]}
# Written out for the OpenAPI description, where a reference to a definition beside it would lead nowhere.
GivenDocument = Annotated[_Given, BeforeValidator(_unwrapped), WithJsonSchema({"anyOf": [_CONTENTS, _WRAPPED]})]


class RerankRequest(BaseModel):
    """The published request of ``/rerank``. Unknown fields are ignored."""

    model_config = ConfigDict(extra="ignore")

    queries: Annotated[list[str], FailFast()]
    documents: Annotated[list[Annotated[list[GivenDocument], FailFast()]], FailFast()]
    """Per query its documents: ``{"contents"}``, or ``{"document": {"contents"}}``."""
    rerank_topk: int | None = None
    """Documents returned per query; null and 0 mean the server's default."""
    return_scores: bool = False


class CombinedRequest(RetrieveRequest):
    """The published request of ``/retrieve`` to a server that reranks."""

    topk_retrieval: int | None = None
    """Documents taken from the first stage; null and 0 mean the server's ``depth``."""
    topk_rerank: int | None = None
    """Documents returned per query; null and 0 mean ``topk``."""


@dataclass(frozen=True, slots=True)
class RerankWanted:
    """A ``/rerank`` request that passed every check."""

    queries: list[str]
    contents: list[list[str]]
    """Per query those of its documents."""
    topk: int
    return_scores: bool


@dataclass(frozen=True, slots=True)
class CombinedWanted:
    """A reranking ``/retrieve`` request that passed every check."""

    queries: list[str]
    depth: int
    topk: int
    return_scores: bool


def parse_rerank(body: bytes, settings: Settings) -> RerankWanted:
    """Check a body; raises RequestError with 422 (malformed, out of range) or 413 (too much at once)."""
    request = validated(RerankRequest, body)
    topk = checked_topk("rerank_topk", request.rerank_topk, settings.topk, settings)
    if len(request.queries) != len(request.documents):
        message = f"{len(request.documents)} lists of documents for {len(request.queries)} queries; give one per query"
        raise RequestError(422, [{"type": "length_mismatch", "loc": ["body", "documents"], "msg": message}])
    check_size(len(request.queries), 1, "rerank_topk", settings)
    n_documents = sum(map(len, request.documents))
    if n_documents > settings.max_documents:
        raise RequestError(
            413, f"{n_documents} documents in one request; the limit is {settings.max_documents}: split it"
        )
    contents = [[document.contents for document in documents] for documents in request.documents]
    return RerankWanted(request.queries, contents, topk, request.return_scores)


def parse_combined(body: bytes, default_depth: int, settings: Settings) -> CombinedWanted:
    """Check a body; raises RequestError as ``wire.parse_request`` does."""
    request = validated(CombinedRequest, body)
    name = "topk_rerank" if request.topk_rerank else "topk"
    topk = checked_topk(name, request.topk_rerank or request.topk, settings.topk, settings)
    depth = default_depth
    if request.topk_retrieval:
        depth = checked_topk("topk_retrieval", request.topk_retrieval, default_depth, settings)
    check_size(len(request.queries), max(depth, topk), "topk_retrieval" if depth > topk else name, settings)
    return CombinedWanted(request.queries, depth, topk, request.return_scores)


def encode_reranked(ranked: Sequence[Sequence[tuple[str, float]]], return_scores: bool) -> bytes:
    """Return the published answer: per query its passages as they were scored, each with its score if asked for."""
    result: list[list[Any]]
    if return_scores:
        result = [[{"document": text, "score": score} for text, score in order] for order in ranked]
    else:
        result = [[text for text, _ in order] for order in ranked]
    return json.dumps({"result": result}, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()
