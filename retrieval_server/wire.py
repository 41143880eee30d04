"""The ``/retrieve`` wire format: bytes to a checked request, hits to bytes.

Answers are joined from documents that were encoded once; no response model is walked. Formatting happens here and
nowhere else, so nothing but the bytes depends on ``return_scores``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, FailFast, ValidationError

from retrieval_server.settings import Settings
from retrieval_server.types import Hit

M = TypeVar("M", bound=BaseModel)


class RetrieveRequest(BaseModel):
    """The published request. Unknown fields are ignored, as published clients expect."""

    model_config = ConfigDict(extra="ignore")

    queries: Annotated[list[str], FailFast()]
    """Checked up to the first that is no text: a body of millions of mistakes must not keep the others waiting."""
    topk: int | None = None
    """Documents per query; null and 0 mean the server's default."""
    return_scores: bool = False


@dataclass(frozen=True, slots=True)
class Wanted:
    """A request that passed every check."""

    queries: list[str]
    topk: int
    return_scores: bool


class RequestError(Exception):
    """A request that is answered with an error. ``detail`` becomes the body's ``detail``."""

    def __init__(self, status: int, detail: Any, headers: dict[str, str] | None = None) -> None:
        super().__init__(status, detail)
        self.status = status
        self.detail = detail
        self.headers = headers


def parse_request(body: bytes, settings: Settings) -> Wanted:
    """Check a request body; raises RequestError with 422 (malformed, topk out of range) or 413 (too much at once)."""
    request = validated(RetrieveRequest, body)
    topk = checked_topk("topk", request.topk, settings.topk, settings)
    check_size(len(request.queries), topk, "topk", settings)
    return Wanted(request.queries, topk, request.return_scores)


def validated(model: type[M], body: bytes) -> M:
    """Parse a body; raises RequestError with 422 and the first errors."""
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        errors = error.errors(include_url=False, include_context=False, include_input=False)
        shown: list[Any] = [{**entry, "loc": ["body", *entry["loc"]]} for entry in errors]
        raise RequestError(422, shown) from None


def checked_topk(name: str, asked: int | None, default: int, settings: Settings) -> int:
    """Return how many documents the field ``name`` asks for; raises RequestError with 422 outside of the range."""
    topk = asked or default
    if not 1 <= topk <= settings.max_topk:
        message = f"{name} is {topk}; it must be from 1 to {settings.max_topk} (null or 0: the default {default})"
        raise RequestError(422, [{"type": "topk_range", "loc": ["body", name], "msg": message}])
    return topk


def check_size(n_queries: int, topk: int, name: str, settings: Settings) -> None:
    """Raise RequestError with 413 for too many queries, or documents (field ``name`` per query), for one request."""
    if n_queries > settings.max_queries:
        raise RequestError(413, f"{n_queries} queries in one request; the limit is {settings.max_queries}: split it")
    if n_queries * topk > settings.max_documents:
        raise RequestError(
            413,
            f"{n_queries} queries times {name} {topk} is above {settings.max_documents} documents: split the request",
        )


def encode_response(results: Sequence[Sequence[Hit]], return_scores: bool) -> bytes:
    """Return the published answer: per query its documents, each with its score if asked for."""
    if return_scores:
        lists = [
            b",".join([b'{"document":%b,"score":%a}' % (document.encoded, score) for document, score in hits])
            for hits in results
        ]
    else:
        lists = [b",".join([document.encoded for document, _ in hits]) for hits in results]
    return b'{"result":[%b]}' % b",".join([b"[%b]" % encoded for encoded in lists])
