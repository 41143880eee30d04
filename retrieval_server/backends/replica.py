"""One server behind the proxy: what is known of it, how its health is judged, and one request to it.

A replica takes queries while it is ``ready``. It stops being so at once when it cannot be connected to, answers in the
wrong shape, refuses the key or serves another corpus. It stops after three failures in a row of another kind (5xx, no
answer in time), unless it is the last one: a query that no replica can answer must not take all of them away. It
becomes ready again when a look at it succeeds. Each time it fails again without having answered a query in between,
the next look comes twice as late. Lives in one event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any

import httpx

from retrieval_server.backends.proxy_wire import WrongShapeError, decode_answer, encode_request
from retrieval_server.errors import SearchUnavailableError
from retrieval_server.types import Hit

logger = logging.getLogger(__name__)

_PROBE_TIMEOUT_S = 5.0
_FAILURES = 3
_MAX_DOUBLINGS = 5
_JSON = {"Content-Type": "application/json"}
_BUSY = (429, 503)
# Statuses that say that this replica is not what it should be, where another one may be.
_NOT_A_REPLICA = (401, 403, 404, 405)


class ReplicaError(Exception):
    """This replica did not answer the queries; another one may."""


class RequestRefusedError(SearchUnavailableError):
    """The replica says that the request is wrong, for example above a limit of its own; so would any other."""

    def __init__(self, message: str) -> None:
        super().__init__(message, retry_after_s=None)


class Replica:
    """The state of one address, and the ways to talk to it."""

    def __init__(
        self, address: str, client: httpx.AsyncClient, interval_s: float, is_last: Callable[[Replica], bool]
    ) -> None:
        """``interval_s`` lies between two looks at it; ``is_last`` tells whether no other one is ready."""
        self.address = address
        self.ready = False
        self.outstanding = 0
        """Queries sent and not answered."""
        self.identity: dict[str, Any] = {}
        """Its ``/info``; empty for a server without one."""
        self.last_error = "not asked yet"
        self.answered = self.failed = 0
        self._client = client
        self._interval_s = interval_s
        self._is_last = is_last
        self._failures_in_row = 0
        self._ejections = 0
        self._look_again_at = 0.0
        self._last_answer = -1e9

    @property
    def corpus(self) -> dict[str, Any]:
        """The identity of the corpus it serves, or an empty dictionary when it does not say."""
        corpus = self.identity.get("corpus")
        return corpus if isinstance(corpus, dict) and corpus.get("sha256") else {}

    def limit(self, name: str) -> int | None:
        """Return one of the limits that it declares, or None."""
        limits = self.identity.get("limits")
        value = limits.get(name) if isinstance(limits, dict) else None
        return value if isinstance(value, int) and value > 0 else None

    async def retrieve(self, queries: Sequence[str], k: int, timeout_s: float) -> list[list[Hit]]:
        """Return the hits of each query; raises ReplicaError or RequestRefusedError."""
        self.outstanding += len(queries)
        try:
            async with asyncio.timeout(timeout_s):
                hits = await self._retrieve(list(queries), k)
        except TimeoutError:
            raise self._failure(f"no answer within {timeout_s:.3g} s") from None
        except httpx.HTTPError as error:
            raise self._failure(f"{type(error).__name__}: {error}", at_once=True) from None
        except WrongShapeError as error:
            raise self._failure(f"wrong answer: {error}", at_once=True) from None
        finally:
            self.outstanding -= len(queries)
        self.answered += len(queries)
        self._failures_in_row = self._ejections = 0
        self._last_answer = self._now()
        return hits

    async def _retrieve(self, queries: list[str], k: int) -> list[list[Hit]]:
        body = encode_request(queries, k, published=not self.identity)
        answer = await self._client.post(f"{self.address}/retrieve", content=body, headers=_JSON)
        if answer.status_code == 200:
            return decode_answer(answer.content, len(queries), k)
        reason = f"HTTP {answer.status_code}: {answer.text[:200]}"
        if answer.status_code in _BUSY:
            raise ReplicaError(reason)  # it is well, and says that it has enough to do
        if answer.status_code >= 500 or answer.status_code in _NOT_A_REPLICA:
            raise self._failure(reason, at_once=answer.status_code in _NOT_A_REPLICA)
        raise RequestRefusedError(f"{self.address} refused the request with {reason}")

    def _failure(self, reason: str, at_once: bool = False) -> ReplicaError:
        """Note a failure, and return it as an error to raise."""
        self.failed += 1
        self._failures_in_row += 1
        if self.ready and (at_once or (self._failures_in_row >= _FAILURES and not self._is_last(self))):
            self.eject(reason)
        self.last_error = reason
        return ReplicaError(reason)

    def eject(self, reason: str) -> None:
        """Send it nothing until a look at it succeeds."""
        self.ready = False
        self.last_error = reason
        self._look_again_at = self._now() + self._interval_s * 2 ** min(self._ejections, _MAX_DOUBLINGS)
        self._ejections += 1
        logger.warning("replica %s is out: %s", self.address, reason)

    async def watch(self, admit: Callable[[Replica], str | None]) -> None:
        """Look at it again and again, until cancelled; see ``look``."""
        while True:
            await asyncio.sleep(self._interval_s)
            if self._now() >= self._look_again_at:
                await self.look(admit)

    async def look(self, admit: Callable[[Replica], str | None]) -> None:
        """Ask how it is, and make it ready or not. ``admit`` may have an objection to a healthy one."""
        try:
            async with asyncio.timeout(_PROBE_TIMEOUT_S):
                problem = await self._probe()
        except TimeoutError:
            if self._now() - self._last_answer < 2 * _PROBE_TIMEOUT_S:
                return  # it has much to do, and answers queries
            problem = f"no sign of life within {_PROBE_TIMEOUT_S:g} s"
        except (httpx.HTTPError, ValueError) as error:
            problem = f"{type(error).__name__}: {error}"
        problem = problem or admit(self)
        if problem is None:
            if not self.ready:
                self._failures_in_row = 0
                logger.info("replica %s is ready", self.address)
            self.ready = True
        elif self.ready:
            self.eject(problem)
        else:
            self.last_error = problem

    async def _probe(self) -> str | None:
        """Return what keeps it from answering queries, or None; learns its identity."""
        answer = await self._client.get(f"{self.address}/readyz")
        if answer.status_code in (404, 405):
            return await self._probe_published()
        if answer.status_code != 200:
            return f"/readyz answers {answer.status_code}: {answer.text[:200]}"
        answer = await self._client.get(f"{self.address}/info")
        if answer.status_code != 200:
            return f"/info answers {answer.status_code}: {answer.text[:200]}"
        identity = answer.json()
        if not isinstance(identity, dict):
            return f"/info answers {answer.text[:80]!r}"
        self.identity = identity
        return None

    async def _probe_published(self) -> str | None:
        """A server without ``/readyz`` is asked nothing: all of them answer that with an empty result."""
        body = encode_request([], 1, published=True)
        answer = await self._client.post(f"{self.address}/retrieve", content=body, headers=_JSON)
        if answer.status_code != 200:
            return f"no /readyz, and /retrieve answers {answer.status_code}: {answer.text[:200]}"
        try:
            decode_answer(answer.content, 0, 1)
        except WrongShapeError as error:
            return f"no /readyz, and /retrieve answers with {error}"
        self.identity = {}
        return None

    def state(self) -> dict[str, Any]:
        """Return what ``/info`` shows of it."""
        shown: dict[str, Any] = {"address": self.address, "ready": self.ready, "outstanding": self.outstanding}
        shown |= {"answered": self.answered, "failed": self.failed}
        return shown if self.ready else shown | {"error": self.last_error}

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()
