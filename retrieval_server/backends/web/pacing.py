"""When a request may be sent: a steady rate over all threads, pauses as asked for, and one flight per key."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, TypeVar

T = TypeVar("T")

_BACKOFF_S, _MAX_BACKOFF_S = 0.5, 8.0


class Pacer:
    """A token bucket that holds one token: requests are spaced evenly, whichever threads send them."""

    def __init__(self, per_second: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._interval = 1 / per_second
        self._clock = clock
        self._lock = threading.Lock()
        self._next = clock()

    def reserve(self) -> float:
        """Take the next free moment; return the seconds to wait for it."""
        with self._lock:
            now = self._clock()
            moment = max(now, self._next)
            self._next = moment + self._interval
            return moment - now

    def hold(self, seconds: float) -> None:
        """Let nobody start within the next ``seconds``."""
        with self._lock:
            self._next = max(self._next, self._clock() + seconds)


def backoff_s(attempt: int, draw: Callable[[float, float], float] = random.uniform) -> float:
    """Return a random wait before retry number ``attempt``, from 0: up to 0.5 s, doubling, up to 8 s."""
    return draw(0, min(_MAX_BACKOFF_S, _BACKOFF_S * 2**attempt))


def retry_after_s(value: str, now: Callable[[], datetime] = lambda: datetime.now(UTC)) -> float | None:
    """Read a ``Retry-After`` header, seconds or a date; None when it is neither."""
    value = value.strip()
    if value.isascii() and value.isdigit():
        return float(value[:9])
    try:
        moment = parsedate_to_datetime(value)
    except (TypeError, ValueError):
        return None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return max(0.0, (moment - now()).total_seconds())


class SingleFlight:
    """Computes what several threads want at the same time once. A thread waits only for one that is computing."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._flights: dict[Hashable, Future[Any]] = {}

    def do(self, key: Hashable, compute: Callable[[], T]) -> T:
        """Return ``compute()``, or the result or the exception of a call with this key that is under way."""
        with self._lock:
            flight = self._flights.get(key)
            if flight is None:
                mine: Future[T] = Future()
                self._flights[key] = mine
        if flight is not None:
            shared: T = flight.result()
            return shared
        try:
            mine.set_result(compute())
        except BaseException as error:
            mine.set_exception(error)
        finally:
            with self._lock:
                del self._flights[key]
        return mine.result()
