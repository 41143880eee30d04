"""Errors a user of the service can cause or meet. Each message is one line: the thing, its value, the remedy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class RetrievalServerError(Exception):
    """Base of the errors that the entry points print without a traceback before they exit with 2."""


class SettingsError(RetrievalServerError):
    """A flag or setting is unknown, impossible or contradicts another."""


class CorpusError(RetrievalServerError):
    """The corpus file is missing, malformed (file and line are named) or not the one the index was built from."""


class IndexFolderError(RetrievalServerError):
    """The index folder is missing, incomplete, damaged, or was built by something this version does not read."""


class NotReadyError(RetrievalServerError):
    """The index is still being loaded, or could not be loaded."""


class QueueFullError(RetrievalServerError):
    """More queries are waiting than the server accepts; the client should come back later."""


class SearchUnavailableError(RetrievalServerError):
    """A backend cannot answer now though nothing is wrong here: no replica is reachable, a provider's limit is spent.

    Answered with 503, and with Retry-After where waiting helps.
    """

    def __init__(self, message: str, retry_after_s: float | None = 1.0) -> None:
        """``retry_after_s``: when a client may come back; None when it makes no difference."""
        super().__init__(message)
        self.retry_after_s = retry_after_s


class PartialSearchError(SearchUnavailableError):
    """Some queries of one search have no answer now. The others have their hits, so nobody has to search them again."""

    def __init__(self, origin: object, outcomes: Sequence[Any]) -> None:
        """``origin`` is the retriever that raises it; ``outcomes`` has per query its hits or its error [Q].

        The hits are the origin's. A retriever on top of it has still to fuse or rerank them, so they count only for
        who called the origin itself; for everybody else the whole search is unavailable.
        """
        failures = [outcome for outcome in outcomes if isinstance(outcome, SearchUnavailableError)]
        first = failures[0]
        super().__init__(f"{len(failures)} of {len(outcomes)} queries: {first}", first.retry_after_s)
        self.origin = origin
        self.outcomes = outcomes


class SelfTestError(RetrievalServerError):
    """An index does not return its own passages."""
