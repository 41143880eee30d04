"""The tables of what can be served and what can be built: one row per backend.

Each row imports its backend when it is used, so that serving one needs the libraries of no other.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from retrieval_server.building import BuildPlan
from retrieval_server.errors import SettingsError
from retrieval_server.manifest import Manifest
from retrieval_server.planning import Estimate
from retrieval_server.specs import Spec
from retrieval_server.types import LoadProgress, Retriever

T = TypeVar("T")


def _load_bm25(spec: Any, progress: LoadProgress) -> Retriever:
    from retrieval_server.backends.bm25 import Bm25Retriever

    return Bm25Retriever.load(spec.index_path, spec.corpus_path, progress, spec.verify)


def _load_lucene(spec: Any, progress: LoadProgress) -> Retriever:
    from retrieval_server.backends.lucene import LuceneRetriever

    return LuceneRetriever.load(spec, progress)


def _load_web(spec: Any, progress: LoadProgress) -> Retriever:
    from retrieval_server.backends.web.retriever import WebRetriever

    return WebRetriever.load(spec, progress)


def _load_dense(spec: Any, progress: LoadProgress) -> Retriever:
    from retrieval_server.backends.dense import DenseRetriever

    return DenseRetriever.load(spec, progress)


def _build_bm25(plan: BuildPlan) -> Manifest:
    from retrieval_server.backends.bm25_build import build

    return build(plan)


def _build_dense(plan: BuildPlan) -> Manifest:
    from retrieval_server.backends.dense_build import build

    return build(plan)


def _load_hybrid(spec: Any, progress: LoadProgress) -> Retriever:
    from retrieval_server.backends.hybrid import HybridRetriever

    return HybridRetriever.load(spec, progress)


def _load_rerank(spec: Any, progress: LoadProgress) -> Retriever:
    from retrieval_server.backends.rerank import RerankRetriever

    return RerankRetriever.load(spec, progress)


def _load_proxy(spec: Any, progress: LoadProgress) -> Retriever:
    from retrieval_server.backends.proxy import ProxyRetriever

    return ProxyRetriever.load(spec, progress)


LOADERS: Mapping[str, Callable[[Any, LoadProgress], Retriever]] = {
    "bm25": _load_bm25,
    "lucene": _load_lucene,
    "dense": _load_dense,
    "hybrid": _load_hybrid,
    "rerank": _load_rerank,
    "web": _load_web,
    "proxy": _load_proxy,
}
"""Backend name -> function of its own kind of spec."""
BUILDERS: Mapping[str, Callable[[BuildPlan], Manifest]] = {"bm25": _build_bm25, "dense": _build_dense}


def _plan_bm25(plan: BuildPlan, passages: int | None) -> Estimate:
    from retrieval_server.backends.bm25_plan import estimate

    return estimate(plan, passages)


def _plan_dense(plan: BuildPlan, passages: int | None) -> Estimate:
    from retrieval_server.backends.dense_plan import estimate

    return estimate(plan, passages)


PLANNERS: Mapping[str, Callable[[BuildPlan, int | None], Estimate]] = {"bm25": _plan_bm25, "dense": _plan_dense}
"""Kind of index -> what building it for so many passages (None: those of the corpus) would take."""


def load(spec: Spec, progress: LoadProgress) -> Retriever:
    """Return the retriever that a spec describes, loaded and ready."""
    return pick(LOADERS, spec.name, "backend")(spec, progress)


def pick(table: Mapping[str, T], name: str, flag: str) -> T:
    """Return a row of a table; raises SettingsError naming the known ones and the closest."""
    if name in table:
        return table[name]
    near = difflib.get_close_matches(name, list(table), n=1, cutoff=0.5)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    raise SettingsError(f"{flag} {name!r} is unknown{hint}; known: {', '.join(sorted(table))}")
