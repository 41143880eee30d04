"""API keys: from the environment, into the request, and nowhere else."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from urllib.parse import quote, quote_plus

from retrieval_server.errors import SettingsError

_MIN_REDACTED = 6
"""A shorter value is no key, and cutting it out would garble texts."""


class Credentials:
    """The values of some environment variables. Its ``repr`` does not show them."""

    def __init__(self, values: Sequence[str]) -> None:
        self._values = tuple(values)
        spellings = {form for value in values for form in (value, quote(value, safe=""), quote_plus(value))}
        self._spellings = sorted((form for form in spellings if len(form) >= _MIN_REDACTED), key=len, reverse=True)

    @classmethod
    def from_environment(cls, names: Sequence[str], environment: Mapping[str, str] = os.environ) -> Credentials:
        """Read the variables; raises SettingsError that names the missing ones."""
        values = [environment.get(name, "").strip() for name in names]
        missing = [name for name, value in zip(names, values, strict=True) if not value]
        if missing:
            raise SettingsError(
                f"the environment has no {' and no '.join(missing)}: export it before the server starts"
            )
        for name, value in zip(names, values, strict=True):
            if not (value.isascii() and value.isprintable()) or " " in value:
                raise SettingsError(
                    f"{name} holds characters that no key has (blanks, line ends, non-ASCII): set it again"
                )
        return cls(values)

    def __repr__(self) -> str:
        return f"Credentials({len(self._values)} hidden)"

    def reveal(self) -> tuple[str, ...]:
        """Return the values, for the request that is just being sent."""
        return self._values

    def redact(self, body: bytes) -> bytes:
        """Cut the values out of what an API answered, so that nothing made from it can hold them."""
        for spelling in self._spellings:
            body = body.replace(spelling.encode(), b"***")
        return body
