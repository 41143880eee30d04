"""The card of an evaluation: its figures, and everything that is needed to repeat it, as JSON, Markdown and HTML."""

from __future__ import annotations

import html
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

UNKNOWN = "not known"
"""What stands where a fact could not be found out; never left out, so that its absence is seen."""

_MAIN = (
    ("f1", "F1 (words, best reference)"),
    ("f1_first", "F1 (words, first reference)"),
    ("em", "Exact match"),
    ("sub_em", "Reference inside the answer"),
    ("bertscore", "BERTScore F1"),
    ("judge", "Judge"),
    ("rewrite_f1", "Best query against the gold rewrite (F1)"),
    ("recall_at_3", "Gold passage in a first three"),
    ("searches", "Searches per question"),
    ("turns", "Generations per question"),
    ("invalid_actions", "Invalid actions per question"),
    ("format_valid", "Valid format"),
    ("answered", "Answered"),
    ("failed", "Failed"),
    ("refused", "Refused prompts"),
)
_SAMPLES = ("pass_at_", "majority_of_", "best_of_")
_RANKINGS = ("queries/", "best_query/")
_GROUPED = ("f1", "em", "recall_at_3", "bertscore", "judge")


@dataclass(frozen=True)
class Table:
    """A titled table of texts."""

    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Card:
    """What an evaluation was and what it found."""

    title: str
    facts: Mapping[str, Mapping[str, Any]]
    """Section -> name -> value: data, retrieval, prompts, decoding, scoring, model, code."""
    figures: Mapping[str, float]
    config: Mapping[str, Any] | None = None
    """Every key of the run; in the JSON form only."""

    def write(self, stem: Path) -> list[Path]:
        """Write ``<stem>.json``, ``.md`` and ``.html`` and return their paths."""
        record = {"title": self.title, "facts": self.facts, "figures": dict(self.figures), "config": self.config}
        texts = {
            ".json": json.dumps(record, indent=1, ensure_ascii=False) + "\n",
            ".md": self.markdown(),
            ".html": self.html(),
        }
        stem.parent.mkdir(parents=True, exist_ok=True)
        paths = []
        for suffix, text in texts.items():
            path = stem.with_name(stem.name + suffix)
            path.write_text(text, encoding="utf-8")
            paths.append(path)
        return paths

    def tables(self) -> list[Table]:
        """Return the tables that have rows: figures, rankings, samples, stop reasons, groups, facts."""
        found = [
            Table("Figures", ("", "value", "95 %", "questions"), tuple(self._main())),
            Table("Rankings of the issued queries", ("", "value", "", "questions"), tuple(self._prefixed(_RANKINGS))),
            Table("Several samples", ("", "value", "", "questions"), tuple(self._samples())),
            Table("Stop reasons", ("", "share"), tuple(self._stops())),
            self._groups(),
            *(Table(section.capitalize(), ("", ""), tuple(_flat(facts))) for section, facts in self.facts.items()),
        ]
        return [table for table in found if table.rows]

    def markdown(self) -> str:
        """Return the card as Markdown."""
        lines = [f"# {self.title}", ""]
        for table in self.tables():
            lines += [f"## {table.title}", "", _line(table.head), _line(["---"] * len(table.head))]
            lines += [*map(_line, table.rows), ""]
        return "\n".join(lines)

    def html(self) -> str:
        """Return the card as one HTML page that needs nothing else."""
        parts = [f"<h1>{html.escape(self.title)}</h1>"]
        for table in self.tables():
            cells = "".join(f"<th>{html.escape(cell)}</th>" for cell in table.head)
            body = "".join(
                "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in table.rows
            )
            parts.append(f"<h2>{html.escape(table.title)}</h2><table><tr>{cells}</tr>{body}</table>")
        head = f'<meta charset="utf-8"><title>{html.escape(self.title)}</title><style>{_STYLE}</style>'
        return f'<!doctype html><html lang="en"><head>{head}</head><body>{"".join(parts)}</body></html>\n'

    # -----------------------------------------------------------------------------------------------------------

    def _cells(self, name: str, label: str) -> tuple[str, str, str, str]:
        figures = self.figures
        interval = ""
        if f"{name}/low" in figures:
            interval = f"{figures[f'{name}/low']:.3f} to {figures[f'{name}/high']:.3f}"
        questions = figures.get(f"n/{name}", figures["n"])
        return label, f"{figures[name]:.3f}", interval, f"{questions:.0f}"

    def _main(self) -> Iterable[tuple[str, ...]]:
        for name, label in _MAIN:
            if name in self.figures:
                yield self._cells(name, label)
            elif name in ("rewrite_f1", "recall_at_3"):
                yield label, "not available", "", "0"

    def _prefixed(self, prefixes: Sequence[str]) -> Iterable[tuple[str, ...]]:
        return (self._cells(name, name) for name in self.figures if name.startswith(tuple(prefixes)))

    def _samples(self) -> Iterable[tuple[str, ...]]:
        return (self._cells(name, name) for name in self.figures if name.partition("/")[2].startswith(_SAMPLES))

    def _stops(self) -> Iterable[tuple[str, ...]]:
        return (
            (name.removeprefix("stop/"), f"{value:.3f}")
            for name, value in self.figures.items()
            if name.startswith("stop/")
        )

    def _groups(self) -> Table:
        known = [name for name in _GROUPED if name in self.figures]
        groups = [
            name.removeprefix("n/")
            for name in self.figures
            if name.startswith("n/") and f"f1/{name.removeprefix('n/')}" in self.figures
        ]
        rows = tuple(
            (group, f"{self.figures[f'n/{group}']:.0f}", *(_figure(self.figures.get(f"{n}/{group}")) for n in known))
            for group in groups
        )
        return Table("Groups of questions", ("", "questions", *known), rows)


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _flat(facts: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, str]]:
    for name, value in facts.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", UNKNOWN if value is None else str(value)


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|').replace(chr(10), ' ') for cell in cells)} |"


_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #222; }
table { border-collapse: collapse; } td, th { padding: .2rem .8rem; text-align: right; border-bottom: 1px solid #ddd; }
td:first-child, th:first-child { text-align: left; } td { overflow-wrap: anywhere; }
"""
