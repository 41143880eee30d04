"""Phases add up, CPU time of child processes is seen, durations read well."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from verl.timing import Stopwatch, format_duration, process_tree_cpu_seconds


def test_a_phase_entered_twice_adds_up_and_an_error_still_counts() -> None:
    watch = Stopwatch()
    with watch.phase("a"):
        time.sleep(0.02)
    with pytest.raises(ZeroDivisionError), watch.phase("a"):
        time.sleep(0.02)
        _ = 1 / 0
    assert 0.04 <= watch.wall_seconds["a"] < 1.0
    assert set(watch.metrics()) == {"timing_s/a", "cpu_s/a"}


def test_an_earlier_session_is_gone_on_from_and_another_watch_absorbed() -> None:
    total, step = Stopwatch({"step": 10.0}, {"step": 5.0}), Stopwatch({"step": 2.0, "save": 1.0}, {"step": 1.0})
    total.absorb(step)
    assert total.wall_seconds == {"step": 12.0, "save": 1.0}
    assert total.cpu_seconds == {"step": 6.0}


def test_cpu_seconds_of_a_child_process_are_counted() -> None:
    code = "import time\nend = time.process_time() + 0.4\nwhile time.process_time() < end: pass\ninput()"
    before = process_tree_cpu_seconds()
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE) as child:
        deadline = time.monotonic() + 30
        while process_tree_cpu_seconds(child.pid) < 0.4 and time.monotonic() < deadline:
            time.sleep(0.02)
        grown = process_tree_cpu_seconds() - before
        child.communicate(b"\n")
    assert grown >= 0.35


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0s"), (59.4, "59s"), (59.6, "1m00s"), (185, "3m05s"), (7620, "2h07m"), (-3, "0s")]
)
def test_durations(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text
