"""Is one evaluation better than another? Paired by question."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from search_r1.evaluation.intervals import Gain, mean, paired_gain, paired_p_values
from search_r1.evaluation.results import ResultRow
from search_r1.evaluation.summary import question_scores
from search_r1.rewards.text import Normalise, normalise
from verl.errors import DataError

COMPARED = ("f1", "em", "rewrite_f1", "recall_at_3", "bertscore", "judge")


@dataclass(frozen=True, slots=True)
class Comparison:
    """One figure on both sides, over the questions that have it on both."""

    n: int
    before: float
    after: float
    gain: Gain
    p_randomisation: float
    p_t_test: float


def compare(
    before: Sequence[ResultRow],
    after: Sequence[ResultRow],
    form: Normalise = normalise,
    names: Sequence[str] = COMPARED,
) -> dict[str, Comparison]:
    """Return figure -> its paired comparison over the questions of both sides.

    Figures that one side lacks are left out. Raises DataError when no question is in both, or one has other words.
    """
    check_same_questions(before, after)
    old, new = question_scores(before, form), question_scores(after, form)
    found = {}
    for name in names:
        pairs = [(old[qid][name], new[qid][name]) for qid in old if name in old[qid] and name in new.get(qid, {})]
        if pairs:
            left, right = [a for a, _ in pairs], [b for _, b in pairs]
            p_values = paired_p_values(left, right)
            found[name] = Comparison(len(pairs), mean(left), mean(right), paired_gain(left, right), *p_values)
    return found


def check_same_questions(before: Sequence[ResultRow], after: Sequence[ResultRow]) -> None:
    """Raise DataError unless the questions that both sides name are the same, and there are some."""
    old: Mapping[str, ResultRow] = {row.qid: row for row in before}
    shared = [row for row in after if row.qid in old]
    if not shared:
        raise DataError(
            f"no question is in both: {_some(before)} and {_some(after)}; they are evaluations of other data"
        )
    for row in shared:
        if row.question != old[row.qid].question or row.answers != old[row.qid].answers:
            raise DataError(
                f"question {row.qid!r} differs: {old[row.qid].question!r} {list(old[row.qid].answers)} and "
                f"{row.question!r} {list(row.answers)}; they are evaluations of other data"
            )


def _some(rows: Sequence[ResultRow]) -> str:
    return f"{len(rows)} rows from {rows[0].qid!r} on" if rows else "no rows"
