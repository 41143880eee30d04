"""The parent's side of the Lucene process: starts it, asks it, notices its death, starts it again, ends it."""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from retrieval_server.backends import lucene_process
from retrieval_server.errors import RetrievalServerError

logger = logging.getLogger(__name__)

CHILD: tuple[str, ...] = (sys.executable, "-P", str(Path(lucene_process.__file__)))
"""A fresh interpreter: a JVM does not survive a fork, and must not share a process with Ray."""
START_TIMEOUT_S = 120.0
_STDERR_LINES = 200
_STDERR_SHOWN = 3


class LuceneProcessError(RetrievalServerError):
    """The process did not start, died, did not answer in time, or refused. The message has the last of its stderr."""


class _Died(Exception):
    """The process ended, or its connection did."""


class LuceneClient:
    """One child process and the messages to it. One request at a time; callers wait for each other."""

    def __init__(
        self,
        config: Mapping[str, Any],
        timeout_s: float,
        environment: Mapping[str, str],
        command: Sequence[str] = CHILD,
        start_timeout_s: float = START_TIMEOUT_S,
    ) -> None:
        """``config`` is the first message; ``environment`` is added to this process's. Nothing starts yet."""
        self._config, self._timeout_s, self._start_timeout_s = dict(config), timeout_s, start_timeout_s
        self._environment, self._command = dict(environment), tuple(command)
        self._lock = threading.Lock()
        self._child: _Child | None = None
        self._closed = False
        self.restarts = 0
        self.rss_mb = 0
        """Resident memory of the process after its last answer."""

    def start(self) -> dict[str, Any]:
        """Start the process and return its description of the index; raises LuceneProcessError."""
        with self._lock:
            return self._start()

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Return the answer to a request.

        A process that dies on it is started again, and asked once more; one that is silent for ``timeout_s`` is
        killed, and started again by the next request. Raises LuceneProcessError.
        """
        with self._lock:
            if self._closed:
                raise LuceneProcessError("the lucene process was closed")
            try:
                return self._exchange(request)
            except _Died as first:
                logger.warning("%s; starting it again", first)
            self._restart()
            try:
                return self._exchange(request)
            except _Died as second:
                raise LuceneProcessError(f"{second}, twice on the same {len(request['queries'])} queries") from None

    def close(self) -> None:
        """End the process."""
        with self._lock:
            self._closed = True
            self._drop()

    def _start(self) -> dict[str, Any]:
        child = self._child = _Child(self._command, {**os.environ, **self._environment})
        try:
            description = child.exchange(self._config, self._start_timeout_s)
        except _Died as error:
            self._drop()
            raise LuceneProcessError(f"{error} while starting") from None
        except TimeoutError:
            self._drop()
            raise LuceneProcessError(
                f"the lucene process did not open the index within {self._start_timeout_s:.0f} s{child.last_words()}"
            ) from None
        if "error" in description:
            self._drop()
            reason = description["error"]
            raise LuceneProcessError(f"lucene cannot open {self._config['index']}: {reason}{_hint(reason)}")
        self.rss_mb = description["rss_mb"]
        return description

    def _restart(self) -> None:
        self._drop()
        self.restarts += 1
        self._start()

    def _exchange(self, request: Mapping[str, Any]) -> dict[str, Any]:
        if self._child is None:
            self._restart()
        assert self._child is not None
        try:
            answer = self._child.exchange(request, self._timeout_s)
        except TimeoutError:
            words = self._child.last_words()
            self._drop()
            raise LuceneProcessError(
                f"the lucene process did not answer {len(request['queries'])} queries within {self._timeout_s:g} s and "
                f"was killed; raise timeout_s or send smaller batches{words}"
            ) from None
        if "error" in answer:
            raise LuceneProcessError(f"lucene: {answer['error']}")
        self.rss_mb = answer["rss_mb"]
        return answer

    def _drop(self) -> None:
        if self._child is not None:
            self._child.end()
            self._child = None


def _hint(reason: str) -> str:
    """Return the remedy where an index and the Lucene in the jar are of versions that do not go together."""
    if "Could not load codec" in reason or "IndexFormatTooNew" in reason:
        return "; a newer Lucene wrote it than is in the jar: give a newer Anserini jar"
    if "IndexFormatTooOld" in reason:
        return "; the Lucene in the jar is too new for it: give an older Anserini jar, or build the index again"
    return ""


class _Child:
    """A running process, its socket, and the thread that started it and keeps its last lines of stderr."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self._lines: deque[str] = deque(maxlen=_STDERR_LINES)
        self._connection, theirs = socket.socketpair()
        self._started = threading.Event()
        self._process: subprocess.Popen[str] | None = None
        self._error: OSError | None = None
        # The kernel kills the child when the *thread* that started it ends (see _die_with_parent there), so that is
        # this one, which lives as long as the child does, and not the caller's, which may end once all is loaded.
        self._keeper = threading.Thread(
            target=self._keep, args=(command, environment, theirs), name="lucene-keeper", daemon=True
        )
        self._keeper.start()
        self._started.wait()
        theirs.close()
        if self._error is not None:
            self._connection.close()
            raise LuceneProcessError(f"the lucene process cannot be started: {self._error}")

    def _keep(self, command: Sequence[str], environment: Mapping[str, str], theirs: socket.socket) -> None:
        arguments = [*command, str(theirs.fileno()), str(os.getpid())]
        try:
            self._process = process = subprocess.Popen(
                arguments,
                env=dict(environment),
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                start_new_session=True,  # a Ctrl-C in the terminal is for the server, which stops this one itself
            )
        except OSError as error:
            self._error = error
            return
        finally:
            self._started.set()
        with process:
            self._read_lines(process.stderr)

    def _read_lines(self, stderr: IO[str] | None) -> None:
        for line in stderr or ():
            self._lines.append(line.rstrip())
            logger.debug("lucene: %s", line.rstrip())

    def exchange(self, message: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        """Send and receive; raises TimeoutError, or _Died that says how."""
        self._connection.settimeout(timeout_s)
        try:
            lucene_process.send(self._connection, dict(message))
            return lucene_process.receive(self._connection)
        except TimeoutError:
            raise
        except (EOFError, OSError) as error:
            raise _Died(self._how_it_ended(error)) from None

    def _how_it_ended(self, error: Exception) -> str:
        self._keeper.join(5)
        code = None if self._process is None else self._process.poll()
        if code is None:
            return f"the connection to the lucene process failed ({error}){self.last_words()}"
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
        if any("OutOfMemoryError" in line for line in self._lines):
            how += " because its heap was full; raise heap_mb"
        return f"the lucene process {how}{self.last_words()}"

    def last_words(self) -> str:
        """Return the end of what the process wrote to stderr, as a suffix of a message."""
        lines = [line for line in list(self._lines) if line.strip() and not line.startswith("WARNING: ")]
        return f" (its last words: {' / '.join(lines[-_STDERR_SHOWN:])})" if lines else ""

    def end(self) -> None:
        """Kill the process, if it still runs, and wait until it is gone."""
        self._connection.close()
        if self._process is not None:
            self._process.kill()
        self._keeper.join(10)
