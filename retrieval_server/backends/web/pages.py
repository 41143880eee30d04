"""Fetches the pages behind search results, carefully: public addresses only, few bytes, little time, no surprises."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from urllib.parse import urljoin

from retrieval_server.backends.web.api import USER_AGENT
from retrieval_server.backends.web.pacing import SingleFlight
from retrieval_server.backends.web.passages import extract_text
from retrieval_server.backends.web.results import canonical_url
from retrieval_server.backends.web.state import WebState
from retrieval_server.backends.web.transport import Reply, TransferError, Transport
from retrieval_server.errors import SearchUnavailableError

logger = logging.getLogger(__name__)

_MAX_PAGE_BYTES = 3 * 1024 * 1024
_MAX_REDIRECTS = 4
_TYPES = ("text/html", "application/xhtml+xml", "text/plain")
_HEADERS = {"User-Agent": USER_AGENT, "Accept": "text/html, application/xhtml+xml, text/plain;q=0.8"}


class PageFetcher:
    """Returns the main text of pages, from the cache where it is there. Safe to use from several threads."""

    def __init__(self, transport: Transport, state: WebState, timeout_s: float) -> None:
        """``timeout_s`` is for one page, its redirects included."""
        self._transport, self._state, self._timeout_s = transport, state, timeout_s
        self._flights = SingleFlight()
        self._lock = threading.Lock()
        self._counts = dict.fromkeys(("cached", "fetched", "failed"), 0)

    def text(self, url: str) -> str:
        """Return the main text of a page, "" when it cannot be had, for whatever reason; never raises for that."""
        return self._flights.do(url, lambda: self._kept_or_fetched(url))

    def info(self) -> dict[str, int]:
        """Return how many pages came from the cache, from the web, and not at all."""
        with self._lock:
            return dict(self._counts)

    def _kept_or_fetched(self, url: str) -> str:
        try:
            kept = self._state.page(url)
        except SearchUnavailableError as error:  # a page is free to fetch again
            logger.warning("%s", error)
            kept = None
        if kept is not None:
            self._count("cached")
            return kept
        text = self._fetched(url)
        self._count("fetched" if text else "failed")
        self._state.keep_page(url, text)
        return text

    def _fetched(self, url: str) -> str:
        try:
            reply = self._follow(url)
            return extract_text(reply.body, reply.headers.get("content-type", "").lower())
        except TransferError as error:
            logger.info("page %s: %s", url, error)
        except ImportError:
            raise
        except Exception as error:  # whatever a page makes the parser do, it costs this page only
            logger.warning("page %s cannot be read (%s: %s)", url, type(error).__name__, error)
        return ""

    def _follow(self, url: str) -> Reply:
        """Get a page and up to four redirects, each checked like the first."""
        seen = {url}
        end = time.monotonic() + self._timeout_s
        for _ in range(_MAX_REDIRECTS + 1):
            left = max(0.001, end - time.monotonic())
            reply = self._transport.exchange("GET", url, _HEADERS, None, left, _MAX_PAGE_BYTES, _unwanted)
            location = reply.headers.get("location")
            if reply.status == 200 or location is None:
                return reply
            url = canonical_url(urljoin(url, location))
            if not url or url in seen:
                raise TransferError("redirects in a circle or to no http address", sent=True)
            seen.add(url)
        raise TransferError(f"redirects more than {_MAX_REDIRECTS} times", sent=True)

    def _count(self, what: str) -> None:
        with self._lock:
            self._counts[what] += 1


def _unwanted(status: int, headers: Mapping[str, str]) -> str:
    """Say why an answer is not worth reading, "" when it is."""
    if status in (301, 302, 303, 307, 308) and "location" in headers:
        return ""
    if status != 200:
        return f"status {status}"
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    return "" if kind in _TYPES else f"content type {kind[:60]!r}"
