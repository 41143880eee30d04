"""What the model is told when a turn had no action.

The texts name the tags without angle brackets: a hint can then never be mistaken for an action or an answer by a
reader of the raw text, and tools that count tag pairs in it count the model's own.
"""

from __future__ import annotations

from collections.abc import Mapping

from search_r1.parsing import TurnKind

_HOW_TO_GO_ON = (
    "To look something up, put a query between an opening and a closing search tag; "
    "to finish, put the answer between an opening and a closing answer tag."
)

HINTS: Mapping[TurnKind, str] = {
    TurnKind.EMPTY_QUERY: f"The search query was empty, so nothing was looked up. {_HOW_TO_GO_ON}",
    TurnKind.MALFORMED: f"A closing tag came without its opening tag, so nothing was done. {_HOW_TO_GO_ON}",
    TurnKind.LENGTH: f"The text was cut off before it searched or answered. {_HOW_TO_GO_ON}",
    TurnKind.EOS: f"The text ended before it searched or answered. {_HOW_TO_GO_ON}",
}


def hint(kind: TurnKind) -> str:
    """Return the hint for an invalid turn, without surrounding whitespace."""
    return HINTS[kind]
