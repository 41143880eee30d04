"""How busy an engine is kept: generations in flight, over time."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Load:
    """Running totals of a worker, in wall seconds; call it from one thread."""

    def __init__(self) -> None:
        self._in_flight = 0
        self._since = 0.0
        self.run_s = 0.0
        """Seconds in which the worker had episodes to run."""
        self.busy_s = 0.0
        """Seconds of those with at least one generation in flight."""
        self.in_flight_s = 0.0
        """Generations in flight, integrated over time."""

    @contextmanager
    def running(self) -> Iterator[None]:
        """Count the time inside as that of running episodes."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.run_s += time.perf_counter() - started

    @contextmanager
    def generating(self) -> Iterator[None]:
        """Count one generation as in flight."""
        self._change(1)
        try:
            yield
        finally:
            self._change(-1)

    def totals(self) -> dict[str, float]:
        """Return the totals by name."""
        return {"run_s": self.run_s, "busy_s": self.busy_s, "in_flight_s": self.in_flight_s}

    def _change(self, by: int) -> None:
        now = time.perf_counter()
        if self._in_flight:
            self.busy_s += now - self._since
            self.in_flight_s += self._in_flight * (now - self._since)
        self._since = now
        self._in_flight += by
