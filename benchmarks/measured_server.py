"""A server under test: its process and children, the processor time and memory they use, when it is ready."""

from __future__ import annotations

import atexit
import os
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")
_READY_TIMEOUT_S = 600.0


@dataclass
class MeasuredServer:
    """A server, ours to start or somebody else's."""

    name: str
    url: str
    pid: int | None
    """None: on another machine, or not told; then processor time and memory are unknown."""
    ready_s: float | None = None
    """From the start of the process to the first time it is ready."""
    ready_cpu_s: float | None = None
    """Processor time it had used by then."""
    process: subprocess.Popen[bytes] | None = None

    def cpu_seconds(self) -> float | None:
        """User and system time of the process and its descendants."""
        return None if self.pid is None else sum(_cpu_seconds(pid) for pid in family(self.pid))

    def memory(self) -> dict[str, float]:
        """Return MB: ``peak`` resident memory, and ``anonymous`` (without mapped files) now."""
        if self.pid is None:
            return {}
        pids = family(self.pid)
        return {"peak": _megabytes(pids, "VmHWM"), "anonymous": _megabytes(pids, "RssAnon")}

    def stop(self) -> None:
        """End a server that was started here."""
        if self.process is not None:
            self.process.terminate()
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start(
    name: str, command: Sequence[str], port: int, log: Path, environment: Mapping[str, str], cwd: Path
) -> MeasuredServer:
    """Start a server and wait until it answers; raises SystemExit with the end of its log when it does not.

    It gets a session of its own, since Linux shares a busy machine out between sessions: a server with forty threads
    has no larger part of it than one with two.
    """
    began = time.monotonic()
    variables = {**os.environ, **environment}
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=output, env=variables, cwd=cwd, start_new_session=True
        )
    server = MeasuredServer(name, f"http://127.0.0.1:{port}/retrieve", process.pid, process=process)
    atexit.register(server.stop)  # also when the other server does not start
    while time.monotonic() < began + _READY_TIMEOUT_S:
        if process.poll() is not None:
            raise SystemExit(
                f"{name} ended with status {process.returncode}:\n{log.read_text(errors='replace')[-2000:]}"
            )
        if _is_ready(port):
            server.ready_s, server.ready_cpu_s = time.monotonic() - began, server.cpu_seconds()
            return server
        time.sleep(0.02)
    server.stop()
    raise SystemExit(f"{name} was not ready after {_READY_TIMEOUT_S:g} s; see {log}")


def _is_ready(port: int) -> bool:
    """Ask ``/readyz``; a server without one is ready when it answers at all."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=5):
            return True
    except urllib.error.HTTPError as error:
        return error.code == 404
    except OSError:
        return False


def family(pid: int) -> list[int]:
    """Return a process and its living descendants."""
    found = [pid]
    for parent in found:
        for task in Path(f"/proc/{parent}/task").glob("*/children"):
            try:
                found += [int(child) for child in task.read_text().split()]
            except OSError:
                continue
    return found


def _cpu_seconds(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return sum(map(int, fields[11:15])) / _TICKS  # user, system, and those of children that have ended


def _megabytes(pids: Sequence[int], key: str) -> float:
    total = 0
    for pid in pids:
        try:
            lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        except OSError:
            continue
        total += sum(int(line.split()[1]) for line in lines if line.startswith(f"{key}:"))
    return total / 1024
