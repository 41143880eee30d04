"""The process that holds the JVM: opens one Lucene index and answers searches over a socket until it is closed.

Run as a file, ``python -P lucene_process.py DESCRIPTOR``, by ``lucene_client``. It imports nothing of this project and
nothing outside the standard library but pyjnius, so it starts fast and is small.

A message in either direction is four bytes of length, big-endian, and that many bytes of JSON. The first from the
parent is the configuration, answered with ``{"documents", "stored", ...}``; every later one is ``{"queries", "k"}``,
answered with ``{"hits": [Q][k][docid, score, text or null]}``. An answer ``{"error"}`` concerns that message alone.
"""

from __future__ import annotations

import ctypes
import json
import os
import queue
import resource
import signal
import socket
import struct
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

MAX_QUERY_TERMS = 1024
"""Distinct terms of a query; Lucene refuses more (TooManyClauses). The last ones count: the question stands there."""
MAX_MESSAGE_BYTES = 1 << 30
_LENGTH = struct.Struct(">I")
_PR_SET_PDEATHSIG = 1


def send(connection: socket.socket, message: dict[str, Any]) -> None:
    """Send one message. Lone surrogates survive as JSON escapes; raises OSError when the other side is gone."""
    payload = json.dumps(message).encode("ascii")
    if len(payload) > MAX_MESSAGE_BYTES:
        raise ValueError(f"a message of {len(payload)} bytes; at most {MAX_MESSAGE_BYTES} are sent")
    connection.sendall(_LENGTH.pack(len(payload)) + payload)


def receive(connection: socket.socket) -> dict[str, Any]:
    """Return the next message; raises EOFError when the other side is gone, ValueError for what is not a message."""
    (length,) = _LENGTH.unpack(_receive_exactly(connection, _LENGTH.size))
    if length > MAX_MESSAGE_BYTES:
        raise ValueError(f"a message of {length} bytes was announced; at most {MAX_MESSAGE_BYTES} are read")
    message = json.loads(_receive_exactly(connection, length))
    if not isinstance(message, dict):
        raise ValueError(f"a message is a JSON {type(message).__name__}, not an object")
    return message


def _receive_exactly(connection: socket.socket, length: int) -> bytes:
    buffer = bytearray(length)
    view = memoryview(buffer)
    while view:
        n = connection.recv_into(view)
        if n == 0:
            raise EOFError(f"the connection ended with {len(view)} of {length} bytes to come")
        view = view[n:]
    return bytes(buffer)


def clean(query: str) -> str:
    """Return the query as a Java string can hold it: surrogate pairs joined, lone halves and NUL made spaces."""
    if query.isascii():
        return query.replace("\0", " ")
    joined = query.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return joined.replace("\ufffd", " ").replace("\0", " ")


def last_terms(terms: Sequence[str], limit: int) -> Counter[str]:
    """Return the counts of the longest tail of ``terms`` with at most ``limit`` distinct ones."""
    counts: Counter[str] = Counter()
    for term in reversed(terms):
        if len(counts) == limit and term not in counts:
            break
        counts[term] += 1
    return counts


class Searcher:
    """One index, opened with the JVM of this process."""

    def __init__(self, config: dict[str, Any]) -> None:
        """Start the JVM with ``config``'s jar, options, index, k1, b, threads and whether to return stored texts."""
        import jnius_config

        jnius_config.set_classpath(config["jar"])
        jnius_config.add_options(*config["options"])
        from jnius import autoclass

        self._autoclass = autoclass
        self._list = autoclass("java.util.ArrayList")
        self._analyzer_utils = autoclass("io.anserini.analysis.AnalyzerUtils")
        self._searcher = autoclass("io.anserini.search.SimpleSearcher")(config["index"])
        self._searcher.set_bm25(config["k1"], config["b"])
        self._threads: int = config["threads"]
        self.documents: int = self._searcher.get_total_num_docs()
        self.stored = self._stored_field()
        self._texts = config["texts"]

    def _stored_field(self) -> str | None:
        """Return the stored field that holds the text, raw before contents, or None."""
        if not self.documents:
            return None
        document = self._searcher.doc(0)
        return next((field for field in ("raw", "contents") if document.get(field) is not None), None)

    def describe(self) -> dict[str, Any]:
        """Return what the parent is told once: versions, size, stored field and a sample of ids."""
        step = max(1, self.documents // 64)
        sample = [self._searcher.doc(row).get("id") for row in range(0, self.documents, step)]
        return {
            "documents": self.documents,
            "stored": self.stored,
            "sample": sample,
            "java": self._autoclass("java.lang.System").getProperty("java.version"),
            "lucene": self._autoclass("org.apache.lucene.util.Version").LATEST.toString(),
        }

    def search(self, queries: Sequence[str], k: int) -> list[list[tuple[str, float, str | None]]]:
        """Return (docid, score, text or None) of the best k documents of each query [Q]."""
        k = min(k, self.documents)
        if k < 1:
            return [[] for _ in queries]
        cleaned = [clean(query) for query in queries]
        # A query of at most this many characters cannot have more terms; only longer ones are analysed twice.
        long = {i: counts for i, query in enumerate(cleaned) if (counts := self._too_many_terms(query)) is not None}
        short = [i for i in range(len(cleaned)) if i not in long]
        found: dict[int, Any] = {i: self._searcher.search(self._query(counts), k) for i, counts in long.items()}
        if len(short) == 1:
            found[short[0]] = self._searcher.search(cleaned[short[0]], k)
        elif short:
            texts, names = self._list(), self._list()
            for i in short:  # named by position: equal queries would otherwise collapse into one
                texts.add(cleaned[i])
                names.add(str(i))
            answers = self._searcher.batch_search(texts, names, k, self._threads)
            found.update((i, answers.get(str(i)) or []) for i in short)
        return [[self._hit(hit) for hit in found[i]] for i in range(len(cleaned))]

    def _too_many_terms(self, query: str) -> Counter[str] | None:
        if len(query) <= MAX_QUERY_TERMS:
            return None
        terms = list(self._analyzer_utils.analyze(self._searcher.get_analyzer(), query))
        return last_terms(terms, MAX_QUERY_TERMS) if len(set(terms)) > MAX_QUERY_TERMS else None

    def _query(self, counts: Counter[str]) -> Any:
        """Return the query that Anserini makes of a bag of words: every term, weighted by its count."""
        term, term_query = (self._autoclass(f"org.apache.lucene.{name}") for name in ("index.Term", "search.TermQuery"))
        boost = self._autoclass("org.apache.lucene.search.BoostQuery")
        should = self._autoclass("org.apache.lucene.search.BooleanClause$Occur").SHOULD
        builder = self._autoclass("org.apache.lucene.search.BooleanQuery$Builder")()
        for text, count in counts.items():
            builder.add(boost(term_query(term("contents", text)), float(count)), should)
        return builder.build()

    def _hit(self, hit: Any) -> tuple[str, float, str | None]:
        text = hit.lucene_document.get(self.stored) if self._texts and self.stored else None
        return hit.docid, hit.score, text


def serve(connection: socket.socket, open_searcher: Callable[[dict[str, Any]], Searcher]) -> None:
    """Answer until the parent closes the connection, which ends this process at once, in the middle of a search too."""
    started = time.monotonic()
    requests = _read_in_background(connection)
    try:
        searcher = open_searcher(requests.get())
        answer = {**searcher.describe(), "start_s": round(time.monotonic() - started, 2), "rss_mb": _resident_mb()}
    except Exception as error:
        send(connection, {"error": _explain(error)})
        return
    send(connection, answer)
    while True:
        request = requests.get()
        try:
            hits = searcher.search(request["queries"], request["k"])
            send(connection, {"hits": hits, "rss_mb": _resident_mb()})
        except OSError:
            return
        except Exception as error:  # also an answer above MAX_MESSAGE_BYTES, of which nothing was sent
            send(connection, {"error": _explain(error)})


def _read_in_background(connection: socket.socket) -> queue.SimpleQueue[dict[str, Any]]:
    requests: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()

    def read() -> None:
        try:
            while True:
                requests.put(receive(connection))
        except (EOFError, OSError):
            os._exit(0)  # not sys.exit: the JVM may be in the middle of something

    threading.Thread(target=read, name="requests", daemon=True).start()
    return requests


def _explain(error: Exception) -> str:
    """Return one line: the Java exception without its stack, or the Python one."""
    java_class = getattr(error, "classname", None)
    if java_class is not None:
        return f"{java_class.rpartition('.')[2]}: {getattr(error, 'innermessage', None) or error}".splitlines()[0]
    return " ".join(f"{type(error).__name__}: {error}".split())


def _resident_mb() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize() >> 20


def _die_with_parent(parent: int) -> None:
    """Ask the kernel to kill this process when the thread that started it ends, however that happens."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the request
        os._exit(0)


def main() -> None:
    """Serve the socket whose descriptor is the first argument; the second is the parent's process id."""
    _die_with_parent(int(sys.argv[2]))
    os.dup2(2, 1)  # Anserini logs to standard output
    serve(socket.socket(fileno=int(sys.argv[1])), Searcher)


if __name__ == "__main__":
    main()
