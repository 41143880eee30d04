"""Figures over a finished split: means over its questions, with intervals and breakdowns.

Every question counts; a failed or refused row scores zero and is counted. A question's figure is the mean over its
samples. Figures that need supervision are over the questions that have it, and ``n/<figure>`` says how many those are
where it is not all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from search_r1.evaluation.intervals import bootstrap_interval, mean
from search_r1.evaluation.rankings import score_rankings
from search_r1.evaluation.results import ResultRow, by_question
from search_r1.evaluation.scores import score_row
from search_r1.evaluation.votes import score_samples
from search_r1.rewards.text import Normalise, normalise

_DEEPEST = 10
"""Turns from here on share one bucket of the breakdown by depth."""
_WITH_INTERVAL = ("em", "f1", "rewrite_f1", "recall_at_3", "bertscore", "judge")
_BROKEN_DOWN = ("em", "f1", "recall_at_3", "bertscore", "judge")

QuestionScores = dict[str, float]
"""Figure -> mean over the question's samples that have it."""


def question_scores(rows: Sequence[ResultRow], form: Normalise = normalise) -> dict[str, QuestionScores]:
    """Return qid -> its figures, in order of first appearance; what has no supervision is left out."""
    columns = [
        {**score_row(row, form), **(ranking or {})} for row, ranking in zip(rows, score_rankings(rows), strict=True)
    ]
    places: dict[str, list[int]] = {}
    for index, row in enumerate(rows):
        places.setdefault(row.qid, []).append(index)
    scores: dict[str, QuestionScores] = {}
    for qid, indices in places.items():
        names = dict.fromkeys(name for index in indices for name in columns[index])
        scores[qid] = {}
        for name in names:
            values = [value for index in indices if (value := columns[index].get(name)) is not None]
            if values:
                scores[qid][name] = mean(values)
        if len(indices) > 1:
            scores[qid] |= score_samples([rows[index] for index in indices], form)
    return scores


def summarise(rows: Sequence[ResultRow], form: Normalise = normalise) -> dict[str, float]:
    """Return flat figures: n, em, f1, rewrite_f1, recall_at_3, searches, turns, format_valid, failed ...

    ``f1/low`` and ``f1/high`` are the 95 % bootstrap interval over questions (seeded), likewise for the others of
    ``_WITH_INTERVAL``. ``f1/<group>`` are means over a group of questions, ``n/<group>`` its size: ``turn_2``,
    ``topic_shift``, ``same_topic``, ``answerable``, ``unanswerable``, ``source_<s>``, ``kind_<k>``, ``act_<a>``,
    ``hit`` and ``miss`` (a gold passage was shown, or not). ``stop/<reason>`` are shares of all rows.
    """
    if not rows:
        return {"n": 0.0}
    groups = by_question(rows)
    scores = question_scores(rows, form)
    figures = {"n": float(len(groups))}
    if len(rows) != len(groups):
        figures["episodes"] = float(len(rows))
    for name in dict.fromkeys(name for question in scores.values() for name in question):
        values = [question[name] for question in scores.values() if name in question]
        figures[name] = mean(values)
        if len(values) < len(groups):
            figures[f"n/{name}"] = float(len(values))
        if name in _WITH_INTERVAL:
            figures[f"{name}/low"], figures[f"{name}/high"] = bootstrap_interval(values)
    # What has supervision nowhere must be seen to have none.
    for name, short in (("rewrite_f1", "n_rewrite"), ("recall_at_3", "n_gold")):
        figures[short] = float(sum(name in question for question in scores.values()))
    stops = Counter(row.stop for row in rows if row.stop is not None)
    figures |= {f"stop/{reason}": count / len(rows) for reason, count in sorted(stops.items())}
    return figures | _breakdowns(groups, scores)


def groups_of(row: ResultRow, hit: float | None = None) -> Iterator[str]:
    """Yield the groups of the breakdown that a question belongs to."""
    yield f"source_{row.data_source}"
    if row.depth is not None:
        yield f"turn_{row.depth}" if row.depth < _DEEPEST else f"turn_{_DEEPEST}_on"
    if row.topic_shift is not None:
        yield "topic_shift" if row.topic_shift else "same_topic"
    if row.answerable is not None:
        yield "answerable" if row.answerable else "unanswerable"
    if row.kind is not None:
        yield f"kind_{row.kind}"
    if row.dialogue_act is not None:
        yield f"act_{row.dialogue_act}"
    if hit in (0.0, 1.0):
        yield "hit" if hit == 1.0 else "miss"


def _breakdowns(groups: Mapping[str, Sequence[ResultRow]], scores: Mapping[str, QuestionScores]) -> dict[str, float]:
    members: dict[str, list[str]] = {}
    for qid, rows in groups.items():
        for name in groups_of(rows[0], scores[qid].get("recall_at_3")):
            members.setdefault(name, []).append(qid)
    figures: dict[str, float] = {}
    for name in sorted(members, key=_natural):
        figures[f"n/{name}"] = float(len(members[name]))
        for figure in _BROKEN_DOWN:
            values = [scores[qid][figure] for qid in members[name] if figure in scores[qid]]
            if values and not (figure == "recall_at_3" and name in ("hit", "miss")):
                figures[f"{figure}/{name}"] = mean(values)
    return figures


def _natural(name: str) -> tuple[str, int, str]:
    """Sort turn_2 before turn_10."""
    kind, _, rest = name.partition("_")
    number = rest.partition("_")[0]
    return kind, int(number) if number.isdigit() else 0, name
