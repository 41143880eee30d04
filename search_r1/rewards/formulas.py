"""The reward formulas, each a pure function of an episode view. Presets and answer metrics are the two tables below.

A part without supervision is None and contributes nothing; it is reported as not available, never as a zero.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from search_r1.config import RewardConfig
from search_r1.rewards.sources import metric_of
from search_r1.rewards.text import Metric, best, exact_match, f1, f1_set, sub_exact_match
from search_r1.rewards.view import EpisodeView
from verl.registry import Registry
from verl.types import Reward

ANSWER_METRICS: Registry[Metric] = Registry(
    "answer metric", {"em": exact_match, "sub_em": sub_exact_match, "f1": f1, "f1_chatr1": f1_set}
)


@dataclass(frozen=True, slots=True)
class FormulaInput:
    """What a formula may use."""

    view: EpisodeView
    config: RewardConfig
    answer: float
    """Best answer score over the references."""
    word_f1: Metric
    """The F1 of queries against rewrites, in the configured mode."""


Formula = Callable[[FormulaInput], Reward]


def answer_metric(view_source: str, config: RewardConfig) -> str:
    """Return the name in ``ANSWER_METRICS`` that scores answers of this data source."""
    name = metric_of(view_source, config.function)
    return "f1_chatr1" if name == "f1" and config.f1_mode == "chatr1" else name


def plain(given: FormulaInput) -> Reward:
    """The answer score alone (``verl.trainer.main_ppo``)."""
    return Reward(given.answer, {"answer": given.answer, **_watched(given)})


def chatr1(given: FormulaInput) -> Reward:
    """answer + w_rewrite * intent + w_retrieval * hit + w_structure * valid; 0 without an answer (arXiv 2510.13312).

    With ``intent_placement=turn`` the intent share is paid on the turn that wrote the best query.
    """
    view, config = given.view, given.config
    parts: dict[str, float | None] = {"answer": given.answer, **_watched(given)}
    if view.prediction is None:
        return Reward(0.0, parts)
    total = given.answer
    total += config.retrieval_score * (parts["retrieval"] or 0.0)
    total += config.structure_format_score * (parts["structure"] or 0.0)
    intent = view.intent(given.word_f1)
    turn_rewards = {}
    if intent is not None:
        share = config.rewrite_score * intent[0]
        total += share
        if config.intent_placement == "turn" and share > 0:
            turn_rewards[intent[1]] = share
    return Reward(total, parts, turn_rewards)


def search_r1(given: FormulaInput) -> Reward:
    """Search-R1 v0.3: a right answer gives 1, less the structure weight when the structure is invalid; a wrong one
    gives the structure weight when valid (plus the retrieval weight when a passage held the answer), else the final
    weight; no answer in an invalid structure gives 0. Right is an answer score of 1. The structure is the strict one.
    """
    view, config = given.view, given.config
    valid = view.structure(relaxed=False).valid
    found = view.retrieved_answer()
    parts = {"answer": given.answer, **_watched(given), "structure": float(valid), "retrieval": float(found)}
    if given.answer == 1.0:
        total = 1.0 if valid else 1.0 - config.structure_format_score
    elif valid:
        total = config.structure_format_score + (config.retrieval_score if found else 0.0)
    else:
        total = 0.0 if view.prediction is None else config.final_format_score
    return Reward(total, parts)


FORMULAS: Registry[Formula] = Registry("reward preset", {"none": plain, "chatr1": chatr1, "search_r1": search_r1})

AUTO_FORMULA: Mapping[str, str] = {"em": "search_r1", "sub_em": "search_r1", "f1": "chatr1", "f1_chatr1": "chatr1"}
"""``preset=auto``: answer metric -> formula."""


def score(view: EpisodeView, config: RewardConfig) -> Reward:
    """Score one episode. A failed one (retrieval, engine, deadline) gets 0 without parts: it says nothing."""
    if view.failed:
        return Reward(0.0)
    metric = answer_metric(view.row.data_source, config)
    given = FormulaInput(
        view=view,
        config=config,
        answer=best(ANSWER_METRICS[metric], view.prediction, view.row.answers),
        word_f1=f1_set if config.f1_mode == "chatr1" else f1,
    )
    return FORMULAS[AUTO_FORMULA[metric] if config.preset == "auto" else config.preset](given)


def describe(source: str, config: RewardConfig) -> str:
    """Return the formula used for a data source in one line, for the start of a run."""
    metric = answer_metric(source, config)
    name = AUTO_FORMULA[metric] if config.preset == "auto" else config.preset
    if name == "none":
        return f"{source}: {metric}"
    weights = ", ".join(
        f"{key} {getattr(config, key):g}"
        for key in ("rewrite_score", "retrieval_score", "structure_format_score", "final_format_score")
    )
    return f"{source}: {name} formula over {metric} ({weights}, intent {config.intent_placement})"


def _watched(given: FormulaInput) -> dict[str, float | None]:
    """The parts that are reported whether or not they are paid."""
    hit, intent = given.view.retrieved_gold(), given.view.intent(given.word_f1)
    return {
        "intent": None if intent is None else intent[0],
        "retrieval": None if hit is None else float(hit),
        "structure": float(given.view.structure().valid),
    }
