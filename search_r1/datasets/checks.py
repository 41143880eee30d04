"""Looking a data set over: what its rows have, how long they are, what its splits share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from search_r1.datasets.collect import Split
from search_r1.datasets.rows import Row

FIELDS = ("history", "rewrite", "gold_passage_ids", "gold_text", "topic_shift", "kind", "answerable", "dialogue_act")
QUANTILES = (0.0, 0.5, 0.9, 0.99, 1.0)

Length = Callable[[str], int]
"""Length of a text, in tokens or characters."""


def coverage(rows: Sequence[Row]) -> dict[str, int]:
    """Return field -> number of rows that have it; a history counts where something was said before."""
    return {name: sum(getattr(row, name) not in (None, ()) for row in rows) for name in FIELDS}


def missing_passages(rows: Sequence[Row], found: Mapping[str, str]) -> tuple[int, int]:
    """Return (gold ids that are not in the corpus, rows with such an id)."""
    absent = [[name for name in row.gold_passage_ids or () if name not in found] for row in rows]
    return len({name for names in absent for name in names}), sum(bool(names) for names in absent)


def quantiles(lengths: Sequence[int]) -> list[int]:
    """Return minimum, median, 90 %, 99 % and maximum; each is the length of one of the rows."""
    if not lengths:
        return []
    return [int(value) for value in np.quantile(np.asarray(lengths), QUANTILES, method="inverted_cdf")]


def lengths(rows: Sequence[Row], length: Length) -> dict[str, list[int]]:
    """Return part of a row -> quantiles of its length."""
    parts: dict[str, list[str]] = {
        "question": [row.question for row in rows],
        "history": ["\n".join(text for text in row.history if text) for row in rows if row.history],
        "first reference": [row.answers[0] for row in rows if row.answers],
        "rewrite": [row.rewrite for row in rows if row.rewrite is not None],
        "gold passage": [row.gold_text for row in rows if row.gold_text is not None],
    }
    return {name: quantiles([length(text) for text in texts]) for name, texts in parts.items() if texts}


@dataclass(frozen=True, slots=True)
class Shared:
    """What two splits (or one split with itself) have in common, word for word but for case and white space."""

    first: str
    second: str
    questions: int
    """Rows of the second whose question, asked after the same history, is in the first."""
    rewrites: int
    """Rows of the second whose gold rewrite is one of the first."""
    examples: tuple[tuple[str, str], ...]
    """Up to three pairs of ids with the same question in the same history."""


def leakage(splits: Mapping[str, Split]) -> list[Shared]:
    """Compare every split with every other and, for repetitions, with itself.

    Ids and conversation numbers tell nothing here: sources number every split anew.
    """
    found = [_inside(split) for split in splits.values()]
    return found + [_between(a, b) for a, b in combinations(splits.values(), 2)]


def _plain(text: str) -> str:
    return " ".join(text.lower().split())


def _in_context(row: Row) -> tuple[str, ...]:
    return (*map(_plain, row.history or ()), _plain(row.question))


def _between(a: Split, b: Split) -> Shared:
    known = {_in_context(row): row.qid for row in a.rows}
    rewrites = {_plain(row.rewrite) for row in a.rows if row.rewrite is not None}
    pairs = [(known[key], row.qid) for row in b.rows if (key := _in_context(row)) in known]
    shared = sum(row.rewrite is not None and _plain(row.rewrite) in rewrites for row in b.rows)
    return Shared(a.name, b.name, len(pairs), shared, tuple(pairs[:3]))


def _inside(split: Split) -> Shared:
    first: dict[tuple[str, ...], str] = {}
    pairs = []
    for row in split.rows:
        key = _in_context(row)
        if first.setdefault(key, row.qid) != row.qid:
            pairs.append((first[key], row.qid))
    counts = Counter(_plain(row.rewrite) for row in split.rows if row.rewrite is not None)
    repeated = sum(count - 1 for count in counts.values())
    return Shared(split.name, split.name, len(pairs), repeated, tuple(pairs[:3]))
