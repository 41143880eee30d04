"""What ``/openapi.json`` says: requests and every answer as they are, so that clients and fuzzers can rely on it."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI

from retrieval_server.settings import Settings
from retrieval_server.wire import RetrieveRequest

Json = dict[str, Any]

_TEXT: Json = {"type": "string"}
_DOCUMENT: Json = {
    "type": "object",
    "properties": dict.fromkeys(("id", "contents", "title", "text"), _TEXT),
    "required": ["id", "contents", "title", "text"],
    "additionalProperties": False,
}
_HIT: Json = {
    "type": "object",
    "properties": {"document": _DOCUMENT, "score": {"type": "number"}},
    "required": ["document", "score"],
    "additionalProperties": False,
}
_RESULT: Json = {
    "type": "object",
    "properties": {
        "result": {
            "description": "Per query, in order: its documents, the best first; with their scores if return_scores.",
            "type": "array",
            "items": {
                "anyOf": [{"type": "array", "items": _DOCUMENT}, {"type": "array", "items": _HIT}],
            },
        }
    },
    "required": ["result"],
    "additionalProperties": False,
}
_PROBLEM: Json = {"type": "object", "properties": {"detail": _TEXT}, "required": ["detail"]}
_PROBLEMS: Json = {
    "type": "object",
    "properties": {
        "detail": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {
                    "type": _TEXT,
                    "loc": {"type": "array", "items": {"type": ["string", "integer"]}},
                    "msg": _TEXT,
                },
                "required": ["type", "loc", "msg"],
            },
        }
    },
    "required": ["detail"],
}
_REQUEST_ID: Json = {"X-Request-ID": {"description": "The client's, or a new one", "schema": _TEXT}}
_READINESS: Json = {
    "type": "object",
    "properties": {
        "status": {"enum": ["loading", "ready", "failed"]},
        "phase": _TEXT,
        "progress": {"type": "number", "minimum": 0, "maximum": 1},
        "error": _TEXT,
    },
    "required": ["status", "phase", "progress"],
}


def _answer(description: str, schema: Json, media_type: str = "application/json", **headers: Json) -> Json:
    content = {media_type: {"schema": schema}}
    return {"description": description, "headers": {**_REQUEST_ID, **headers}, "content": content}


_RETRY: Json = {"Retry-After": {"description": "Seconds", "schema": {"type": "integer"}}}
_UNAUTHORIZED = {"401": _answer("The key is missing or wrong", _PROBLEM)}
_NOT_READY = {"503": _answer("Not loaded, or the backend cannot answer now", _PROBLEM, **_RETRY)}


class DescribedApi(FastAPI):
    """FastAPI with the descriptions of this module in place of what it would guess."""

    settings: Settings

    def openapi(self) -> Json:
        """Return the description; made once."""
        if self.openapi_schema is None:
            schema = super().openapi()
            paths = schema["paths"]
            paths.update(_paths(self.settings))
            if "/rerank" in paths:
                paths["/rerank"]["post"]["responses"] = _rerank_answers(self.settings)
            if self.settings.api_key_env:
                _add_key(schema)
        description: Json = self.openapi_schema or {}
        return description


def _add_key(schema: Json) -> None:
    schema.setdefault("components", {})["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    for path, operations in schema["paths"].items():
        for operation in operations.values():
            operation["security"] = [] if path == "/healthz" else [{"key": []}]
            if path != "/healthz":
                operation["responses"].update(_UNAUTHORIZED)


def _paths(settings: Settings) -> Json:
    metrics = _answer("Prometheus text", _TEXT, "text/plain; version=0.0.4; charset=utf-8")
    state = {"type": "object", "properties": {"status": {"const": "ok"}}, "required": ["status"]}
    return {
        "/retrieve": {"post": _retrieve(settings)},
        "/healthz": _get("The process serves requests", {"200": _answer("It does", state)}),
        "/readyz": _get(
            "Whether queries are answered",
            {"200": _answer("They are", _READINESS), "503": _answer("Not yet, or never", _READINESS, **_RETRY)},
        ),
        "/info": _get(
            "What is served, and the limits of a request",
            {"200": _answer("Backend, corpus, manifest, limits", {"type": "object"}), **_NOT_READY},
        ),
        "/metrics": _get("Metrics", {"200": metrics}),
    }


def _get(summary: str, responses: Json) -> Json:
    return {"get": {"summary": summary, "operationId": summary.replace(" ", "_").lower(), "responses": responses}}


def _rerank_answers(settings: Settings) -> Json:
    ranked = {
        "anyOf": [
            {"type": "array", "items": _TEXT},
            {
                "type": "array",
                "items": {
                    "type": "object",
                    "properties": {"document": _TEXT, "score": {"type": "number"}},
                    "required": ["document", "score"],
                },
            },
        ]
    }
    result = {"type": "object", "properties": {"result": {"type": "array", "items": ranked}}, "required": ["result"]}
    return {
        "200": _answer("Per query its own documents, the best first", result),
        "404": _answer("The backend is not a cross-encoder", _PROBLEM),
        **_refusals(settings),
    }


def _refusals(settings: Settings) -> Json:
    """Return the answers to requests that are not served, the same for both POST routes."""
    limits = f"{settings.max_queries} queries, {settings.max_documents} documents, {settings.max_body_bytes} bytes"
    return {
        "408": _answer(f"The body did not arrive within {settings.body_timeout_s:g} s", _PROBLEM),
        "413": _answer(f"Too much at once: {limits}", _PROBLEM),
        "422": _answer("Not a request", _PROBLEMS),
        "429": _answer(f"{settings.max_queue} queries are waiting", _PROBLEM, **_RETRY),
        "500": _answer("The backend failed", _PROBLEM),
        **_NOT_READY,
    }


def _retrieve(settings: Settings) -> Json:
    request = RetrieveRequest.model_json_schema()
    fields = request["properties"]
    fields["queries"]["maxItems"] = settings.max_queries
    fields["topk"] = {
        "description": f"Documents per query; null, 0 and absence mean {settings.topk}. A number as text is understood",
        "anyOf": [{"type": "integer", "minimum": 0, "maximum": settings.max_topk}, {"type": "null"}],
        "default": None,
    }
    return {
        "summary": "The best documents of each query, in the queries' order",
        "operationId": "retrieve",
        "requestBody": {"required": True, "content": {"application/json": {"schema": request}}},
        "responses": {
            "200": _answer("A list per query", _RESULT),
            "404": _answer("The backend has no first stage: it only reranks", _PROBLEM),
            **_refusals(settings),
        },
    }
