"""A search API on a real socket, in the form of each provider, that can be told to misbehave."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from retrieval_server.backends.web.retriever import WebRetriever
from retrieval_server.specs import WebSpec
from retrieval_server.types import Hit, LoadProgress

KEY, CSE_ID = "k3y-Se/cret+123456", "cse-0123456789"
ENVIRONMENT = {
    "SERPER_API_KEY": KEY,
    "SERPAPI_API_KEY": KEY,
    "GOOGLE_API_KEY": KEY,
    "GOOGLE_CSE_ID": CSE_ID,
    "BRAVE_API_KEY": KEY,
    "TAVILY_API_KEY": KEY,
}
PAGED = {"serper": 10, "serpapi": 10, "google": 10, "brave": 20, "tavily": 20}
"""Provider -> results of one request."""


@dataclass
class Received:
    """One request as it arrived."""

    method: str
    path: str
    params: dict[str, str]
    headers: dict[str, str]
    body: Any


Behaviour = Callable[["_Handler"], None]


@dataclass
class FakeApi:
    """The server's state. What ``script`` holds is done first, one behaviour a request; then answers are good."""

    url: str = ""
    total: int = 30
    """Results that every query has."""
    script: deque[Behaviour] = field(default_factory=deque)
    always: Behaviour | None = None
    received: list[Received] = field(default_factory=list)
    answer: Callable[[Received], Any] | None = None
    """Makes the answer in place of the documented form."""
    delay_s: float = 0.0
    stopped: threading.Event = field(default_factory=threading.Event)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    api: FakeApi

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def handle_one_request(self) -> None:
        try:
            super().handle_one_request()
        except OSError:  # the client gave up on us, as it should
            self.close_connection = True

    def _serve(self) -> None:
        parts = urlsplit(self.path)
        raw = self.rfile.read(int(self.headers.get("content-length", 0)))
        headers = {name.lower(): value for name, value in self.headers.items()}
        body = json.loads(raw) if raw else None
        request = Received(self.command, parts.path, dict(parse_qsl(parts.query)), headers, body)
        self.request_received = request
        self.api.received.append(request)
        self.api.stopped.wait(self.api.delay_s)
        behaviour = self.api.script.popleft() if self.api.script else self.api.always
        if behaviour is not None:
            behaviour(self)
        else:
            self.send(200, (self.api.answer or good_answer(self.api))(request))

    do_GET = do_POST = _serve

    def send(self, status: int, answer: Any, kind: str = "application/json", **headers: str) -> None:
        body = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        self.send_response(status)
        for name, value in {"Content-Type": kind, "Content-Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass


class running_api:
    """Context manager: a FakeApi that listens on a free port of the loopback."""

    def __enter__(self) -> FakeApi:
        self.api = FakeApi()
        handler = type("Handler", (_Handler,), {"api": self.api})
        self.server = _Server(("127.0.0.1", 0), handler)
        self.api.url = f"http://127.0.0.1:{self.server.server_port}"
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True)
        self.thread.start()
        return self.api

    def __exit__(self, *error: object) -> None:
        self.api.stopped.set()
        self.server.shutdown()
        self.server.server_close()
        self.thread.join(5)


def entry(query: str, i: int) -> tuple[str, str, str]:
    """(title, url, snippet) of result number i of a query."""
    return f"Title {i} of {query}", f"https://site{i}.example/{query.replace(' ', '_')}", f"Snippet {i} about {query}."


def good_answer(api: FakeApi) -> Callable[[Received], Any]:
    """Answer in the documented form of the API whose path was asked, or 401 in its form for a wrong key."""

    def answer(request: Received) -> Any:
        form = {"/customsearch/v1": _google, "/res/v1/web/search": _brave}.get(request.path)
        if form is None:
            form = _serpapi if request.method == "GET" else _tavily if "query" in request.body else _serper
        return form(request, api.total)

    return answer


def _window(query: str, total: int, start: int, size: int) -> tuple[list[tuple[str, str, str]], bool]:
    return [entry(query, i) for i in range(start, min(total, start + size))], start + size < total


def _objects(rows: list[tuple[str, str, str]], *names: str) -> list[dict[str, str]]:
    return [dict(zip(names, row, strict=True)) for row in rows]


def _serper(request: Received, total: int) -> Any:
    assert request.headers["x-api-key"] == KEY
    body = request.body
    rows, _ = _window(body["q"], total, (body["page"] - 1) * body["num"], body["num"])
    return {"searchParameters": body, "organic": _objects(rows, "title", "link", "snippet"), "credits": 1}


def _serpapi(request: Received, total: int) -> Any:
    params = request.params
    assert params["api_key"] == KEY
    rows, more = _window(params["q"], total, int(params.get("start", 0)), 10)
    links = {"serpapi_pagination": {"next": f"https://serpapi.example/search?api_key={KEY}"}} if more else {}
    parameters = {"search_metadata": {"status": "Success"}, "search_parameters": params}
    return {**parameters, "organic_results": _objects(rows, "title", "link", "snippet"), **links}


def _google(request: Received, total: int) -> Any:
    params = request.params
    assert (request.headers["x-goog-api-key"], params["cx"]) == (KEY, CSE_ID)
    rows, more = _window(params["q"], total, int(params["start"]) - 1, int(params["num"]))
    queries = {"request": [{}], **({"nextPage": [{}]} if more else {})}
    return {"kind": "customsearch#search", "queries": queries, "items": _objects(rows, "title", "link", "snippet")}


def _brave(request: Received, total: int) -> Any:
    params = request.params
    assert request.headers["x-subscription-token"] == KEY
    size = int(params["count"])
    rows, more = _window(params["q"], total, int(params["offset"]) * size, size)
    query = {"original": params["q"], "more_results_available": more}
    return {"type": "search", "query": query, "web": {"results": _objects(rows, "title", "url", "description")}}


def _tavily(request: Received, total: int) -> Any:
    assert request.headers["authorization"] == f"Bearer {KEY}"
    rows, _ = _window(request.body["query"], total, 0, request.body["max_results"])
    return {"query": request.body["query"], "results": _objects(rows, "title", "url", "content"), "response_time": 0.1}


# ---------------------------------------------------------------------------------------------------------------------
# Misbehaviours


def status(code: int, answer: Any = None, **headers: str) -> Behaviour:
    """Answer with a status, a body and headers (``Retry_After="1"``)."""
    return lambda handler: handler.send(code, {} if answer is None else answer, **headers)


def raw(answer: bytes, kind: str = "application/json") -> Behaviour:
    """Answer 200 with these bytes."""
    return lambda handler: handler.send(200, answer, kind)


def hang(handler: _Handler) -> None:
    """Say nothing at all."""
    handler.api.stopped.wait(30)
    handler.close_connection = True


def drip(handler: _Handler) -> None:
    """Send a byte of the headers every 20 ms: no single read takes long."""
    for byte in b"HTTP/1.1 200 OK\r\nX-Slow: " + b"a" * 5000:
        handler.wfile.write(bytes([byte]))
        if handler.api.stopped.wait(0.02):
            break
    handler.close_connection = True


def cut_short(handler: _Handler) -> None:
    """Promise 1000 bytes, send ten, close."""
    handler.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n" + b'{"organic"')
    handler.close_connection = True


def reset(handler: _Handler) -> None:
    """Reset the connection."""
    handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
    handler.connection.close()
    handler.close_connection = True


# ---------------------------------------------------------------------------------------------------------------------
# The backend in front of it


def web_spec(api: FakeApi | None, tmp_path: Path, provider: Any = "serper", **options: Any) -> WebSpec:
    """A spec that is fast and points at the fake."""
    defaults: dict[str, Any] = {"requests_per_second": 1000, "timeout_s": 5, "state_path": tmp_path / "web.sqlite"}
    return WebSpec(provider=provider, **{"base_url": api.url if api else None, **defaults, **options})


def open_web(api: FakeApi, tmp_path: Path, provider: Any = "serper", **options: Any) -> WebRetriever:
    """Load as the server does, with the fake's keys."""
    return WebRetriever.load(web_spec(api, tmp_path, provider, **options), LoadProgress(), ENVIRONMENT)


def ids(hits: list[list[Hit]]) -> list[list[str]]:
    """Ids of the documents per query."""
    return [[hit.document.id for hit in row] for row in hits]


def wait_until(condition: Callable[[], bool], seconds: float = 10) -> None:
    """Wait for another thread."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "condition never held"
        time.sleep(0.005)
