"""Which answer metric belongs to which dataset, by the row's ``data_source``: the published table, and ours."""

from __future__ import annotations

from collections.abc import Mapping

from search_r1.datasets.rows import DEFAULT_SOURCE
from verl.errors import DataError
from verl.registry import closest

_EM = "nq triviaqa popqa hotpotqa 2wikimultihopqa musique bamboogle strategyqa web_questions"
_F1 = """
topiocqa qrecc wow cast2019 cast2020 cast2021 cast2022 ikat2023 ikat2024 quac orquac canard doc2dial mtfiqa
mtclapnq mtgovt mtibmcloud ultrachat inscit faithdial coqa md2d mantis icconv
slupart/qrecc-rewrite-mistral slupart/topiocqa-rewrite-mistral slupart/cast20-rewrite-mistral
slupart/cast22-rewrite-mistral slupart/ikat23-rewrite-mistral
"""

METRIC_OF_SOURCE: Mapping[str, str] = {
    **dict.fromkeys(_EM.split(), "em"),
    **dict.fromkeys(_F1.split(), "f1"),
    DEFAULT_SOURCE: "f1",
}
"""``data_source`` -> name in ``ANSWER_METRICS``."""


def metric_of(source: str, function: str) -> str:
    """Return the answer metric of a row: ``function``, or for ``auto`` that of its source; raises DataError."""
    if function != "auto":
        return function
    if source in METRIC_OF_SOURCE:
        return METRIC_OF_SOURCE[source]
    raise DataError(
        f"data_source {source!r} has no answer metric{closest(source, sorted(METRIC_OF_SOURCE))}; "
        "set reward_model.function=f1 or em, or name a known source in the data"
    )
