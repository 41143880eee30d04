"""The reward formulas, each a pure function of an episode's parts, in one explicit table.

A formula of one's own is named by import path (``reward_model.preset=package.module:function``) and has the same form.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from search_r1.config import RewardConfig
from search_r1.rewards.parts import BONUSES, COSTS, PartInput, answer_metric, costs, measure
from search_r1.rewards.text import NORMALISERS
from search_r1.rewards.view import EpisodeView
from verl.registry import Registry
from verl.types import Reward


@dataclass(frozen=True, slots=True)
class FormulaInput:
    """What a formula may use."""

    view: EpisodeView
    config: RewardConfig
    parts: Mapping[str, float | None]
    """Unweighted, see ``parts.measure``; ``answer`` is always a number."""
    intent_turn: int
    """The turn that wrote the best query; -1 without one."""

    @property
    def answer(self) -> float:
        """Best answer score over the references."""
        return self.parts["answer"] or 0.0


Formula = Callable[[FormulaInput], Reward]


def plain(given: FormulaInput) -> Reward:
    """The answer score alone (``verl.trainer.main_ppo``)."""
    return Reward(given.answer, given.parts)


def chatr1(given: FormulaInput) -> Reward:
    """answer + the weighted bonuses, nothing of it without an answer, less the costs (arXiv 2510.13312).

    The paper's reward is answer + alpha * intent; the published code adds retrieval and structure. With
    ``intent_placement=turn`` the intent share is paid on the turn that wrote the best query.
    """
    parts, config = given.parts, given.config
    total, turn_rewards = 0.0, {}
    if given.view.prediction is not None:
        shares = {name: getattr(config, key) * (parts[name] or 0.0) for name, (_, key) in BONUSES.items()}
        total = config.answer_score * given.answer + sum(shares.values())
        if config.intent_placement == "turn" and shares["intent"] > 0:
            turn_rewards[given.intent_turn] = shares["intent"]
    return Reward(total - costs(parts, config), parts, turn_rewards)


def search_r1(given: FormulaInput) -> Reward:
    """Search-R1 v0.3: a right answer gives 1, less the structure weight when the structure is invalid; a wrong one
    gives the structure weight when valid (plus the retrieval weight when a passage held the answer), else the final
    weight; no answer in an invalid structure gives 0. Right is an answer score of 1. The structure is the strict one.
    Costs are taken off.
    """
    view, config = given.view, given.config
    valid = view.structure(relaxed=False).valid
    found = view.retrieved_answer(NORMALISERS[config.normaliser])
    parts = {**given.parts, "structure": float(valid), "retrieval": float(found)}
    if given.answer == 1.0:
        total = 1.0 if valid else 1.0 - config.structure_format_score
    elif valid:
        total = config.structure_format_score + (config.retrieval_score if found else 0.0)
    else:
        total = 0.0 if view.prediction is None else config.final_format_score
    return Reward(total - costs(parts, config), parts)


FORMULAS: Registry[Formula] = Registry("reward preset", {"none": plain, "chatr1": chatr1, "search_r1": search_r1})

AUTO_FORMULA: Mapping[str, str] = {"em": "search_r1", "sub_em": "search_r1", "f1": "chatr1", "f1_chatr1": "chatr1"}
"""``preset=auto``: answer metric -> formula; a metric of one's own goes into chatr1's."""


def formula_name(source: str, config: RewardConfig) -> str:
    """Return the name in ``FORMULAS`` that scores rows of this data source."""
    metric = answer_metric(source, config)
    return AUTO_FORMULA.get(metric, "chatr1") if config.preset == "auto" else config.preset


def score(view: EpisodeView, config: RewardConfig, judged: float | None = None) -> Reward:
    """Score one episode. A failed one (retrieval, engine, deadline) gets 0 without parts: it says nothing.

    ``judged`` is the judge's score where it was asked.
    """
    if view.failed:
        return Reward(0.0)
    material = PartInput(view, config, judged)
    found = view.intent(material.word_f1, material.form)
    given = FormulaInput(view, config, measure(material), -1 if found is None else found[1])
    return FORMULAS[formula_name(view.row.data_source, config)](given)


def describe(source: str, config: RewardConfig) -> str:
    """Return the formula used for a data source in one line, for the start of a run."""
    metric, name = answer_metric(source, config), formula_name(source, config)
    if name == "none":
        return f"{source}: {metric}"
    keys = [*(key for _, key in (*BONUSES.values(), *COSTS.values())), "final_format_score"]
    weighed = [key for key in keys if getattr(config, key)]
    if config.answer_score != 1:
        weighed.insert(0, "answer_score")
    weights = ", ".join(f"{key} {getattr(config, key):g}" for key in weighed) or "answer alone"
    return f"{source}: {name} formula over {metric} ({weights}; intent {config.intent_placement})"
