"""The plan as text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from verl.errors import ModelError
from verl.trainer.plan.architecture import read_architecture
from verl.trainer.plan.estimate import RunTime, StepTime
from verl.trainer.plan.memory import Use, disk_bytes, phases

GIB = 2**30


def memory_lines(uses: Sequence[Use], device_bytes: float | None) -> list[str]:
    """Return one line per phase, its largest parts first."""
    of = "" if device_bytes is None else f" of {device_bytes / GIB:.0f}"
    lines = []
    for use in uses:
        parts = sorted(((size, name) for name, size in use.parts.items() if size > 0), reverse=True)
        told = ", ".join(f"{name} {_gib(size)}" for size, name in parts)
        lines.append(f"memory per rank, {use.phase:<8} {_gib(use.total)}{of} GiB ({told})")
    return lines


def check_lines(config: Any) -> list[str]:
    """Return what ``--check`` says of memory and disk; times need a machine to be planned for."""
    try:
        model = read_architecture(config.actor_rollout_ref.model.path)
    except ModelError as error:
        return [f"# memory: unknown ({error})"]
    lines = [
        *memory_lines(phases(config, model, None), None),
        f"checkpoints, at most      {_gib(disk_bytes(config, model))} GiB ({model.parameters / 1e6:.1f}M parameters)",
        "step time and hours       python -m verl.trainer.plan RECIPE --gpus 4xH100",
    ]
    return [f"# {line}" for line in lines]


def time_lines(expected: StepTime, best: StepTime | None, worst: StepTime | None) -> list[str]:
    """Return a step's parts, with the range of the assumptions where there is one."""

    def line(name: str, value: str) -> str:
        text = f"{name:<25} {getattr(expected, value):10.2f} s  {getattr(expected, value) / expected.step:5.0%}"
        if best is None or worst is None:
            return text
        return f"{text}   {getattr(best, value):.2f} to {getattr(worst, value):.2f} s"

    return [
        line("step", "step"),
        line("  rollout", "rollout"),
        line("    of it, search", "search"),
        line("    of it, the last tenth", "tail"),
        line("  score", "score"),
        line("  update", "update"),
        line("  publish", "publish"),
        f"{'sequences per engine':<25} {expected.rows:10.1f}",
    ]


def run_lines(expected: RunTime, best: RunTime | None, worst: RunTime | None) -> list[str]:
    """Return the hours of the run, and what is unknown about them."""
    if expected.total is None:
        return ["run                       unknown: data.train_files are not here; set trainer.total_training_steps"]
    spread = ""
    if best is not None and worst is not None and best.total is not None and worst.total is not None:
        spread = f" ({best.total / 3600:.1f} to {worst.total / 3600:.1f})"
    evaluating = "unknown (data.val_files are not here; set data.val_data_num)"
    if expected.evaluating is not None:
        evaluating = f"{expected.evaluating / 3600:.2f} h in {expected.evaluations} evaluations"
    return [
        f"run                       {expected.total / 3600:.2f} h{spread}, {expected.steps} steps",
        f"  training                {(expected.training or 0.0) / 3600:.2f} h",
        f"  evaluating              {evaluating}",
        f"  saving                  {(expected.saving or 0.0) / 3600:.2f} h",
    ]


def _gib(size: float) -> str:
    return f"{size / GIB:.1f}" if size >= GIB / 10 else f"{size / GIB:.3f}"
