"""The types every backend shares: what a search returns, and what a backend must be able to do.

Legend: Q queries of one call, k documents wanted per query, N passages of the corpus.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import pydantic_core


@dataclass(frozen=True, slots=True)
class Document:
    """One passage as it is sent, the same four fields from every backend.

    Example: ``Document.of("wiki:12", '"Rome"\\nRome is a city.', "Rome", "Rome is a city.")``.
    """

    id: str
    contents: str
    """Verbatim from the corpus; by convention the quoted title, a newline, the text."""
    title: str
    """Without the quotes; empty when ``contents`` has a single line."""
    text: str
    encoded: bytes
    """The JSON object that goes on the wire (UTF-8): encoded once, joined into every answer that holds it."""

    @classmethod
    def of(cls, id: str, contents: str, title: str, text: str) -> Document:
        """Build a document and its wire form; raises UnicodeEncodeError for text that is not valid Unicode."""
        fields = {"id": id, "contents": contents, "title": title, "text": text}
        try:
            # A quarter of the time of the json module, for every document of a query that was not asked before.
            encoded = pydantic_core.to_json(fields)
        except pydantic_core.PydanticSerializationError:
            encoded = json.dumps(fields, ensure_ascii=False).encode("utf-8")
        return cls(id, contents, title, text, encoded)


class Hit(NamedTuple):
    """One retrieved document. Larger scores are better; the scale is the backend's own."""

    document: Document
    score: float


class Retriever(Protocol):
    """A search backend. ``search`` is called from at most ``parallel`` threads at a time."""

    @property
    def name(self) -> str:
        """The backend's name, as given by ``--retriever_name``."""
        ...

    @property
    def size(self) -> int | None:
        """N, or None when the collection has no known size."""
        ...

    @property
    def parallel(self) -> int:
        """Searches that may run at the same time: 1 for one that computes here, more for one that waits for others."""
        ...

    def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        """Return one list per query [Q], best first, at most k long, shorter when fewer passages match.

        Never padded, whatever k and N are. A query gets the same list alone as in any batch, and the list for a
        smaller k is a prefix of the list for a larger one.
        """
        ...

    def info(self) -> dict[str, Any]:
        """Return what ``/info`` shows: at least ``corpus`` and ``manifest`` when there is an index."""
        ...

    def close(self) -> None:
        """Release files and processes."""
        ...


@runtime_checkable
class Timed(Protocol):
    """A retriever that can say where the time of a search went. Optional."""

    def timings(self) -> dict[str, float]:
        """Return the seconds per stage ("encode", "search", "rerank" ...) of this thread's last search."""
        ...


class LoadProgress:
    """How far loading is: written by the loading thread, read by ``/readyz``."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._phase = "starting"
        self._fraction = 0.0

    def update(self, phase: str, fraction: float) -> None:
        """Set the current phase in words and the fraction done of the whole, 0 to 1."""
        with self._lock:
            self._phase = phase
            self._fraction = min(1.0, max(0.0, fraction))

    def snapshot(self) -> tuple[str, float]:
        """Return (phase, fraction done)."""
        with self._lock:
            return self._phase, self._fraction
