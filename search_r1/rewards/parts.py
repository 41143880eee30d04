"""The parts a reward is made of, in one explicit table: what each measures and which config key weighs it.

A part without supervision is None: it pays nothing and is reported as not available, never as a zero.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from search_r1.config import RewardConfig
from search_r1.rewards.sources import metric_of
from search_r1.rewards.text import ANSWER_METRICS, NORMALISERS, Metric, Normalise, best, exact_match, f1, f1_set
from search_r1.rewards.text import sub_exact_match as sub_em
from search_r1.rewards.view import EpisodeView


@dataclass(frozen=True, slots=True)
class PartInput:
    """What a part may use."""

    view: EpisodeView
    config: RewardConfig
    judged: float | None = None
    """The judge's score in [0, 1]; None when it was not asked."""

    @property
    def form(self) -> Normalise:
        """The configured normaliser."""
        return NORMALISERS[self.config.normaliser]

    @property
    def word_f1(self) -> Metric:
        """The F1 of queries against rewrites, in the configured mode."""
        return f1_set if self.config.f1_mode == "chatr1" else f1

    def answer_score(self, metric: Metric) -> float:
        """Return the best score of the answer over the references."""
        return best(metric, self.view.prediction, self.view.row.answers, self.form)


Part = Callable[[PartInput], float | None]


def answer_metric(view_source: str, config: RewardConfig) -> str:
    """Return the name in ``ANSWER_METRICS`` that scores answers of this data source."""
    name = metric_of(view_source, config.function)
    return "f1_chatr1" if name == "f1" and config.f1_mode == "chatr1" else name


def answer(given: PartInput) -> float:
    """The answer under the metric of ``reward_model.function``, best reference."""
    return given.answer_score(ANSWER_METRICS[answer_metric(given.view.row.data_source, given.config)])


def intent(given: PartInput) -> float | None:
    """The best executed query against the gold rewrite (R_intent of arXiv 2510.13312)."""
    found = given.view.intent(given.word_f1, given.form)
    return None if found is None else found[0]


def retrieval(given: PartInput) -> float | None:
    """1 when a gold passage was shown, matched as ``reward_model.retrieval_match`` says."""
    found = given.view.gold(given.config.retrieval_match, form=given.form)
    return None if found is None else found.hit


def recall(given: PartInput) -> float | None:
    """Share of the gold passages that was shown."""
    found = given.view.gold(given.config.retrieval_match, form=given.form)
    return None if found is None else found.recall


def structure(given: PartInput) -> float:
    """1 for a valid think/search/answer structure, ChatR1's relaxed form."""
    return float(given.view.structure().valid)


def judge(given: PartInput) -> float | None:
    """The judge's score of the answer."""
    return given.judged


def searches(given: PartInput) -> float:
    """Executed searches beyond those that are free."""
    return float(max(0, len(given.view.searches) - given.config.free_searches))


def invalid(given: PartInput) -> float:
    """Turns spent without an action."""
    return float(given.view.invalid_actions)


BONUSES: Mapping[str, tuple[Part, str]] = {
    "intent": (intent, "rewrite_score"),
    "retrieval": (retrieval, "retrieval_score"),
    "recall": (recall, "recall_score"),
    "structure": (structure, "structure_format_score"),
    "judge": (judge, "judge_score"),
}
"""What is added to the answer's score: name -> (part, key of its weight under ``reward_model``)."""

COSTS: Mapping[str, tuple[Part, str]] = {
    "searches": (searches, "search_cost"),
    "invalid": (invalid, "invalid_cost"),
}
"""What is taken off, whether or not there is an answer: name -> (part, key of its weight)."""

WATCHED: Mapping[str, Part] = {
    "em": lambda given: given.answer_score(exact_match),
    "sub_em": lambda given: given.answer_score(sub_em),
    "f1": lambda given: given.answer_score(f1),
}
"""Logged beside the parts that can be paid."""


def measure(given: PartInput) -> dict[str, float | None]:
    """Return every part, unweighted, paid or not."""
    parts: dict[str, Part] = {"answer": answer, **WATCHED}
    parts |= {name: part for name, (part, _) in (*BONUSES.items(), *COSTS.items())}
    return {name: part(given) for name, part in parts.items()}


def costs(parts: Mapping[str, float | None], config: RewardConfig) -> float:
    """Return what the episode's searches and invalid actions cost."""
    return sum((parts[name] or 0.0) * float(getattr(config, key)) for name, (_, key) in COSTS.items())
