"""The search APIs: how each is asked and how its answer is read. One class per API, one table.

Request and answer formats follow the providers' public documentation; each class names the page. None of them could be
called from where this was written: the tests run against a local server that answers in the documented form.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from retrieval_server.backends.web.pacing import retry_after_s
from retrieval_server.backends.web.results import Result, ResultPage
from retrieval_server.errors import SettingsError

Fields = Mapping[str, str | int | bool]


@dataclass(frozen=True, slots=True)
class ApiRequest:
    """One request, without its key: it may be logged, and it is what an answer is cached under."""

    path: str
    params: Fields = field(default_factory=dict)
    """Query string."""
    body: Fields | None = None
    """JSON body; a request that has one is a POST."""


@dataclass(frozen=True, slots=True)
class Signature:
    """What a key adds to a request. Not to be logged."""

    headers: Mapping[str, str] = field(default_factory=dict)
    params: Mapping[str, str] = field(default_factory=dict)


class Provider(ABC):
    """A search API. k documents wanted; a request asks for a page of results, whose size does not depend on k.

    So a smaller k is answered from the cached pages of a larger one, and costs nothing more.
    """

    name: ClassVar[str]
    default_url: ClassVar[str]
    variables: ClassVar[tuple[str, ...]]
    """Environment variables with the credentials."""
    page_size: ClassVar[int]
    max_pages: ClassVar[int]
    max_query_chars: ClassVar[int] = 2048
    max_query_words: ClassVar[int | None] = None
    bills_failures: ClassVar[bool] = True
    """Whether a search that failed at the provider (status 500 and above) may be billed; False where its pages deny."""

    def __init__(self, language: str, country: str) -> None:
        self.language, self.country = language, country

    def requests(self, query: str, k: int) -> list[ApiRequest]:
        """Return the requests that may be needed for k documents, in order."""
        n_pages = min(self.max_pages, -(-k // self.page_size))
        return [self.request(self._fit(query), page) for page in range(n_pages)]

    def _fit(self, query: str) -> str:
        """Shorten a query to what the API takes. The end stays: in a pasted conversation the question stands there."""
        words = query.split()
        if self.max_query_words is not None:
            words = words[-self.max_query_words :]
        return " ".join(words)[-self.max_query_chars :].lstrip()

    @abstractmethod
    def request(self, query: str, page: int) -> ApiRequest:
        """Return the request for a page of results, from 0."""

    @abstractmethod
    def sign(self, keys: Sequence[str]) -> Signature:
        """Return what the values of ``variables`` add to a request."""

    @abstractmethod
    def parse(self, answer: Mapping[str, Any]) -> ResultPage:
        """Read an answer; whatever is malformed in it is left out."""

    def error_of(self, answer: Mapping[str, Any]) -> str:
        """Return the message of an answer that reports an error, "" for one that does not."""
        for key in ("error", "message", "detail"):
            value = answer.get(key)
            if isinstance(value, Mapping):
                value = value.get("message") or value.get("error") or value.get("detail") or value.get("code")
            if isinstance(value, str) and value:
                return value
        return ""

    def asked_wait_s(self, headers: Mapping[str, str]) -> float | None:
        """Return the pause that a refusal asks for; names of headers are in lower case."""
        return retry_after_s(headers.get("retry-after", ""))


class Serper(Provider):
    """Serper, page "Google Search API" (playground): POST with ``X-API-KEY``; ten results are one credit."""

    name = "serper"
    default_url = "https://google.serper.dev"
    variables = ("SERPER_API_KEY",)
    page_size, max_pages = 10, 10

    def request(self, query: str, page: int) -> ApiRequest:
        body: Fields = {"q": query, "num": self.page_size, "page": page + 1, "gl": self.country, "hl": self.language}
        return ApiRequest("/search", body=body)

    def sign(self, keys: Sequence[str]) -> Signature:
        return Signature(headers={"X-API-KEY": keys[0]})

    def parse(self, answer: Mapping[str, Any]) -> ResultPage:
        results = _results(answer.get("organic"), "title", "link", "snippet")
        return ResultPage(results, more=bool(results))


class SerpApi(Provider):
    """SerpAPI, pages "Google Search API", "Status and Error Codes", "Search Errors": GET with ``api_key``.

    Documents in the published order: the answer box, the results, related questions; never more than k in all. Only
    successful searches are billed.
    """

    name = "serpapi"
    default_url = "https://serpapi.com"
    variables = ("SERPAPI_API_KEY",)
    page_size, max_pages = 10, 10
    bills_failures = False

    def request(self, query: str, page: int) -> ApiRequest:
        params: dict[str, str | int | bool] = {"engine": "google", "q": query, "gl": self.country, "hl": self.language}
        if page:
            params["start"] = page * self.page_size
        return ApiRequest("/search", params)

    def sign(self, keys: Sequence[str]) -> Signature:
        return Signature(params={"api_key": keys[0]})

    def parse(self, answer: Mapping[str, Any]) -> ResultPage:
        box = answer.get("answer_box")
        boxes = [{**box, "text": _first_text(box, "snippet", "answer", "result")}] if isinstance(box, Mapping) else []
        pagination = answer.get("serpapi_pagination")
        return ResultPage(
            _results(answer.get("organic_results"), "title", "link", "snippet"),
            lead=tuple(result for result in _results(boxes, "title", "link", "text") if result.snippet),
            tail=_results(answer.get("related_questions"), "question", "link", "snippet"),
            more=isinstance(pagination, Mapping) and "next" in pagination,
        )

    def error_of(self, answer: Mapping[str, Any]) -> str:
        """A search without results is reported as an error with the status Success."""
        metadata = answer.get("search_metadata")
        if isinstance(metadata, Mapping) and metadata.get("status") == "Success":
            return ""
        return super().error_of(answer)


class GoogleCse(Provider):
    """Google, page "Custom Search JSON API, Method: cse.list": GET, ten results a request, a hundred in all.

    The key goes into the header ``X-goog-api-key`` (page "System parameters") and not into the address. Google takes no
    new customers for this API and ends it on 1 January 2027.
    """

    name = "google"
    default_url = "https://www.googleapis.com"
    variables = ("GOOGLE_API_KEY", "GOOGLE_CSE_ID")
    page_size, max_pages = 10, 10

    def request(self, query: str, page: int) -> ApiRequest:
        window: Fields = {"num": self.page_size, "start": 1 + page * self.page_size}
        return ApiRequest("/customsearch/v1", {"q": query, **window, "gl": self.country, "hl": self.language})

    def sign(self, keys: Sequence[str]) -> Signature:
        return Signature(headers={"X-goog-api-key": keys[0]}, params={"cx": keys[1]})

    def parse(self, answer: Mapping[str, Any]) -> ResultPage:
        queries = answer.get("queries")
        more = isinstance(queries, Mapping) and bool(queries.get("nextPage"))
        return ResultPage(_results(answer.get("items"), "title", "link", "snippet"), more=more)


class Brave(Provider):
    """Brave Search, pages "Web Search API: Query Parameters" and "Response Headers": GET, ``X-Subscription-Token``.

    Only successful requests are counted and billed. A query has at most 400 characters and 50 words.
    """

    name = "brave"
    default_url = "https://api.search.brave.com"
    variables = ("BRAVE_API_KEY",)
    page_size, max_pages = 20, 10
    bills_failures = False
    max_query_chars, max_query_words = 400, 50

    def request(self, query: str, page: int) -> ApiRequest:
        place: Fields = {"country": self.country.upper(), "search_lang": self.language}
        window: Fields = {"count": self.page_size, "offset": page}
        return ApiRequest("/res/v1/web/search", {"q": query, **window, **place, "text_decorations": "false"})

    def sign(self, keys: Sequence[str]) -> Signature:
        return Signature(headers={"X-Subscription-Token": keys[0]})

    def parse(self, answer: Mapping[str, Any]) -> ResultPage:
        web, query = answer.get("web"), answer.get("query")
        found = web.get("results") if isinstance(web, Mapping) else None
        more = isinstance(query, Mapping) and query.get("more_results_available") is True
        return ResultPage(_results(found, "title", "url", "description"), more=more)

    def asked_wait_s(self, headers: Mapping[str, str]) -> float | None:
        """Brave lists its windows (a second, a month): wait for the longest one that has nothing left."""
        asked = super().asked_wait_s(headers)
        left, reset = (headers.get(f"x-ratelimit-{name}", "").split(",") for name in ("remaining", "reset"))
        waits = [retry_after_s(wait) for n, wait in zip(left, reset, strict=False) if n.strip() == "0"]
        return asked if asked is not None else max((wait for wait in waits if wait is not None), default=None)


class Tavily(Provider):
    """Tavily, pages "Tavily Search" and "API Credits Overview": POST with a bearer key; a basic search is one credit.

    There is no second page and no language; a country is given by its English name.
    """

    name = "tavily"
    default_url = "https://api.tavily.com"
    variables = ("TAVILY_API_KEY",)
    page_size, max_pages = 20, 1
    max_query_chars = 400

    _COUNTRIES: ClassVar[Mapping[str, str]] = {
        "au": "australia", "br": "brazil", "ca": "canada", "ch": "switzerland", "cn": "china", "de": "germany",
        "es": "spain", "fr": "france", "gb": "united kingdom", "in": "india", "it": "italy", "jp": "japan",
        "kr": "south korea", "mx": "mexico", "nl": "netherlands", "pl": "poland", "se": "sweden",
        "us": "united states", "za": "south africa",
    }  # fmt: skip

    def __init__(self, language: str, country: str) -> None:
        super().__init__(language, country)
        if language != "en":
            raise SettingsError(f"language is {language!r}, but tavily has no such parameter; leave it at 'en'")
        if country not in self._COUNTRIES:
            known = ", ".join(self._COUNTRIES)
            raise SettingsError(f"country {country!r} has no name that tavily is known to take; known: {known}")

    def request(self, query: str, page: int) -> ApiRequest:
        options: Fields = {"search_depth": "basic", "country": self._COUNTRIES[self.country]}
        return ApiRequest("/search", body={"query": query, "max_results": self.page_size, **options})

    def sign(self, keys: Sequence[str]) -> Signature:
        return Signature(headers={"Authorization": f"Bearer {keys[0]}"})

    def parse(self, answer: Mapping[str, Any]) -> ResultPage:
        return ResultPage(_results(answer.get("results"), "title", "url", "content"))


PROVIDERS: Mapping[str, type[Provider]] = {
    provider.name: provider for provider in (Serper, SerpApi, GoogleCse, Brave, Tavily)
}


def _results(entries: Any, title: str, url: str, snippet: str) -> tuple[Result, ...]:
    """Read a list of objects by the names of their fields; what is not such a list or object is left out."""
    if not isinstance(entries, Sequence) or isinstance(entries, str):
        return ()
    objects = (entry for entry in entries if isinstance(entry, Mapping))
    results = (Result.of(entry.get(title), entry.get(url), entry.get(snippet)) for entry in objects)
    return tuple(result for result in results if result is not None)


def _first_text(entry: Mapping[str, Any], *names: str) -> str:
    values = (entry.get(name) for name in names)
    return next((value for value in values if isinstance(value, str) and value.strip()), "")
