"""One explicit table per kind of extension: name -> object. No decorators: what exists can be read in one place."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Iterator, Mapping
from typing import Any, Generic, TypeVar

from verl.errors import ConfigError

T = TypeVar("T")


def closest(name: str, known: list[str]) -> str:
    """Return `` (did you mean 'x'?)`` for the nearest known name, or an empty string."""
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f" (did you mean {near[0]!r}?)" if near else ""


class Registry(Generic[T]):
    """A read-only table of named objects of one kind.

    ``Registry("advantage estimator", {"gae": gae, "grpo": grpo})["gae"]``. A name of the form ``module:attribute``
    that is not in the table is imported, so code outside the tree needs no registration.
    """

    def __init__(self, kind: str, entries: Mapping[str, T]) -> None:
        self.kind = kind
        self._entries = dict(entries)

    def __getitem__(self, name: str) -> T:
        """Return the entry; raise ConfigError naming the known ones when there is none."""
        if name in self._entries:
            return self._entries[name]
        if ":" in name:
            loaded: T = import_object(name, self.kind)
            return loaded
        known = sorted(self._entries)
        raise ConfigError(f"unknown {self.kind} {name!r}{closest(name, known)}; known: {', '.join(known)}")

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def names(self) -> list[str]:
        """Return the table's names, sorted."""
        return sorted(self._entries)


def import_object(path: str, kind: str) -> Any:
    """Import ``module:attribute``; raise ConfigError that says which half is wrong."""
    module_name, _, attribute = path.partition(":")
    if not attribute or not all(part.isidentifier() for part in module_name.split(".")):
        raise ConfigError(f"{kind}: {path!r} is not of the form 'module:attribute'")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ConfigError(f"{kind}: cannot import module {module_name!r} of {path!r}: {error}") from error
    if not hasattr(module, attribute):
        raise ConfigError(f"{kind}: module {module_name!r} has no attribute {attribute!r}")
    return getattr(module, attribute)
