"""The retrieval service as a child process of a job: its address, its start until it is ready, its end."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlsplit

from verl.errors import ConfigError, ResourceError, RetrievalError

LOOPBACK = ("127.0.0.1", "localhost", "::1")
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None


def child(command: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
    """Start a child that is told to end when this process dies, even by SIGKILL, so that no port stays taken."""

    def tie_to_parent() -> None:
        if _LIBC is not None:
            _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)

    return subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=tie_to_parent, **options)


@dataclass
class Url:
    """The address that the trainer will use."""

    host: str
    port: int
    path: str
    scheme: str
    explicit: bool
    """The user chose it, so another port is no choice of ours."""

    @property
    def is_local(self) -> bool:
        """True when this machine can serve it."""
        return self.host in LOOPBACK

    @property
    def text(self) -> str:
        """The whole address."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}{self.path}"

    def beside(self, path: str) -> str:
        """The address of another route of the same service."""
        return self.text.removesuffix(self.path) + path

    def reserve(self) -> None:
        """Make sure that the port is free; take another unless the user named it. Raises ResourceError."""
        if _free(self.host, self.port):
            return
        if self.explicit:
            raise ResourceError(
                f"retriever.url = {self.text}: port {self.port} is taken by another program. Name a free port, stop "
                "that program, or set job.serve_retrieval=false to use the service that listens there"
            )
        self.port = _any_free_port(self.host)


def choose_url(text: str, explicit: bool) -> Url:
    """Read ``retriever.url``; raises ConfigError when it is no address of a /retrieve route."""
    parts = urlsplit(text)
    try:
        port = parts.port or (443 if parts.scheme == "https" else 80)
    except ValueError:
        port = 0
    if parts.scheme not in ("http", "https") or not parts.hostname or not port or not parts.path.strip("/"):
        raise ConfigError(f"retriever.url = {text!r}: write http://HOST:PORT/retrieve")
    return Url(parts.hostname, port, parts.path, parts.scheme, explicit)


def _free(host: str, port: int) -> bool:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
        return True


def _any_free_port(host: str) -> int:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port


class PortTakenError(RetrievalError):
    """Another program took the port between its choice and the service's start."""


class RetrievalService:
    """The service process of a job."""

    def __init__(self, url: Url, index: Path, corpus: Path, topk: int, *, log: Path, env: Mapping[str, str]) -> None:
        self.url = url
        self.log = log
        self._env = dict(env)
        self._command = [
            sys.executable, "-m", "retrieval_server", "--index_path", str(index), "--corpus_path", str(corpus),
            "--topk", str(topk), "--host", url.host, "--port", str(url.port),
        ]  # fmt: skip
        self._process: subprocess.Popen[bytes] | None = None
        self._output: IO[bytes] | None = None

    def start(self, timeout_s: float) -> None:
        """Start it and wait until it answers that it is ready; raises RetrievalError with its own words."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self._output = self.log.open("wb")
        # Its own session: Ctrl-C ends the trainer first, which still needs it.
        self._process = child(
            self._command, env=self._env, stdout=self._output, stderr=subprocess.STDOUT, start_new_session=True
        )
        deadline, state = time.monotonic() + timeout_s, "no answer yet"
        while time.monotonic() < deadline:
            if (reason := self.death()) is not None:
                taken = f"port {self.url.port}" in reason and "is taken" in reason
                raise (PortTakenError if taken else RetrievalError)(f"the retrieval service did not start: {reason}")
            ready, state = self._readiness()
            if ready:
                return
            time.sleep(0.1)
        raise RetrievalError(
            f"the retrieval service at {self.url.text} was not ready after {timeout_s:.0f} s ({state}); its log is "
            f"{self.log}; retriever.start_timeout_s is the limit"
        )

    def _readiness(self) -> tuple[bool, str]:
        try:
            with urllib.request.urlopen(self.url.beside("/readyz"), timeout=5.0) as answer:
                return answer.status == 200, "ready"
        except urllib.error.HTTPError as error:
            with error:
                body = error.read(1000).decode("utf-8", "replace")
            try:
                return False, json.dumps(json.loads(body))
            except json.JSONDecodeError:
                return False, f"status {error.code}"
        except OSError as error:
            return False, str(error)

    def death(self) -> str | None:
        """Return why the process has ended (status and last lines of its log), or None while it runs."""
        if self._process is None or self._process.poll() is None:
            return None
        lines = self.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-8:]
        return "\n".join([f"status {self._process.returncode}, log {self.log}", *lines])

    def stop(self) -> None:
        """Ask it to end, and end it when it does not."""
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(timeout=20.0)
            except subprocess.TimeoutExpired:
                os.kill(self._process.pid, signal.SIGKILL)
                self._process.wait()
        if self._output is not None:
            self._output.close()
