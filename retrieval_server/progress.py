"""Progress of long work in a log: how much is done, how long the rest takes."""

from __future__ import annotations

import logging
import time

logger = logging.getLogger(__name__)


class Progress:
    """Logs a line every few seconds, and how long the stage took at its end."""

    def __init__(self, stage: str, begin: float = 0.0, every_s: float = 5.0) -> None:
        """``begin``: fraction that was done before, which says nothing about the speed of now."""
        self._stage = stage
        self._begin = begin
        self._every = every_s
        self._started = self._reported = time.monotonic()

    def update(self, fraction: float, detail: str = "") -> None:
        """Report that ``fraction`` of the stage is done, 0 to 1; cheap when it is not time for a line."""
        now = time.monotonic()
        if now - self._reported < self._every:
            return
        self._reported = now
        gained = fraction - self._begin
        left = f"about {duration((now - self._started) * (1 - fraction) / gained)} left" if gained > 0 else ""
        parts = [part for part in (f"{self._stage}: {100 * fraction:.0f} %", detail, left) if part]
        logger.info("%s", ", ".join(parts))

    def done(self, detail: str) -> None:
        """Report the end of the stage."""
        logger.info("%s: %s in %s", self._stage, detail, duration(time.monotonic() - self._started))


def duration(seconds: float) -> str:
    """Return seconds in words: ``12 s``, ``3 min 20 s``, ``2 h 5 min``.

    >>> duration(200)
    '3 min 20 s'
    """
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"
