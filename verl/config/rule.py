"""What a rule about several keys is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Rule:
    """One cross-field rule; ``predicate`` is true when all is well."""

    name: str
    keys: tuple[str, ...]
    """What it reads; the first is the one to blame. It is skipped when one of them has failed its own check."""
    predicate: Callable[[Any], bool]
    message: str
    """What must hold, with ``{key.path}`` standing for values."""
    fix: str
