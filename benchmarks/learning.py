"""Does the embedded default learn, and from its reward? Every run, every control, one table.

    python benchmarks/learning.py run --output runs/learning --seeds 1 2 3
    python benchmarks/learning.py table --output runs/learning

Runs, each on the held-out test questions, each skipped when its summary exists:

* ``ppo`` and ``grpo`` with every seed;
* ``permuted``: PPO with rewards permuted between prompts, with every seed; the interval of its gain must include 0;
* ``supervised``: further steps of the cold start's last stage, for as many CPU seconds as a PPO run trained.

Pipelines that share the final policy's reader but search with a fixed query come out of the same runs.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from build_tiny_model import RECIPE, stage_rows

TRAINING_PHASES = ("rollout", "score", "advantage", "update", "publish")
PIPELINES = ("raw_question", "questions_only", "history_question", "gold_query", "closed_book")
HEAD = (
    *("method", "seed", "n", "F1 before", "F1 after", "F1 gain [95 %]"),
    *("R@3 before", "R@3 after", "R@3 gain [95 %]", "format", "distance closed", "CPU minutes"),
)
_PROBE_STEPS = 20


@dataclass(frozen=True)
class Run:
    """One row of the table."""

    method: str
    seed: int
    overrides: tuple[str, ...]

    @property
    def name(self) -> str:
        """Folder of the run."""
        return f"{self.method}-{self.seed}"


def planned(seeds: Sequence[int]) -> list[Run]:
    """Return every reinforcement run: PPO, its control, GRPO.

    The fixed pipelines are measured in every PPO run and in the first GRPO run: with the initial weights they are the
    same in all.
    """
    quick = "job.evaluate_bounds=false"
    runs = [Run("ppo", seed, ("--config-name", "tiny_ppo")) for seed in seeds]
    permuted = ("--config-name", "tiny_ppo", "algorithm.permute_rewards=true", quick)
    runs += [Run("permuted", seed, permuted) for seed in seeds]
    runs.append(Run("grpo", seeds[0], ("--config-name", "tiny_grpo")))
    return runs + [Run("grpo", seed, ("--config-name", "tiny_grpo", quick)) for seed in seeds[1:]]


def read_summary(folder: Path) -> dict[str, Any] | None:
    """Return a finished run's summary, or None."""
    path = folder / "summary.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def call(arguments: Sequence[str]) -> None:
    """Run a program of the repository; a failure ends the study with its status."""
    sys.stderr.write(f"learning: {' '.join(arguments)}\n")
    done = subprocess.run(arguments, cwd=ROOT, check=False)
    if done.returncode != 0:
        raise SystemExit(done.returncode)


def reinforce(run: Run, output: Path) -> None:
    """Run ``train_ppo.sh`` for one row."""
    folder = output / run.name
    if read_summary(folder) is None:
        overrides = (*run.overrides, f"trainer.seed={run.seed}", f"trainer.default_local_dir={folder}")
        call(["bash", "train_ppo.sh", *overrides])


def training_cpu_seconds(folder: Path) -> float:
    """Return the CPU seconds of a run's steps, evaluation and saving left out."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return sum(row[f"cpu_s/{phase}"] for row in rows for phase in TRAINING_PHASES if f"cpu_s/{phase}" in row)


def supervise(output: Path, budget: float) -> None:
    """Train the shipped model on further demonstrations of its last stage for ``budget`` CPU seconds, and evaluate."""
    folder = output / "supervised-1"
    if read_summary(folder) is not None:
        return
    work = output / "supervised-work"
    work.mkdir(parents=True, exist_ok=True)
    per_step = _supervised(work, _PROBE_STEPS, work / "probe")
    _supervised(work, max(1, int(budget / per_step)), work / "model")
    model = work / "model" / "hf"
    evaluation = (f"model.path={model}", "--config-name", "tiny_ppo", f"trainer.default_local_dir={folder}")
    call(["bash", "eval.sh", *evaluation])


def _supervised(work: Path, steps: int, folder: Path) -> float:
    """Train ``steps`` steps on fresh rows; return the CPU seconds per step."""
    stage = replace(RECIPE[-1], steps=steps)
    rows = work / f"{folder.name}.jsonl"
    with rows.open("w", encoding="utf-8") as file:
        for row in stage_rows(stage, seed=1):
            file.write(json.dumps(row) + "\n")
    settings = {
        "data.train_files": rows,
        "data.train_batch_size": stage.batch,
        "data.shuffle": "false",
        "model.partial_pretrain": ROOT / "assets" / "tiny",
        "model.dtype": "float32",
        "optim.lr": stage.lr,
        "optim.weight_decay": 0.0,
        "optim.warmup_style": "linear",
        "trainer.default_local_dir": folder,
        "trainer.total_training_steps": steps,
        "trainer.threads": 1,
    }
    arguments = [f"{key}={value}" for key, value in settings.items()]
    call([sys.executable, "-m", "verl.trainer.main_sft", *arguments])
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    seconds = [json.loads(line)["cpu_s/step"] for line in lines]
    return sum(seconds) / len(seconds)


# ---------------------------------------------------------------------------------------------------------------
# The table


def interval(gain: Mapping[str, float] | None) -> str:
    """Return ``+0.31 [0.28, 0.34]``, or a dash."""
    return "-" if gain is None else f"{gain['mean']:+.3f} [{gain['low']:+.3f}, {gain['high']:+.3f}]"


def closed(summary: Mapping[str, Any], bound: float | None) -> str:
    """Return the share of the F1 distance from the start to the gold-query bound that the run closed."""
    if bound is None:
        return "-"
    start = summary["before"]["f1"]
    return f"{(summary['after']['f1'] - start) / (bound - start):.0%}"


def run_row(run: Run, summary: Mapping[str, Any], bound: float | None) -> str:
    """Return one line of the table of runs; ``bound`` is the gold-query F1 of the initial weights."""
    before, after, gain = summary["before"], summary["after"], summary["gain"] or {}
    cells = [
        *(run.method, str(run.seed), f"{after['n']:.0f}"),
        *(f"{before['f1']:.3f}", f"{after['f1']:.3f}", interval(gain.get("f1"))),
        *(f"{before['recall_at_3']:.3f}", f"{after['recall_at_3']:.3f}", interval(gain.get("recall_at_3"))),
        *(f"{after['format_valid']:.3f}", closed(summary, bound), f"{summary['cpu_minutes']:.1f}"),
    ]
    return f"| {' | '.join(cells)} |"


def table(output: Path, seeds: Sequence[int]) -> str:
    """Return the report of all finished runs as Markdown."""
    lines = [f"| {' | '.join(HEAD)} |", f"|{'---|' * len(HEAD)}"]
    pipelines, bound = [], None
    for run in planned(seeds):
        summary = read_summary(output / run.name)
        if summary is None:
            continue
        bound = (summary["bounds"] or {}).get("gold_query_f1", bound)
        lines.append(run_row(run, summary, bound))
        final = (summary["bounds"] or {}).get("final")
        if final:
            cells = [f"{final[f'{name}_f1']:.3f} / {final[f'{name}_recall_at_3']:.3f}" for name in PIPELINES]
            own = f"{summary['after']['f1']:.3f} / {summary['after']['recall_at_3']:.3f}"
            pipelines.append(f"| {' | '.join([run.name, own, *cells])} |")
    supervised = read_summary(output / "supervised-1")
    lines += ["", "Further supervised steps of equal training CPU time, greedy, same questions:", ""]
    figures = None if supervised is None else supervised["after"] or supervised["before"]
    lines.append("not run" if figures is None else f"F1 {figures['f1']:.3f}, Recall@3 {figures['recall_at_3']:.3f}")
    lines += ["", "Final policy and pipelines with its reader, F1 / Recall@3:", ""]
    lines += [f"| run | policy | {' | '.join(PIPELINES)} |", f"|{'---|' * (len(PIPELINES) + 2)}", *pipelines]
    return "\n".join(lines)


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("run", "table"))
    parser.add_argument("--output", type=Path, default=Path("runs/learning"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    args = parser.parse_args()
    output = args.output.resolve()
    if args.command == "run":
        runs = planned(args.seeds)
        for run in runs:
            if run.method == "grpo":
                supervise(output, training_cpu_seconds(output / runs[0].name))
            reinforce(run, output)
    sys.stdout.write(table(output, args.seeds) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
