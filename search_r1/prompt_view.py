"""Showing the exact prompt of a row: the text that is tokenized, how long it is, what was left out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from search_r1.datasets.rows import Row
from search_r1.prompts import FittedPrompt, PromptBuilder
from verl.types import Tokenizer


def view(row: Row, builder: PromptBuilder, tokenizer: Tokenizer) -> str:
    """Return a line about the prompt and the prompt itself, special tokens included."""
    fitted = builder.build(row)
    return f"{headline(row, fitted)}\n{tokenizer.decode(list(fitted.token_ids), skip_special_tokens=False)}"


def headline(row: Row, fitted: FittedPrompt) -> str:
    """Return what happened to the row's prompt."""
    if fitted.refusal is not None:
        return f"{row.qid}: refused, {fitted.refusal.value}"
    left_out = f", {fitted.dropped_turns} oldest turns left out" if fitted.dropped_turns else ""
    return f"{row.qid}: {len(fitted.token_ids)} tokens{left_out}"


@dataclass(frozen=True, slots=True)
class Fit:
    """How the prompts of many rows fit."""

    rows: int
    shortened: int
    refused: int


def fit(rows: Sequence[Row], builder: PromptBuilder) -> Fit:
    """Build every prompt and count."""
    outcomes = Counter[str]()
    for row in rows:
        fitted = builder.build(row)
        outcomes["refused" if fitted.refusal else "shortened" if fitted.dropped_turns else "whole"] += 1
    return Fit(len(rows), outcomes["shortened"], outcomes["refused"])
