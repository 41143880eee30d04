"""What one model turn says: a pure function of the turn's own text and of why generation ended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from search_r1.tags import ANSWER, SEARCH


class TurnKind(StrEnum):
    """Outcome of one generation; the values are what ``Trajectory.turns`` holds."""

    SEARCH = "search"
    ANSWER = "answer"
    EMPTY_QUERY = "empty_query"
    MALFORMED = "malformed"
    """A closing tag without its opening tag in this turn."""
    LENGTH = "length"
    """The cap was reached without an action."""
    EOS = "eos"
    """The model ended its turn without an action."""

    @property
    def invalid(self) -> bool:
        """True when the turn is spent without an action: the model gets a hint."""
        return self not in (TurnKind.SEARCH, TurnKind.ANSWER)


@dataclass(frozen=True, slots=True)
class TurnOutcome:
    """One parsed turn. Example: ``<search> who? </search>`` gives ``(SEARCH, "who?", 23)``."""

    kind: TurnKind
    content: str | None
    """The stripped query or answer; None when the turn has no action."""
    end: int | None
    """Index in the turn's text just behind the deciding closing tag; None when there is none."""


def parse_turn(text: str, finish: str, actions: Sequence[str] = (SEARCH, ANSWER)) -> TurnOutcome:
    """Parse a turn's text (end-of-sequence token excluded).

    The first closing tag that has an opening tag of its kind before it decides; of nested openings the innermost
    counts. Tags are exact and lower case. A model-written information block has no meaning here.

    Args:
        text: what the model wrote in this turn and nothing else.
        finish: ``stop``, ``eos`` or ``length``, as the engine reports it.
        actions: the tags that act, ``("answer",)`` in an episode without tools.
    """
    closings = sorted(_positions(text, [f"</{action}>" for action in actions]))
    for position, closing in closings:
        opening = f"<{closing[2:]}"
        start = text.rfind(opening, 0, position)
        if start >= 0:
            content = text[start + len(opening) : position].strip()
            return TurnOutcome(_action(closing, content), content, position + len(closing))
    if closings:
        position, closing = closings[0]
        return TurnOutcome(TurnKind.MALFORMED, None, position + len(closing))
    if finish == "length":
        return TurnOutcome(TurnKind.LENGTH, None, None)
    if finish == "eos":
        return TurnOutcome(TurnKind.EOS, None, None)
    return TurnOutcome(TurnKind.MALFORMED, None, None)


def _action(closing: str, content: str) -> TurnKind:
    if closing == f"</{ANSWER}>":
        return TurnKind.ANSWER
    return TurnKind.SEARCH if content else TurnKind.EMPTY_QUERY


def _positions(text: str, needles: Sequence[str]) -> list[tuple[int, str]]:
    found = []
    for needle in needles:
        position = text.find(needle)
        while position >= 0:
            found.append((position, needle))
            position = text.find(needle, position + 1)
    return found
