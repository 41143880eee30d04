"""The tables of what can be served and what can be built: one row per backend.

A row names its backend, which is imported when it is used, so that serving one needs the libraries of no other.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any, TypeVar, cast

from retrieval_server.building import BuildPlan
from retrieval_server.errors import SettingsError
from retrieval_server.manifest import Manifest
from retrieval_server.planning import Estimate
from retrieval_server.specs import Spec
from retrieval_server.types import LoadProgress, Retriever

T = TypeVar("T")


Build = Callable[[BuildPlan], Manifest]
Plan = Callable[[BuildPlan, int | None], Estimate]

_RETRIEVERS = {
    "bm25": "bm25.Bm25Retriever",
    "lucene": "lucene.LuceneRetriever",
    "dense": "dense.DenseRetriever",
    "hybrid": "hybrid.HybridRetriever",
    "rerank": "rerank.RerankRetriever",
    "web": "web.retriever.WebRetriever",
    "proxy": "proxy.ProxyRetriever",
}
"""Backend -> the class below this package whose ``load(spec, progress)`` takes its own kind of spec."""
_BUILDERS = {"bm25": "bm25_build.build", "dense": "dense_build.build"}
"""Kind of index -> the function that builds it."""
_PLANNERS = {"bm25": "bm25_plan.estimate", "dense": "dense_plan.estimate"}
"""Kind of index -> the function that says what building it for so many passages (None: the corpus's) would take."""

INDEX_KINDS = tuple(_BUILDERS)


def load(spec: Spec, progress: LoadProgress) -> Retriever:
    """Return the retriever that a spec describes, loaded and ready."""
    retriever: Retriever = _attribute(_RETRIEVERS[spec.name]).load(spec, progress)
    return retriever


def builder(kind: str) -> Build:
    """Return the function that builds an index of one of ``INDEX_KINDS``."""
    return cast(Build, _attribute(_BUILDERS[kind]))


def planner(kind: str) -> Plan:
    """Return the function that estimates the building of an index of one of ``INDEX_KINDS``."""
    return cast(Plan, _attribute(_PLANNERS[kind]))


def _attribute(place: str) -> Any:
    module, _, name = place.rpartition(".")
    return getattr(import_module(f"{__name__}.{module}"), name)


def pick(table: Mapping[str, T], name: str, flag: str) -> T:
    """Return a row of a table; raises SettingsError naming the known ones and the closest."""
    if name in table:
        return table[name]
    near = difflib.get_close_matches(name, list(table), n=1, cutoff=0.5)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    raise SettingsError(f"{flag} {name!r} is unknown{hint}; known: {', '.join(sorted(table))}")
