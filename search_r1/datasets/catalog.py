"""Every source that can be imported, by the name that ``scripts/prepare_data.py --dataset`` takes."""

from __future__ import annotations

from search_r1.datasets import (
    canard,
    cast,
    coqa,
    faithdial,
    ikat,
    inscit,
    multidoc2dial,
    qrecc,
    quac,
    single_turn,
    topiocqa,
    unified,
)
from search_r1.datasets.source import Source
from verl.registry import Registry

_ALL = (
    topiocqa.SOURCE,
    qrecc.SOURCE,
    inscit.SOURCE,
    multidoc2dial.SOURCE,
    multidoc2dial.DOC2DIAL,
    faithdial.SOURCE,
    *cast.SOURCES,
    *ikat.SOURCES,
    coqa.SOURCE,
    quac.SOURCE,
    quac.OPEN,
    canard.SOURCE,
    *single_turn.SOURCES,
    unified.OWN,
    unified.PUBLISHED,
)
SOURCES: Registry[Source] = Registry("data set", {source.name: source for source in _ALL})
