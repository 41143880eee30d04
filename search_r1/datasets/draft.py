"""What an importer yields: a row, or why a record of the source became none."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum

from search_r1.datasets.fields import Fields
from search_r1.datasets.rows import Row
from verl.errors import DataError


class Reason(StrEnum):
    """Why a record is no row."""

    MALFORMED = "malformed"
    """It breaks the format of its source; the detail names file, line and column. Stops a strict import."""
    REPEATED_TURN = "repeated_turn"
    """The source lists the turn again (CAsT 2022 repeats what its paths share); its replies are in the first row."""
    DUPLICATE_ID = "duplicate_id"
    """Another row of the split has this id."""


@dataclass(frozen=True, slots=True)
class Dropped:
    """A record that became no row."""

    reason: Reason
    place: str
    """File and line."""
    detail: str = ""


Draft = Row | Dropped
"""A row may have no reference yet (``answers == ()``): it can still serve to measure retrieval."""


def attempt(records: Iterable[Fields | DataError], parse: Callable[[Fields], Iterable[Draft]]) -> Iterator[Draft]:
    """Yield what ``parse`` makes of each record; one that breaks its format is dropped as malformed, on its own."""
    for record in records:
        if isinstance(record, DataError):
            yield Dropped(Reason.MALFORMED, str(record).partition(": ")[0], str(record))
            continue
        try:
            yield from parse(record)
        except DataError as error:
            yield Dropped(Reason.MALFORMED, record.place, str(error))


def references(texts: Iterable[str | None]) -> tuple[str, ...]:
    """Return the references that say something, each once, in order."""
    return tuple(dict.fromkeys(text for text in texts if text is not None and text.strip()))


def alternating(utterances: Iterable[tuple[bool, str]]) -> tuple[str, ...]:
    """Return a history (question, answer ... of even length) of what was said before a question.

    Args:
        utterances: (by the user, text), oldest first.

    Where one side speaks twice in a row, a blank stands for the turn in which the other said nothing; prompts leave
    blanks out.
    """
    history: list[str] = []
    for by_user, text in utterances:
        if by_user != (len(history) % 2 == 0):
            history.append("")
        history.append(text)
    return (*history, *([""] if len(history) % 2 else []))
