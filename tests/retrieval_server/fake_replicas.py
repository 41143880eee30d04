"""Servers of the wire format that misbehave on demand, over real sockets, in a thread of their own."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

Answer = tuple[int, bytes]


class FakeReplica:
    """Answers query q with the documents q-0, q-1 ... as our server does, or as ``behaviour`` says.

    ``behaviour`` is "good", "hang", "reset" (the connection breaks after the request), or (status, body).
    """

    def __init__(self, corpus: str = "abc", published: bool = False, limits: dict[str, int] | None = None) -> None:
        self.info: dict[str, Any] = {
            "retriever": "bm25", "passages": 50, "corpus": {"file": "c.jsonl", "passages": 50, "sha256": corpus},
            "limits": limits or {}, "manifest": {"kind": "bm25"},
        }  # fmt: skip
        self.published = published
        self.behaviour: str | Answer = "good"
        self.health: Answer = (200, b'{"status": "ready"}')
        self.delay_s = 0.0
        self.requests: list[dict[str, Any]] = []
        """Bodies of ``/retrieve``."""
        self.keys: set[str | None] = set()
        """Values of the Authorization header."""
        self.port = 0
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.StreamWriter] = set()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def queries(self) -> list[str]:
        """All queries asked, without the empty requests of health checks."""
        return [query for request in self.requests for query in request["queries"]]

    async def start(self) -> None:
        """Listen, on the port it had before if it had one."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def kill(self) -> None:
        """End as a killed process does: nothing listens, and every connection is reset."""
        assert self._server is not None
        self._server.close()
        for writer in self._connections:
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections.add(writer)
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                headers = dict(line.split(": ", 1) for line in head.split("\r\n")[1:] if line)
                named = {name.lower(): value for name, value in headers.items()}
                body = await reader.readexactly(int(named.get("content-length", 0)))
                self.keys.add(named.get("authorization"))
                answer = await self._answer(head.split(" ")[1], body)
                if answer is None:
                    writer.transport.abort()
                    return
                status, content = answer
                writer.write(b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n%b" % (status, len(content), content))
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self._connections.discard(writer)
            writer.close()

    async def _answer(self, path: str, body: bytes) -> Answer | None:
        if path == "/readyz":
            return (404, b'{"detail": "Not Found"}') if self.published else self.health
        if path == "/info":
            return (404, b"") if self.published else (200, json.dumps(self.info).encode())
        request = json.loads(body)
        self.requests.append(request)
        if not request["queries"]:
            return 200, b'{"result": []}'
        await asyncio.sleep(self.delay_s)
        if self.behaviour == "hang":
            await asyncio.sleep(60)
        if self.behaviour == "reset":
            return None
        return (200, good_answer(request)) if isinstance(self.behaviour, str) else self.behaviour


def good_answer(request: dict[str, Any]) -> bytes:
    """The answer of a server that is well."""
    result = [
        [{"document": {"id": f"{query}-{rank}", "contents": f'"T"\n{query}'}, "score": 9.0 - rank} for rank in range(k)]
        for k in [request["topk"]]
        for query in request["queries"]
    ]
    return json.dumps({"result": result}).encode()


class Cluster:
    """Replicas that are running, and the loop they run in."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.replicas: list[FakeReplica] = []

    def do(self, work: Coroutine[Any, Any, Any]) -> None:
        """Run a coroutine in the replicas' loop."""
        asyncio.run_coroutine_threadsafe(work, self._loop).result(10)

    def add(self, **options: Any) -> FakeReplica:
        """Start another replica."""
        replica = FakeReplica(**options)
        self.do(replica.start())
        self.replicas.append(replica)
        return replica


@contextmanager
def running_cluster() -> Iterator[Cluster]:
    """An empty cluster; its replicas are killed at the end."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    cluster = Cluster(loop)
    try:
        yield cluster
    finally:
        for replica in cluster.replicas:
            cluster.do(replica.kill())
        cluster.do(_cancel_others())
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()


async def _cancel_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


def wait_for(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    """Wait until something is so; fails when it does not become so."""
    pause = threading.Event()
    for _ in range(int(seconds / 0.01)):
        if condition():
            return
        pause.wait(0.01)
    raise AssertionError("it did not happen")
