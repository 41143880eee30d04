"""Fitting a conversation into the first context: which turns are shown, and which are dropped to fit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from search_r1.codec import Codec
from search_r1.datasets.rows import Row
from search_r1.rendered import split_rendered
from search_r1.templates import template_named
from verl.errors import ConfigError


class Refusal(StrEnum):
    """Why a row cannot become a prompt."""

    PROMPT_TOO_LONG = "prompt_too_long"
    """Instruction and current question alone exceed ``data.max_start_length``."""
    CONTEXT_UNPARSABLE = "context_unparsable"
    """A rendered prompt is too long and its history cannot be recognised."""


@dataclass(frozen=True, slots=True)
class FittedPrompt:
    """A row's first context. Exactly one of ``token_ids`` (non-empty) and ``refusal`` is meaningful."""

    token_ids: tuple[int, ...]
    dropped_turns: int = 0
    """Oldest question-answer pairs left out to fit."""
    refusal: Refusal | None = None


def shown_history(history: Sequence[str], turns: str | int, answers: bool) -> tuple[str, ...]:
    """Return what is shown of a history: ``all`` or the last turns, blanks for answers that are not shown."""
    if turns != "all" and not (isinstance(turns, int) and not isinstance(turns, bool) and turns >= 0):
        raise ConfigError(f"data.history: {turns!r} is neither 'all' nor a number of turns")
    first = 0 if turns == "all" else max(len(history) - 2 * int(turns), 0)
    return tuple(text if place % 2 == 0 or answers else "" for place, text in enumerate(history[first:]))


class PromptBuilder:
    """Renders and encodes rows with one template.

    Example: ``PromptBuilder(codec, "compact", history="all", max_start_length=2048).build(row).token_ids``.
    """

    def __init__(
        self, codec: Codec, template: str, history: str | int, max_start_length: int, history_answers: bool = True
    ) -> None:
        """``history`` is ``"all"`` or the number of last turns to show; 0 shows the question alone.

        ``template`` is a name, ``row`` or the path of a text file. Without ``history_answers`` only what was asked is
        shown of the turns.
        """
        shown_history((), history, history_answers)  # refuses what is no number of turns
        self._codec = codec
        self._template = None if template == "row" else template_named(template)
        self._history, self._answers = history, history_answers
        self._max_length = max_start_length

    def build(self, row: Row) -> FittedPrompt:
        """Return the longest form that fits: whole oldest turns are dropped, never instruction or question.

        Raises ConfigError when the template needs a column that the row lacks.
        """
        if self._template is None:
            return self._fit_rendered(row)
        if row.history is None:
            raise ConfigError(
                f"data.template: row {row.qid!r} carries no history column; set data.template=row to use its own prompt"
            )
        history = [self._codec.escape(text) for text in shown_history(row.history, self._history, self._answers)]
        question = self._codec.escape(row.question)
        template = self._template

        def render(dropped: int) -> tuple[int, ...]:
            content = template(history[2 * dropped :], question)
            return self._codec.encode_messages([{"role": "user", "content": content}])

        return self._drop_until_fit(render, len(history) // 2, Refusal.PROMPT_TOO_LONG)

    def _fit_rendered(self, row: Row) -> FittedPrompt:
        messages = row.messages
        if messages is None:
            raise ConfigError(
                f"data.template: row {row.qid!r} carries no rendered prompt; data.template=row needs the prompt column"
            )
        split = split_rendered(messages[-1]["content"])
        turns = [] if split is None else split.turns
        reason = Refusal.CONTEXT_UNPARSABLE if split is None else Refusal.PROMPT_TOO_LONG

        def render(dropped: int) -> tuple[int, ...]:
            if split is None or not dropped:
                return self._codec.encode_messages(messages)
            content = split.before + "".join(turns[dropped:]) + split.after
            return self._codec.encode_messages([*messages[:-1], {**messages[-1], "content": content}])

        return self._drop_until_fit(render, len(turns), reason)

    def _drop_until_fit(self, render: Callable[[int], tuple[int, ...]], n_turns: int, reason: Refusal) -> FittedPrompt:
        token_ids = render(0)
        if len(token_ids) <= self._max_length:
            return FittedPrompt(token_ids)
        low, high = 1, n_turns + 1  # the smallest sufficient number of dropped turns, n_turns + 1 meaning none is
        fitted: tuple[int, ...] = ()
        while low < high:
            middle = (low + high) // 2
            token_ids = render(middle)
            if len(token_ids) <= self._max_length:
                high, fitted = middle, token_ids
            else:
                low = middle + 1
        if low > n_turns:
            return FittedPrompt((), n_turns, reason)
        return FittedPrompt(fitted, low)
