"""A hub on a local port that speaks the part of the protocol that downloads and uploads use.

Repositories are folders in memory. It can cut a transfer off in the middle and serve damaged bytes, and it keeps a
record of what was asked.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"
LARGE = 64
"""Files of at least so many bytes are kept as LFS objects, which have a sha256."""


@dataclass
class FakeHub:
    """What the hub holds and what befalls it."""

    repos: dict[str, dict[str, bytes]] = field(default_factory=dict)
    """``datasets/owner/name`` (or ``models/...``) -> path -> content."""
    cut_after: dict[str, int] = field(default_factory=dict)
    """Path -> bytes after which its next transfer is cut off, once."""
    stall_after: dict[str, int] = field(default_factory=dict)
    """Path -> bytes after which its next transfer stands still until ``go_on`` is set, once."""
    stalled: threading.Event = field(default_factory=threading.Event)
    go_on: threading.Event = field(default_factory=threading.Event)
    damaged: set[str] = field(default_factory=set)
    """Paths that are served with a wrong last byte."""
    asked: list[tuple[str, str, str]] = field(default_factory=list)
    """(method, path, range header) of every request."""
    objects: dict[str, bytes] = field(default_factory=dict)
    """Uploaded LFS objects by sha256."""
    url: str = ""

    def downloads(self, path: str) -> list[str]:
        """Return the range headers with which a file was asked for."""
        return [ranges for method, asked, ranges in self.asked if method == "GET" and asked.endswith(f"/{path}")]


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _blob(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\x00" % len(data) + data).hexdigest()


def _entry(path: str, data: bytes) -> dict[str, Any]:
    entry = {"type": "file", "path": path, "size": len(data), "oid": _blob(data)}
    if len(data) >= LARGE:
        entry["lfs"] = {"oid": _sha256(data), "size": len(data), "pointerSize": 120}
    return entry


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: FakeHub

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer()

    def do_PUT(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.asked.append((self.command, path, self.headers.get("Range", "")))
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        for pattern, route in self._ROUTES:
            if match := re.fullmatch(pattern, path):
                route(self, *match.groups(), body)
                return
        self._json({"error": f"no route {path}"}, 404)

    def _json(self, value: Any, status: int = 200, **headers: str) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        for name, text in {"Content-Type": "application/json", **headers}.items():
            self.send_header(name.replace("_", "-"), text)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def _files(self, repo: str) -> dict[str, bytes] | None:
        files = self.hub.repos.get(repo)
        if files is None:
            self._json({"error": "Repository not found"}, 404, X_Error_Code="RepoNotFound")
        return files

    # -- reading ------------------------------------------------------------------------------------------------

    def _info(self, kind: str, repo: str, _revision: str | None, _body: bytes) -> None:
        files = self._files(f"{kind}/{repo}")
        if files is not None:
            siblings = [{"rfilename": path} for path in sorted(files)]
            self._json({"id": repo, "sha": COMMIT, "siblings": siblings, "private": False, "tags": []})

    def _tree(self, kind: str, repo: str, _revision: str, _body: bytes) -> None:
        files = self._files(f"{kind}/{repo}")
        if files is not None:
            self._json([_entry(path, files[path]) for path in sorted(files)])

    def _resolve(self, kind: str | None, repo: str, _revision: str, path: str, _body: bytes) -> None:
        files = self._files(f"{(kind or 'models/').rstrip('/')}/{repo}")
        if files is None:
            return
        if path not in files:
            self._json({"error": "Entry not found"}, 404, X_Error_Code="EntryNotFound")
            return
        data = files[path]
        large = len(data) >= LARGE
        etag = _sha256(data) if large else _blob(data)
        sent = data[:-1] + bytes([data[-1] ^ 1]) if path in self.hub.damaged else data
        first = int(re.sub(r"\D.*", "", self.headers.get("Range", "bytes=0-").removeprefix("bytes=")) or 0)
        self.send_response(206 if self.headers.get("Range") else 200)
        self.send_header("ETag", f'"{etag}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("Accept-Ranges", "bytes")
        if large:
            self.send_header("X-Linked-ETag", f'"{etag}"')
            self.send_header("X-Linked-Size", str(len(data)))
        if self.headers.get("Range"):
            self.send_header("Content-Range", f"bytes {first}-{len(data) - 1}/{len(data)}")
        self.send_header("Content-Length", str(len(data) - first))
        self.end_headers()
        if self.command == "HEAD":
            return
        stall = self.hub.stall_after.pop(path, None)
        if stall is not None:
            self.wfile.write(sent[:stall])
            self.wfile.flush()
            self.hub.stalled.set()
            self.hub.go_on.wait(60)
            self.close_connection = True
            return
        cut = self.hub.cut_after.pop(path, None)
        if cut is not None:
            self.wfile.write(sent[first : first + cut])
            self.wfile.flush()
            self.close_connection = True
            self.connection.close()
            return
        self.wfile.write(sent[first:])

    # -- writing ------------------------------------------------------------------------------------------------

    def _create(self, body: bytes) -> None:
        wanted = json.loads(body)
        repo = f"{wanted.get('organization') or 'someone'}/{wanted['name']}"
        key = f"{wanted.get('type', 'model')}s/{repo}"
        if key in self.hub.repos:
            self._json({"error": "You already created this repo", "url": f"{self.hub.url}/{key}"}, 409)
            return
        self.hub.repos[key] = {}
        self._json({"url": f"{self.hub.url}/{key}", "name": repo})

    def _who(self, _body: bytes) -> None:
        self._json({"type": "user", "name": "someone", "auth": {"type": "access_token"}})

    def _yaml(self, _body: bytes) -> None:
        self._json({"errors": [], "warnings": []})

    def _preupload(self, _kind: str, _repo: str, _revision: str, body: bytes) -> None:
        files = json.loads(body)["files"]
        modes = [{"path": f["path"], "uploadMode": "lfs" if f["size"] >= LARGE else "regular"} for f in files]
        self._json({"files": [{**mode, "shouldIgnore": False, "oid": None} for mode in modes]})

    def _batch(self, _repo: str, body: bytes) -> None:
        wanted = json.loads(body)["objects"]
        objects = []
        for item in wanted:
            known = item["oid"] in self.hub.objects
            actions = {} if known else {"upload": {"href": f"{self.hub.url}/lfs/{item['oid']}", "header": {}}}
            objects.append({"oid": item["oid"], "size": item["size"], **({"actions": actions} if actions else {})})
        self._json({"transfer": "basic", "objects": objects})

    def _store(self, oid: str, body: bytes) -> None:
        assert _sha256(body) == oid
        self.hub.objects[oid] = body
        self._json({})

    def _commit(self, kind: str, repo: str, _revision: str, body: bytes) -> None:
        files = self._files(f"{kind}/{repo}")
        if files is None:
            return
        for line in body.decode().splitlines():
            item = json.loads(line)
            value = item["value"]
            if item["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif item["key"] == "lfsFile":
                files[value["path"]] = self.hub.objects[value["oid"]]
        self._json({"success": True, "commitUrl": f"{self.hub.url}/{kind}/{repo}/commit/{COMMIT}", "commitOid": COMMIT})

    _REPO = r"([\w.-]+/[\w.-]+)"
    _ROUTES = (
        (rf"/api/(datasets|models)/{_REPO}(?:/revision/([^/]+))?", _info),
        (rf"/api/(datasets|models)/{_REPO}/tree/([^/]+)", _tree),
        (rf"/(datasets/)?{_REPO}/resolve/([^/]+)/(.+)", _resolve),
        (r"/api/repos/create", _create),
        (r"/api/whoami-v2", _who),
        (r"/api/validate-yaml", _yaml),
        (rf"/api/(datasets|models)/{_REPO}/preupload/([^/]+)", _preupload),
        (rf"/((?:datasets/)?{_REPO[1:-1]})\.git/info/lfs/objects/batch", _batch),
        (r"/lfs/(\w+)", _store),
        (rf"/api/(datasets|models)/{_REPO}/commit/([^/]+)", _commit),
    )


@contextmanager
def serve(hub: FakeHub) -> Iterator[FakeHub]:
    """Serve until the block ends; ``hub.url`` is then its address."""
    handler = type("Handler", (_Handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
