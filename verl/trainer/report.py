"""The run as one page: ``report.html`` (self-contained) and its curves as PNG files.

Everything is read from the run folder (``metrics.jsonl``, ``summary.json``, the evaluation files), so a report can be
made again at any time. Tags are coloured by their name, whatever the task calls them; who wrote a piece of text is
shown by its background.
"""

from __future__ import annotations

import base64
import html
import io
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl.tracking import column, write_atomically
from verl.types import Origin, Trajectory

Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True, slots=True)
class Curve:
    """One picture: a file stem, a title, a unit, and the metrics drawn in it (a name ending in ``*`` draws all)."""

    stem: str
    title: str
    unit: str
    metrics: tuple[str, ...]


CURVES: tuple[Curve, ...] = (
    Curve("reward", "Reward per episode (training)", "", ("reward/total/mean",)),
    Curve("validation", "Held-out questions", "", ("val/f1", "val/recall_at_3", "val/rewrite_f1", "val/score")),
    Curve("searches", "Searches per question", "", ("episode/searches", "val/searches")),
    Curve("kl", "Divergence", "nats per token", ("kl/reference", "policy/update_kl", "policy/rollout_kl")),
    Curve("entropy", "Entropy", "nats per token", ("policy/entropy",)),
    Curve("lengths", "Lengths", "tokens", ("length/prompt/mean", "length/response/mean", "length/model/mean")),
    Curve("time", "Time per phase", "s", ("timing_s/*",)),
)


# ---------------------------------------------------------------------------------------------------------------
# Curves


def draw_curves(rows: Sequence[Mapping[str, Any]], folder: Path) -> list[Path]:
    """Draw every curve that has data into ``folder`` as PNG; return the files in the table's order."""
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for curve in CURVES:
        image = _draw(curve, rows)
        if image is not None:
            path = folder / f"{curve.stem}.png"
            path.write_bytes(image)
            files.append(path)
    return files


def _draw(curve: Curve, rows: Sequence[Mapping[str, Any]]) -> bytes | None:
    """Return one picture as PNG bytes; None when no metric of it has a value."""
    # The object interface, not pyplot: no global state, no window system.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    names = [name for pattern in curve.metrics for name in _expand(pattern, rows)]
    lines = [(name, column(rows, name)) for name in names]
    lines = [(name, points) for name, points in lines if points]
    if not lines:
        return None
    figure = Figure(figsize=(6.0, 3.2), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for name, points in lines:
        steps, values = zip(*points, strict=True)
        axes.plot(steps, values, label=name, linewidth=1.4, marker="o" if len(points) < 15 else None, markersize=3)
    axes.set_title(curve.title, fontsize=10)
    axes.set_xlabel("step", fontsize=8)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_ylabel(curve.unit, fontsize=8)
    axes.tick_params(labelsize=8)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7, frameon=False)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()


def _expand(pattern: str, rows: Sequence[Mapping[str, Any]]) -> list[str]:
    if not pattern.endswith("*"):
        return [pattern]
    names: dict[str, None] = {}
    for row in rows:
        names |= dict.fromkeys(name for name in row if name.startswith(pattern[:-1]))
    return list(names)


# ---------------------------------------------------------------------------------------------------------------
# Episodes

_TAG = re.compile(r"</?([a-zA-Z_]+)>")
_ORIGIN_TITLE = {Origin.PROMPT: "prompt", Origin.MODEL: "written by the model", Origin.ENV: "from the environment"}


def render_episode(trajectory: Trajectory, decode: Decode) -> str:
    """Return one whole episode as HTML: every segment in order, tags coloured, text escaped."""
    pieces = []
    for segment in trajectory.segments:
        text = colour_tags(decode(segment.token_ids))
        title = _ORIGIN_TITLE[segment.origin]
        pieces.append(f'<span class="{segment.origin.value}" title="{title}">{text}</span>')
    reward = "none" if trajectory.reward is None else f"{trajectory.reward.total:.3f}"
    caption = f"reward {reward}, stop: {trajectory.stop.value}, turns: {', '.join(trajectory.turns)}"
    return f"<figure><figcaption>{html.escape(caption)}</figcaption><pre>{''.join(pieces)}</pre></figure>"


def colour_tags(text: str) -> str:
    """Return text as HTML with every ``<name>`` and ``</name>`` coloured by its name."""
    pieces, position = [], 0
    for match in _TAG.finditer(text):
        pieces.append(html.escape(text[position : match.start()]))
        pieces.append(f'<b style="color:{_tag_colour(match[1])}">{html.escape(match[0])}</b>')
        position = match.end()
    pieces.append(html.escape(text[position:]))
    return "".join(pieces)


def _tag_colour(name: str) -> str:
    """Return a colour that depends on the name alone; its hue comes from the letters."""
    hue = sum((index + 1) * 47 * ord(letter) for index, letter in enumerate(name.lower())) % 360
    return f"hsl({hue}, 75%, 35%)"


def choose_episodes(before: Sequence[Trajectory], after: Sequence[Trajectory], limit: int) -> list[int]:
    """Return row indices worth reading: the greatest gains, then one loss, then the first rows; at most ``limit``."""
    if len(before) != len(after):
        return list(range(min(limit, len(after))))
    change = [_total(new) - _total(old) for old, new in zip(before, after, strict=True)]
    by_change = sorted(range(len(change)), key=lambda index: (-change[index], index))
    picked = [index for index in by_change[: max(1, limit - 1)] if change[index] > 0]
    if by_change and change[by_change[-1]] < 0:
        picked.append(by_change[-1])
    for index in range(len(after)):
        if len(picked) >= limit:
            break
        if index not in picked:
            picked.append(index)
    return picked[:limit]


def _total(trajectory: Trajectory) -> float:
    return 0.0 if trajectory.reward is None or trajectory.stop.failed else trajectory.reward.total


# ---------------------------------------------------------------------------------------------------------------
# The page

_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem; color: #222; }
table { border-collapse: collapse; } td, th { padding: .2rem .8rem; text-align: right; border-bottom: 1px solid #ddd; }
td:first-child, th:first-child { text-align: left; } img { max-width: 33rem; width: 100%; }
pre { white-space: pre-wrap; border: 1px solid #ddd; padding: .7rem; } figure { margin: .6rem 0; }
figcaption { color: #666; font-size: .9em; } .prompt { color: #777; } .model { background: #eef6ff; }
.env { background: #f6f3e7; }
"""


def write_report(
    path: Path,
    summary: Mapping[str, Any],
    rows: Sequence[Mapping[str, Any]],
    before: Sequence[Trajectory],
    after: Sequence[Trajectory],
    decode: Decode,
    episodes: int = 4,
) -> None:
    """Write the page, and the curves beside it in ``curves/``."""
    images = [_embed(file) for file in draw_curves(rows, path.parent / "curves")]
    parts = [f"<h1>{html.escape(str(summary['recipe']))}, seed {summary['seed']}</h1>", _facts(summary)]
    parts += _health(summary["watches"])
    parts += ["<h2>Before and after</h2>", comparison_table(summary)]
    parts += ["<h2>Curves</h2>", *images, "<h2>Episodes</h2>"]
    for index in choose_episodes(before, after, episodes):
        parts.append(f"<h3>Row {index + 1}</h3>")
        if len(before) == len(after) and before:
            parts += ["<p>Before training</p>", render_episode(before[index], decode), "<p>After training</p>"]
        parts.append(render_episode(after[index], decode))
    body = "\n".join(parts)
    title = html.escape(f"{summary['recipe']} seed {summary['seed']}")
    write_atomically(
        path,
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f"<style>{_STYLE}</style></head><body>{body}</body></html>\n",
    )


def _embed(file: Path) -> str:
    data = base64.b64encode(file.read_bytes()).decode()
    return f'<img alt="{html.escape(file.stem)}" src="data:image/png;base64,{data}">'


def _facts(summary: Mapping[str, Any]) -> str:
    facts = {
        "steps": summary["steps"],
        "commit": summary["commit"],
        "wall minutes": f"{sum(summary['wall_seconds'].values()) / 60:.1f}",
        "CPU minutes": f"{summary['cpu_minutes']:.1f}",
        "checkpoint": summary["checkpoint"],
    }
    items = "".join(f"<li>{html.escape(name)}: {html.escape(str(value))}</li>" for name, value in facts.items())
    return f"<ul>{items}</ul>"


def _health(watches: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return what fired as a table; nothing when all was well."""
    if not watches:
        return []
    rows = [(one["watch"], str(one["first_step"]), str(one["last_step"])) for one in watches]
    return ["<h2>Watches that fired</h2>", _table(("", "first step", "last step"), rows)]


def comparison_table(summary: Mapping[str, Any]) -> str:
    """Return the before/after/gain table, the fixed pipelines below it where they were measured, breakdowns folded."""
    before, after, gain = summary["before"] or {}, summary["after"] or {}, summary["gain"] or {}
    names = list(dict.fromkeys((*before, *after)))
    # Breakdowns and intervals have a slash in their name; there are many of them.
    main, details = [name for name in names if "/" not in name], [name for name in names if "/" in name]
    head = ("", "before", "after", "gain [95 %]")
    parts = [_table(head, [(name, before.get(name), after.get(name), _interval(gain.get(name))) for name in main])]
    bounds = dict(summary["bounds"] or {})
    if bounds:
        final = bounds.pop("final", {})
        parts.append("<h3>Fixed queries, the same reader</h3>")
        rows = [(name, value, final.get(name)) for name, value in bounds.items()]
        parts.append(_table(("", "initial weights", "trained weights"), rows))
    if details:
        folded = _table(head[:3], [(name, before.get(name), after.get(name)) for name in details])
        parts.append(f"<details><summary>Intervals and breakdowns</summary>{folded}</details>")
    return "\n".join(parts)


def _table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    lines = ["<table><tr>" + "".join(f"<th>{html.escape(name)}</th>" for name in head) + "</tr>"]
    lines += ["<tr>" + "".join(f"<td>{_figure(cell)}</td>" for cell in row) + "</tr>" for row in rows]
    return "\n".join([*lines, "</table>"])


def _interval(gain: Mapping[str, float] | None) -> str | None:
    """Return the mean and, where the task gives one, its interval."""
    if gain is None:
        return None
    interval = f" [{gain['low']:+.3f}, {gain['high']:+.3f}]" if {"low", "high"} <= set(gain) else ""
    return f"{gain['mean']:+.3f}{interval}"


def _figure(value: Any) -> str:
    """Return a cell's text: counts without decimals, nothing for None."""
    if isinstance(value, float):
        return f"{value:.0f}" if value.is_integer() and abs(value) > 1 else f"{value:.3f}"
    return "" if value is None else html.escape(str(value))
