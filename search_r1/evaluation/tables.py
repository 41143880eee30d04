"""The table of methods as in the papers: a row per method, a column per dataset."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from search_r1.evaluation.intervals import bootstrap_interval, mean
from search_r1.evaluation.results import ResultRow
from search_r1.evaluation.summary import QuestionScores, question_scores
from search_r1.rewards.text import Normalise, normalise


def methods_table(methods: Mapping[str, Sequence[ResultRow]], form: Normalise = normalise, figure: str = "f1") -> str:
    """Return Markdown: per method the figure of each dataset with its 95 % interval, then figures over all.

    Values are percent, as in the papers. A method that not every question has the supervision for says over how many
    it was run.
    """
    scores = {name: question_scores(rows, form) for name, rows in methods.items()}
    sources = list(dict.fromkeys(row.data_source for rows in methods.values() for row in rows))
    head = ["method", *(f"{source}: {figure.upper()}" for source in sources)]
    head += ["all: n", "F1", "EM", "recall@3", "searches", "valid format"]
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    for name, rows in methods.items():
        source_of = {row.qid: row.data_source for row in rows}
        cells = [
            _cell([s for qid, s in scores[name].items() if source_of[qid] == source], figure) for source in sources
        ]
        everything = list(scores[name].values())
        cells += [str(len(everything)), _cell(everything, "f1"), _cell(everything, "em")]
        cells += [
            _plain(everything, "recall_at_3"),
            _plain(everything, "searches", 1),
            _plain(everything, "format_valid"),
        ]
        lines.append(f"| {' | '.join([name, *cells])} |")
    return "\n".join(lines)


def _values(scores: Sequence[QuestionScores], name: str) -> list[float]:
    return [question[name] for question in scores if name in question]


def _cell(scores: Sequence[QuestionScores], name: str) -> str:
    values = _values(scores, name)
    if not values:
        return "-"
    low, high = bootstrap_interval(values)
    return f"{100 * mean(values):.1f} [{100 * low:.1f}, {100 * high:.1f}]"


def _plain(scores: Sequence[QuestionScores], name: str, factor: float = 100) -> str:
    values = _values(scores, name)
    return "-" if not values else f"{factor * mean(values):.{1 if factor == 100 else 2}f}"
