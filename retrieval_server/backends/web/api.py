"""Asks a search API: cached, once for everybody who wants the same, paced, within the budget, with bounded retries."""

from __future__ import annotations

import json
import logging
import re
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

from retrieval_server.backends.web.credentials import Credentials
from retrieval_server.backends.web.pacing import Pacer, SingleFlight, backoff_s
from retrieval_server.backends.web.providers import ApiRequest, Provider
from retrieval_server.backends.web.results import Result, ResultPage, clean
from retrieval_server.backends.web.state import WebState
from retrieval_server.backends.web.transport import Reply, TransferError, Transport
from retrieval_server.errors import SearchUnavailableError

logger = logging.getLogger(__name__)

USER_AGENT = "chatr1-retrieval/0.1 (research; one page per search result)"
_MAX_ANSWER_BYTES = 8 * 1024 * 1024
_MAX_WAIT_S = 30.0
"""A provider that asks for a longer pause is not waited for; the client is told when to come back."""
_CLOSED_S = 60.0
"""After a refused key or a spent quota nothing is sent for this long: the next request would only be refused again."""
_COME_BACK_S = 3600.0
"""What a client is told when our own budget or the provider's quota is spent."""

_QUOTA = re.compile(r"quota|credit|run out|per day|daily|monthly|usage limit", re.IGNORECASE)
_RATE = re.compile(r"per (minute|second)|rate ?limit|throughput|too many requests", re.IGNORECASE)
_KEY = re.compile(r"\bkey\b|unauthori[sz]ed|forbidden|token|denied|permission", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a request got no results."""

    message: str
    again: bool
    """Another try may help."""
    wait_s: float | None = None
    """How long the provider asks to wait."""
    closed: bool = False
    """Every other request would fail in the same way for a while: the key is refused or the quota is spent."""


class ApiClient:
    """One provider. Safe to use from several threads."""

    def __init__(
        self,
        provider: Provider,
        credentials: Credentials,
        transport: Transport,
        state: WebState,
        *,
        base_url: str,
        timeout_s: float,
        retries: int,
        budget: int | None,
        requests_per_second: float,
    ) -> None:
        self._provider, self._credentials = provider, credentials
        self._transport, self._state = transport, state
        self._base_url, self._timeout_s, self._retries, self._budget = base_url, timeout_s, retries, budget
        self._pacer = Pacer(requests_per_second)
        self._flights = SingleFlight()
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._counts = dict.fromkeys(("hits", "misses", "sent", "failed"), 0)
        self._closed_until, self._closed_reason = 0.0, ""
        self._told_spent = False

    def pages(self, query: str, k: int) -> list[ResultPage]:
        """Return the pages of results that k documents need, as far as the API has them.

        Raises SearchUnavailableError when one is neither cached nor to be had.
        """
        pages: list[ResultPage] = []
        found = 0
        for request in self._provider.requests(query, k):
            page = self._page(request)
            pages.append(page)
            found += len(page.lead) + len(page.results)
            if found >= k or not page.more:
                break
        return pages

    def info(self) -> dict[str, Any]:
        """Return what was spent, the cache, and what was sent by this process."""
        with self._lock:
            counts = dict(self._counts)
        asked = counts["hits"] + counts["misses"]
        return {
            "provider": self._provider.name,
            "spent": self._state.spent(self._provider.name),
            "budget": self._budget,
            "requests": {"sent": counts["sent"], "failed": counts["failed"]},
            "cache": {
                **self._state.sizes(),
                "hits": counts["hits"],
                "misses": counts["misses"],
                "hit_rate": round(counts["hits"] / asked, 4) if asked else None,
            },
        }

    def stop(self) -> None:
        """Let nobody wait or send any more."""
        self._stopping.set()

    def _page(self, request: ApiRequest) -> ResultPage:
        key = self._key(request)
        return self._flights.do(key, lambda: self._kept_or_asked(key, request))

    def _key(self, request: ApiRequest) -> str:
        """Everything an answer depends on but the credentials."""
        provider = self._provider
        place = [] if self._base_url == provider.default_url else [self._base_url]
        parts = [provider.name, *place, request.path, dict(request.params), dict(request.body or {})]
        return json.dumps(parts, sort_keys=True, ensure_ascii=False)

    def _kept_or_asked(self, key: str, request: ApiRequest) -> ResultPage:
        kept = self._state.answer(key)
        self._count("misses" if kept is None else "hits")
        if kept is not None:
            return _load(kept)
        page = self._ask(request)
        self._state.keep_answer(key, _dump(page))
        return page

    def _ask(self, request: ApiRequest) -> ResultPage:
        attempt = 0
        while True:
            self._sleep(self._pacer.reserve())
            self._check_open()
            self._spend()
            outcome = self._try(request)
            if isinstance(outcome, ResultPage):
                return outcome
            wait_s = outcome.wait_s if outcome.wait_s is not None else backoff_s(attempt)
            if not outcome.again or attempt == self._retries or wait_s > _MAX_WAIT_S:
                raise self._unavailable(outcome, attempt + 1)
            if outcome.wait_s is not None:
                self._pacer.hold(wait_s)  # for everybody: the others would only be refused too
                wait_s = backoff_s(attempt)
            self._sleep(wait_s)
            attempt += 1

    def _try(self, request: ApiRequest) -> ResultPage | Failure:
        """Send once what has been counted, and take back what is not billed."""
        self._count("sent")
        outcome: ResultPage | Failure
        try:
            reply = self._send(request)
        except TransferError as error:
            reason = self._credentials.redact(str(error).encode()).decode()
            billed, outcome = error.sent, Failure(f"gives no answer: {reason}", again=error.again)
        else:
            # An error from 500 may have cost a search, one below never does, and neither does a redirect.
            billed = reply.status < 300 or (reply.status >= 500 and self._provider.bills_failures)
            outcome = self._read(reply)
        if not billed:
            self._state.refund(self._provider.name)
        if isinstance(outcome, Failure):
            self._count("failed")
        return outcome

    def _send(self, request: ApiRequest) -> Reply:
        signature = self._provider.sign(self._credentials.reveal())
        params = {**request.params, **signature.params}
        url = self._base_url + request.path + (f"?{urlencode(params)}" if params else "")
        headers = {"Accept": "application/json", "User-Agent": USER_AGENT, **signature.headers}
        if request.body is None:
            return self._transport.exchange("GET", url, headers, None, self._timeout_s, _MAX_ANSWER_BYTES)
        headers["Content-Type"] = "application/json"
        body = json.dumps(request.body).encode()
        return self._transport.exchange("POST", url, headers, body, self._timeout_s, _MAX_ANSWER_BYTES)

    def _read(self, reply: Reply) -> ResultPage | Failure:
        answer = _json_object(self._credentials.redact(reply.body))
        message = clean(self._provider.error_of(answer or {}))[:200]
        if 300 <= reply.status < 400:
            return Failure(f"answers {reply.status}, a redirect: correct base_url {self._base_url}", again=False)
        if reply.status >= 400:
            wait_s = self._provider.asked_wait_s(reply.headers) if reply.status in (403, 429, 503) else None
            return _refusal(reply.status, message, wait_s)
        if answer is None:
            return Failure(f"answers {reply.status} with {len(reply.body)} bytes that are no JSON object", again=True)
        page = self._provider.parse(answer)
        if message and not (page.results or page.lead or page.tail):
            return Failure(f"reports: {message}", again=True)
        return page

    def _spend(self) -> None:
        if self._state.spend(self._provider.name, self._budget):
            return
        message = f"the budget of {self._budget} paid requests to {self._provider.name} is spent"
        with self._lock:
            told, self._told_spent = self._told_spent, True
        if not told:
            logger.warning("%s: what is not in the cache is refused from now on", message)
        raise SearchUnavailableError(f"{message}: raise budget; cached queries are still answered", _COME_BACK_S)

    def _check_open(self) -> None:
        with self._lock:
            left, reason = self._closed_until - time.monotonic(), self._closed_reason
        if left > 0:
            raise SearchUnavailableError(f"{reason} (nothing is sent for {left:.0f} s)", left)

    def _unavailable(self, failure: Failure, tries: int) -> SearchUnavailableError:
        message = f"{self._provider.name} {failure.message}" + (f" ({tries} tries)" if tries > 1 else "")
        logger.warning("%s", message)
        if failure.closed:
            with self._lock:
                self._closed_until, self._closed_reason = time.monotonic() + _CLOSED_S, message
        return SearchUnavailableError(message, failure.wait_s)

    def _sleep(self, seconds: float) -> None:
        if self._stopping.wait(seconds):
            raise SearchUnavailableError("the server is stopping", None)

    def _count(self, what: str) -> None:
        with self._lock:
            self._counts[what] += 1


def _refusal(status: int, message: str, wait_s: float | None) -> Failure:
    """Say what an error status means, and whether another try may help."""
    text = f"answers {status}" + (f": {message}" if message else "")
    limited = status == 429 or (status == 403 and _RATE.search(message) is not None)
    worded = status in (400, 403, 422, 429) and not _RATE.search(message)
    if status in (402, 432, 433) or (worded and _QUOTA.search(message)):
        return Failure(f"{text} (quota spent)", again=False, wait_s=_COME_BACK_S, closed=True)
    if limited or status in (408, 425) or status >= 500:
        return Failure(text, again=True, wait_s=wait_s, closed=limited and (wait_s or 0) > _MAX_WAIT_S)
    if status in (401, 403) or (worded and _KEY.search(message)):
        return Failure(f"{text} (key refused)", again=False, wait_s=_CLOSED_S, closed=True)
    return Failure(text, again=False)


def _json_object(body: bytes) -> Mapping[str, Any] | None:
    try:
        answer = json.loads(body)
    except (ValueError, RecursionError):
        return None
    return answer if isinstance(answer, dict) else None


def _dump(page: ResultPage) -> str:
    lists = {name: [[r.title, r.url, r.snippet] for r in getattr(page, name)] for name in ("results", "lead", "tail")}
    return json.dumps({**lists, "more": page.more}, ensure_ascii=False)


def _load(kept: str) -> ResultPage:
    fields = json.loads(kept)
    results, lead, tail = (tuple(Result(*row) for row in fields[name]) for name in ("results", "lead", "tail"))
    return ResultPage(results, lead, tail, fields["more"])
