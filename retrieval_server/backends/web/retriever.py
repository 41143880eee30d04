"""The web backend: titles and snippets of a search API, or the text of the pages it found."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from retrieval_server.backends.web.api import ApiClient
from retrieval_server.backends.web.credentials import Credentials
from retrieval_server.backends.web.pages import PageFetcher
from retrieval_server.backends.web.passages import best_window
from retrieval_server.backends.web.providers import PROVIDERS
from retrieval_server.backends.web.results import Result, ResultPage, document, one_line
from retrieval_server.backends.web.state import WebState
from retrieval_server.backends.web.transport import (
    IpAddress,
    Resolver,
    Transport,
    anywhere,
    is_public,
    proxy_for,
    resolve,
)
from retrieval_server.errors import PartialSearchError, SearchUnavailableError, SettingsError
from retrieval_server.specs import WebSpec
from retrieval_server.types import Hit, LoadProgress

logger = logging.getLogger(__name__)

_PAGES_PER_SEARCH = 4
"""Pages fetched at the same time for each search that may run at the same time."""


class WebRetriever:
    """Implements ``types.Retriever``. ``search`` may be called from any number of threads.

    A hit's score is 1 / rank: search APIs order their results and do not score them alike. The list for a smaller k is
    a prefix of that for a larger one as long as the provider pages consistently.
    """

    name = "web"
    size = None

    def __init__(
        self, api: ApiClient, pages: PageFetcher | None, state: WebState, parallel: int, page_chars: int
    ) -> None:
        """``pages`` is None for titles and snippets; see ``load`` for where the rest comes from."""
        self._api, self._pages, self._state, self._page_chars = api, pages, state, page_chars
        self.parallel = parallel
        """Queries asked at the same time, over all searches."""
        self._queries = ThreadPoolExecutor(parallel, thread_name_prefix="web-query")
        self._fetches = (
            ThreadPoolExecutor(parallel * _PAGES_PER_SEARCH, thread_name_prefix="web-page") if pages else None
        )
        self._transports: list[Transport] = []

    @classmethod
    def load(
        cls,
        spec: WebSpec,
        progress: LoadProgress,
        environment: Mapping[str, str] = os.environ,
        page_allowed: Callable[[IpAddress], bool] = is_public,
        page_resolver: Resolver = resolve,
    ) -> WebRetriever:
        """Read the key and open the state; nothing is sent.

        ``page_allowed`` and ``page_resolver`` decide which addresses pages are fetched from. Raises SettingsError for a
        missing key, an unusable state file, or options that the provider does not have.
        """
        progress.update("opening the web cache", 0.5)
        provider = PROVIDERS[spec.provider](spec.language, spec.country)
        credentials = Credentials.from_environment(provider.variables, environment)
        if spec.fetch_pages:
            _require_trafilatura()
        base_url = (spec.base_url or provider.default_url).rstrip("/")
        transport = Transport(anywhere, proxy_url=proxy_for(base_url))
        state = WebState(spec.state_path, spec.cache_days)
        api = ApiClient(
            provider,
            credentials,
            transport,
            state,
            base_url=base_url,
            timeout_s=spec.timeout_s,
            retries=spec.retries,
            budget=spec.budget,
            requests_per_second=spec.requests_per_second,
        )
        page_transport = Transport(page_allowed, page_resolver) if spec.fetch_pages else None
        pages = PageFetcher(page_transport, state, spec.timeout_s) if page_transport else None
        retriever = cls(api, pages, state, spec.parallel, spec.page_chars)
        retriever._transports = [transport, *([page_transport] if page_transport else [])]
        return retriever

    def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        """Return one list per query [Q], at most k long.

        Raises PartialSearchError, which holds the hits of the others, when some or all queries cannot be answered now.
        What was found is in the cache by then: asking again pays for the rest only.
        """
        asked: dict[str, Future[list[Hit]]] = {}
        for query in queries:
            if query not in asked:
                asked[query] = self._submit(query, k)
        outcomes = {query: _outcome(future) for query, future in asked.items()}
        if any(isinstance(outcome, SearchUnavailableError) for outcome in outcomes.values()):
            raise PartialSearchError(self, [outcomes[query] for query in queries])
        return [list(hits) for query in queries if isinstance(hits := outcomes[query], list)]

    def _submit(self, query: str, k: int) -> Future[list[Hit]]:
        try:
            return self._queries.submit(self._answer, query, k)
        except RuntimeError:
            raise SearchUnavailableError("the server is stopping", None) from None

    def _answer(self, query: str, k: int) -> list[Hit]:
        words = one_line(query)
        if not words:
            return []
        try:
            results = _merged(self._api.pages(words, k))
        except SearchUnavailableError as error:
            raise SearchUnavailableError(f"query {words[:80]!r}: {error}", error.retry_after_s) from None
        texts = self._texts(results[:k], words) if self._fetches else (result.snippet for result in results)
        # What has no text teaches nothing; in its place the next result moves up.
        shown = [(result, text) for result, text in zip(results, texts, strict=False) if text][:k]
        return [Hit(document(result, text), 1 / rank) for rank, (result, text) in enumerate(shown, start=1)]

    def _texts(self, results: Sequence[Result], query: str) -> list[str]:
        """Return the passage of each page, the snippet where there is none."""
        assert self._fetches is not None
        return list(self._fetches.map(lambda result: self._passage(result, query), results))

    def _passage(self, result: Result, query: str) -> str:
        assert self._pages is not None
        text = self._pages.text(result.url) if result.url else ""
        return best_window(text, result.snippet, query, self._page_chars) or result.snippet

    def info(self) -> dict[str, Any]:
        """Return provider, what was spent of the budget, and the cache; there is no corpus that could be identified."""
        pages = {"pages": self._pages.info()} if self._pages else {}
        return {"corpus": None, **self._api.info(), **pages}

    def close(self) -> None:
        """Give up what waits, finish what is being sent, and close everything."""
        self._api.stop()
        for pool in filter(None, (self._queries, self._fetches)):
            pool.shutdown(wait=True, cancel_futures=True)
        for transport in self._transports:
            transport.close()
        self._state.close()


def _outcome(future: Future[list[Hit]]) -> list[Hit] | SearchUnavailableError:
    try:
        return future.result()
    except SearchUnavailableError as error:
        return error


def _merged(pages: Iterable[ResultPage]) -> list[Result]:
    """Return leads, results and tails of all pages in this order, each address once."""
    pages = list(pages)
    ordered = [r for page in pages for r in page.lead] + [r for page in pages for r in page.results]
    unique: dict[Any, Result] = {}
    for result in [*ordered, *(r for page in pages for r in page.tail)]:
        unique.setdefault(result.url or result, result)
    return list(unique.values())


def _require_trafilatura() -> None:
    try:
        import trafilatura  # noqa: F401
    except ImportError as error:
        raise SettingsError(f"fetch_pages needs trafilatura ({error}): pip install 'chatr1[web]'") from None
