"""Ending a run politely: the first SIGTERM or SIGINT asks, the second one ends."""

from __future__ import annotations

import logging
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

logger = logging.getLogger(__name__)


class StopRequest:
    """``number`` is None until a signal came. Use ``with request.listening():`` in the main thread."""

    def __init__(self) -> None:
        self.number: int | None = None

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Catch SIGTERM and SIGINT inside the block; the previous handlers come back after it."""
        previous = {number: signal.signal(number, self._note) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def raise_if_requested(self) -> None:
        """Raise ``SystemExit(128 + signal)``, the shell's exit status for a signal, if one came."""
        if self.number is not None:
            raise SystemExit(128 + self.number)

    def _note(self, number: int, _: FrameType | None) -> None:
        logger.warning("signal %d: the run saves after this step and stops; once more stops it at once", number)
        self.number = number
        signal.signal(number, signal.SIG_DFL)
