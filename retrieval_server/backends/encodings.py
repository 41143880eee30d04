"""What an encoder does around its transformer: pooling, normalisation, prefixes. Families and how one is chosen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from retrieval_server.encode_options import Pooling


@dataclass(frozen=True, slots=True)
class Encoding:
    """How a text becomes a vector, but for the model. Queries and passages differ in their prefix only."""

    pooling: Pooling
    normalize: bool
    """To length 1, so that the inner product is the cosine."""
    query_prefix: str = ""
    passage_prefix: str = ""


@dataclass(frozen=True, slots=True)
class Declared:
    """What somebody says about an encoding: a user, or the model's folder. None: nothing said."""

    pooling: Pooling | None = None
    normalize: bool | None = None
    query_prefix: str | None = None
    passage_prefix: str | None = None


FAMILIES = {
    "e5": Encoding("mean", True, "query: ", "passage: "),
    "bge": Encoding("cls", True, "Represent this sentence for searching relevant passages: "),
    "gte": Encoding("mean", True),
    # As in the published builder, which normalises every encoder but DPR.
    "contriever": Encoding("mean", True),
    "jina": Encoding("mean", True),
    "dpr": Encoding("pooler", False),
    "plain": Encoding("mean", True),
}


def family_of(*names: str | None) -> str:
    """Return the family that the first telling name contains ("intfloat/e5-base-v2": e5), else plain."""
    for name in names:
        for family in FAMILIES:
            if name and family in name.lower():
                return family
    return "plain"


def combine(family: str, declared: Sequence[Declared]) -> Encoding:
    """Return the family's encoding with each field replaced by the first declaration that says something about it."""

    def first(field: str) -> object:
        said = (getattr(each, field) for each in declared)
        return next((value for value in said if value is not None), getattr(FAMILIES[family], field))

    fields = {field: first(field) for field in ("pooling", "normalize", "query_prefix", "passage_prefix")}
    return Encoding(**fields)  # type: ignore[arg-type]
