"""Where the time goes: wall and CPU seconds per named phase.

CPU seconds are those of this process and all its descendants, since the work is done in workers: with the local
cluster they are this process, with Ray on one machine they are its grandchildren. Workers on other machines are not
seen; their figures come from the scheduler of that cluster.
"""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

_PROC = Path("/proc")


def process_tree_cpu_seconds(root: int | None = None) -> float:
    """Return user + system CPU seconds of a process (default: this one) and its living descendants.

    A descendant that ended counts as far as its parent waited for it. Where there is no ``/proc`` the figure is that
    of this process alone.
    """
    stats = _read_process_table()
    if root is None:
        root = os.getpid()
    if root not in stats:
        return time.process_time()
    children: dict[int, list[int]] = defaultdict(list)
    for pid, (parent, _) in stats.items():
        children[parent].append(pid)
    total, pending = 0.0, [root]
    while pending:
        pid = pending.pop()
        total += stats[pid][1]
        pending.extend(children[pid])
    return total


def _read_process_table() -> dict[int, tuple[int, float]]:
    """Return pid -> (parent pid, CPU seconds including those of waited-for children)."""
    if not _PROC.is_dir():
        return {}
    ticks = os.sysconf("SC_CLK_TCK")
    table: dict[int, tuple[int, float]] = {}
    for entry in os.scandir(_PROC):
        if not entry.name.isdigit():
            continue
        try:
            stat = Path(entry.path, "stat").read_text()
        except OSError:  # it ended meanwhile, or belongs to somebody else
            continue
        # The command name may hold spaces and brackets; the fields are counted from its closing bracket.
        fields = stat[stat.rindex(")") + 2 :].split()
        table[int(entry.name)] = (int(fields[1]), sum(map(int, fields[11:15])) / ticks)
    return table


class Stopwatch:
    """Collects seconds per phase. ``with watch.phase("rollout"): ...``; a phase may be entered many times.

    Phases may be nested; each counts its whole own span, so an outer phase includes the inner ones. ``wall`` and
    ``cpu`` are seconds by phase of an earlier session to go on from.
    """

    def __init__(self, wall: Mapping[str, float] | None = None, cpu: Mapping[str, float] | None = None) -> None:
        self._wall: dict[str, float] = dict(wall or {})
        self._cpu: dict[str, float] = dict(cpu or {})

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the block's wall and CPU seconds to ``name``, also when it raises."""
        wall, cpu = time.perf_counter(), process_tree_cpu_seconds()
        try:
            yield
        finally:
            self._wall[name] = self._wall.get(name, 0.0) + time.perf_counter() - wall
            # A worker that ended inside the block takes its CPU seconds with it: never count backwards.
            self._cpu[name] = self._cpu.get(name, 0.0) + max(0.0, process_tree_cpu_seconds() - cpu)

    @property
    def wall_seconds(self) -> dict[str, float]:
        """Wall seconds by phase, in the order of first entry."""
        return dict(self._wall)

    @property
    def cpu_seconds(self) -> dict[str, float]:
        """CPU seconds by phase, in the order of first entry."""
        return dict(self._cpu)

    def metrics(self) -> dict[str, float]:
        """Return ``timing_s/<phase>`` and ``cpu_s/<phase>``."""
        return {f"timing_s/{name}": value for name, value in self._wall.items()} | {
            f"cpu_s/{name}": value for name, value in self._cpu.items()
        }

    def absorb(self, other: Stopwatch) -> None:
        """Add another stopwatch's seconds to this one (a step's to the run's)."""
        for mine, theirs in ((self._wall, other._wall), (self._cpu, other._cpu)):
            for name, value in theirs.items():
                mine[name] = mine.get(name, 0.0) + value


def format_duration(seconds: float) -> str:
    """Return ``42s``, ``3m05s`` or ``2h07m``."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
