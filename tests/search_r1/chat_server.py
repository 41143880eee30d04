"""A local endpoint that speaks OpenAI's chat completions, with faults to order. Counts what it is asked."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Answer = Callable[[dict[str, Any], int], tuple[int, bytes, dict[str, str]]]
"""(request, number of the request from 0) -> status, body, headers."""


def says(text: Any, prompt_tokens: int = 100, reply_tokens: int = 10) -> tuple[int, bytes, dict[str, str]]:
    """Return a completion of one choice."""
    usage = {"prompt_tokens": prompt_tokens, "completion_tokens": reply_tokens}
    body = {"choices": [{"message": {"role": "assistant", "content": text}}], "usage": usage}
    return 200, json.dumps(body).encode(), {}


@dataclass
class ChatServer:
    """What a test sees of the server."""

    url: str
    requests: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    most_at_once: int = 0


@contextmanager
def chat_server(answer: Answer, delay_s: float = 0.0) -> Iterator[ChatServer]:
    """Serve on a free port until the block ends."""
    lock = threading.Lock()
    state = ChatServer("")
    under_way = 0

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            nonlocal under_way
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with lock:
                number = len(state.requests)
                state.requests.append(request)
                state.headers.append(dict(self.headers))
                under_way += 1
                state.most_at_once = max(state.most_at_once, under_way)
            time.sleep(delay_s)
            status, body, headers = (404, b"", {}) if self.path != "/v1/chat/completions" else answer(request, number)
            with lock:
                under_way -= 1
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    state.url = f"http://127.0.0.1:{server.server_address[1]}/v1"
    try:
        yield state
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
