"""The tables of what can be served and what can be built: one row per backend.

Each row imports its backend when it is used, so that serving one needs the libraries of no other.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from retrieval_server.errors import SettingsError
from retrieval_server.manifest import Manifest, Verify
from retrieval_server.types import LoadProgress, Retriever

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Source:
    """What a backend is loaded from."""

    index_path: Path
    corpus_path: Path
    verify: Verify = "auto"


@dataclass(frozen=True, slots=True)
class BuildPlan:
    """What an index is built from, with the options that the command line has for every backend."""

    corpus_path: Path
    save_dir: Path
    """The index becomes the folder ``<save_dir>/<method>``."""
    k1: float
    b: float
    stopwords: str
    stemmer: str
    force: bool
    """Build even when the folder already holds exactly this index."""


def _load_bm25(source: Source, progress: LoadProgress) -> Retriever:
    from retrieval_server.backends.bm25 import Bm25Retriever

    return Bm25Retriever.load(source.index_path, source.corpus_path, progress, source.verify)


def _build_bm25(plan: BuildPlan) -> Manifest:
    from retrieval_server.backends.bm25_build import build

    return build(plan)


LOADERS: Mapping[str, Callable[[Source, LoadProgress], Retriever]] = {"bm25": _load_bm25}
BUILDERS: Mapping[str, Callable[[BuildPlan], Manifest]] = {"bm25": _build_bm25}


def pick(table: Mapping[str, T], name: str, flag: str) -> T:
    """Return a row of a table; raises SettingsError naming the known ones and the closest."""
    if name in table:
        return table[name]
    near = difflib.get_close_matches(name, list(table), n=1, cutoff=0.5)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    raise SettingsError(f"{flag} {name!r} is unknown{hint}; known: {', '.join(sorted(table))}")
