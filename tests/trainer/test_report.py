"""The report is self-contained, escapes what models write, and shows whole episodes with coloured tags."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from verl.trainer.report import CURVES, choose_episodes, colour_tags, draw_curves, render_episode, write_report
from verl.types import Origin, Reward, Segment, StopReason, Trajectory


def episode(text: str, reward: float = 0.0, stop: StopReason = StopReason.ANSWERED) -> Trajectory:
    ids = tuple(map(ord, text))
    segments = (
        Segment(Origin.PROMPT, tuple(map(ord, "Q?"))),
        Segment(Origin.MODEL, ids, (-0.5,) * len(ids), 0),
        Segment(Origin.ENV, tuple(map(ord, "<information>x</information>"))),
    )
    return Trajectory("p#0", "p", segments, stop, turns=("answer",), reward=Reward(reward))


def decode(ids: Any) -> str:
    return "".join(map(chr, ids))


SUMMARY: dict[str, Any] = {
    "recipe": "tiny",
    "seed": 1,
    "steps": 2,
    "commit": "abc",
    "checkpoint": "global_step_2",
    "wall_seconds": {"rollout": 60.0},
    "cpu_minutes": 1.5,
    "before": {"n": 1.0, "f1": 0.25},
    "after": {"n": 1.0, "f1": 0.5},
    "watches": [{"watch": "entropy", "first_step": 3, "last_step": 4}],
    "bounds": {"gold_query_f1": 0.875, "final": {"gold_query_f1": 0.9}},
    "gain": {"f1": {"mean": 0.25, "low": -0.125, "high": 0.5}},
}
ROWS = [{"step": n, "reward/total/mean": 0.1 * n, "timing_s/rollout": 1.0, "timing_s/update": 2.0} for n in (1, 2)]


def test_tags_are_coloured_by_name_and_everything_else_is_escaped() -> None:
    shown = colour_tags("<search>a & b</search><script>alert(1)</script> 1 < 2")
    colours = re.findall(r'<b style="color:(hsl\([^"]*\))">&lt;/?(\w+)&gt;</b>', shown)
    assert [name for _, name in colours] == ["search", "search", "script", "script"]
    assert colours[0][0] == colours[1][0] != colours[2][0]
    assert "<script>" not in shown and "a &amp; b" in shown and "1 &lt; 2" in shown


def test_an_episode_shows_who_wrote_what_in_order() -> None:
    shown = render_episode(episode("<answer>42</answer>", reward=0.5), decode)
    assert re.findall(r'class="(\w+)"', shown) == ["prompt", "model", "env"]
    assert "reward 0.500, stop: answered, turns: answer" in shown and "42" in shown


def test_the_greatest_gains_and_one_loss_are_chosen() -> None:
    before = [episode("", r) for r in (0.0, 0.5, 0.0, 1.0, 0.2)]
    after = [episode("", r) for r in (1.0, 0.5, 0.4, 0.1, 0.2)]
    assert choose_episodes(before, after, 4) == [0, 2, 3, 1]
    assert choose_episodes([], after, 2) == [0, 1]


def test_curves_without_data_are_left_out_and_the_others_are_pictures(tmp_path: Path) -> None:
    files = draw_curves(ROWS, tmp_path)
    assert [file.name for file in files] == ["reward.png", "time.png"]
    assert all(file.read_bytes().startswith(b"\x89PNG") for file in files)
    assert len({curve.stem for curve in CURVES}) == len(CURVES)


def test_the_page_needs_nothing_else_and_shows_table_and_episodes(tmp_path: Path) -> None:
    before, after = [episode("<answer>no</answer>")], [episode("<answer>yes</answer>", 1.0)]
    write_report(tmp_path / "report.html", SUMMARY, ROWS, before, after, decode)
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert not re.findall(r'(?:src|href)="(?!data:)', page)
    assert page.count('src="data:image/png;base64,') == 2
    assert "<td>f1</td><td>0.250</td><td>0.500</td><td>+0.250 [-0.125, +0.500]</td>" in page
    assert "<td>gold_query_f1</td><td>0.875</td><td>0.900</td>" in page
    assert "no" in page and "yes" in page
