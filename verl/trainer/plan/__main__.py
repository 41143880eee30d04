"""Say what a run will take before it is queued: memory, step time and its parts, tokens, disk, hours.

    python -m verl.trainer.plan chatr1_3b_topiocqa --gpus 4xH100
    python -m verl.trainer.plan tiny_ppo --lengths runs/tiny-ppo        (this machine's processor, measured)

Words without ``=`` are recipes, words with it are overrides. ``--gpus NxNAME`` or ``MACHINESxNxNAME`` sets the
recipe's ranks to these devices; ``cpu`` (the default) times the recipe's model on this machine for a few seconds.
``--lengths RUN`` takes the lengths of episodes from the rollouts of an earlier run; without it they are assumed.
``--search-rate`` (queries per second) and ``--search-latency`` (seconds) describe the retrieval service.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl.config import load_config
from verl.errors import ChatR1Error
from verl.trainer.main_ppo import set_up_logging
from verl.trainer.plan.architecture import Architecture, read_architecture
from verl.trainer.plan.costs import RooflineEngine, RooflineTrainer
from verl.trainer.plan.devices import BEST, EXPECTED, WORST, Efficiency, Fleet, parse_fleet
from verl.trainer.plan.estimate import Costs, notes, run_time, step_time, tokens_per_step
from verl.trainer.plan.lengths import Assumption, Episode, assumed_episodes, recorded_episodes, resample
from verl.trainer.plan.memory import DTYPE_BYTES, checkpoint_bytes, disk_bytes, host_bytes, phases
from verl.trainer.plan.report import GIB, memory_lines, run_lines, time_lines
from verl.trainer.plan.simulation import Search

_DISK = 1e9
"""Bytes per second of a shared file system where none was measured."""


@dataclass(frozen=True)
class Question:
    """What is asked of a plan beside the recipe."""

    fleet: Fleet | None
    lengths: Path | None
    search: Search


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the plan of every recipe; returns 0, or 2 for a mistake that the message explains."""
    options = _parser().parse_intermixed_args(arguments)
    set_up_logging()
    recipes = [word for word in options.words if "=" not in word] or ["ppo_trainer"]
    overrides = [word for word in options.words if "=" in word]
    try:
        fleet = None if options.gpus == "cpu" else parse_fleet(options.gpus)
        question = Question(fleet, options.lengths, Search(options.search_rate, options.search_latency))
        for recipe in recipes:
            sys.stdout.write("\n".join([f"# {recipe}", *plan(recipe, overrides, question), ""]) + "\n")
    except ChatR1Error as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m verl.trainer.plan", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("words", nargs="*", metavar="RECIPE or key.path=value")
    parser.add_argument("--gpus", default="cpu")
    parser.add_argument("--lengths", type=Path)
    parser.add_argument("--search-rate", type=float, default=100.0)
    parser.add_argument("--search-latency", type=float, default=0.05)
    return parser


def plan(recipe: str, overrides: Sequence[str], question: Question) -> list[str]:
    """Return the lines of one recipe's plan. Raises ChatR1Error for what the user can mend."""
    fleet = question.fleet
    devices = [] if fleet is None else [f"trainer.nnodes={fleet.nodes}", f"trainer.n_gpus_per_node={fleet.per_node}"]
    config = load_config(recipe, [*overrides, *devices])
    model = read_architecture(config.actor_rollout_ref.model.path)
    episodes = step_episodes(config, question.lengths)
    device_bytes = None if fleet is None else fleet.device.memory
    uses = phases(config, model, device_bytes)
    saved = checkpoint_bytes(config, model, config.trainer.export_every > 0)
    estimates = [
        (step, run_time(config, step, episodes, costs, saved))
        for costs in _costs(config, model, fleet, episodes)
        for step in [step_time(config, episodes, costs, question.search)]
    ]
    (step, run), others = estimates[0], estimates[1:]
    (best, best_run), (worst, worst_run) = others if others else ((None, None), (None, None))
    tokens, trained = tokens_per_step(episodes)
    host = host_bytes(config, model)
    return [
        f"model                     {model.parameters / 1e9:.3f}B parameters",
        f"ranks, engines            {config.world_size}, {config.n_rollout_workers}",
        *memory_lines(uses, device_bytes),
        *([f"host memory per machine   {host / GIB:.0f} GiB for what is offloaded"] if host and fleet else []),
        *time_lines(step, best, worst),
        f"tokens per step           {tokens:,} ({trained:,} by the model) in {len(episodes):,} episodes",
        *run_lines(run, best_run, worst_run),
        f"disk                      {disk_bytes(config, model) / GIB:.1f} GiB of checkpoints at most",
        f"basis                     {_basis(question)}",
        *(f"note: {note}" for note in notes(config, model, step, max(use.total for use in uses), device_bytes)),
    ]


def step_episodes(config: Any, lengths: Path | None) -> list[Episode]:
    """Return the episodes of one step: drawn from a run's rollouts, or from assumptions."""
    count = config.data.train_batch_size * config.actor_rollout_ref.rollout.group_size
    if lengths is not None:
        return resample(recorded_episodes(lengths), count, config.trainer.seed)
    return assumed_episodes(config.data, config.task_config.generations, count, config.trainer.seed, Assumption())


def _costs(config: Any, model: Architecture, fleet: Fleet | None, episodes: Sequence[Episode]) -> list[Costs]:
    """Return the expected costs and, for devices that were not measured, those of the best and the worst case."""
    if fleet is None:
        from verl.trainer.plan.calibration import calibrate  # needs torch

        return [calibrate(config, episodes)]
    return [roofline(config, model, fleet, by) for by in (EXPECTED, BEST, WORST)]


def roofline(config: Any, model: Architecture, fleet: Fleet, by: Efficiency) -> Costs:
    """Return what data sheets say of ``fleet``, at the efficiency ``by``."""
    rollout, actor = config.actor_rollout_ref.rollout, config.actor_rollout_ref.actor
    size = DTYPE_BYTES[config.actor_rollout_ref.model.dtype]

    def trainer(checkpointing: bool, section: Any) -> RooflineTrainer:
        share = model.parameters / fleet.size
        offloaded = share * (4 * section.param_offload + 8 * section.optimizer_offload)
        return RooflineTrainer(model, fleet, by, checkpointing, size, offloaded)

    engine = RooflineEngine(model, fleet, by, rollout.tensor_model_parallel_size, DTYPE_BYTES[rollout.dtype])
    policy = trainer(config.actor_rollout_ref.model.enable_gradient_checkpointing, actor.fsdp_config)
    critic = trainer(config.critic.model.enable_gradient_checkpointing, config.critic.model.fsdp_config)
    return Costs(engine, policy, critic, side_by_side=False, write=_DISK)


def _basis(question: Question) -> str:
    lengths = (
        "recorded lengths" if question.lengths is not None else "assumed lengths (--lengths RUN takes recorded ones)"
    )
    search = f"a service of {question.search.rate:g} queries/s and {question.search.latency_s:g} s"
    if question.fleet is None:
        return f"timed on this machine, each piece alone; {lengths}; {search}"
    return f"data sheets and assumed efficiencies, nothing measured: expected (best to worst); {lengths}; {search}"


if __name__ == "__main__":
    sys.exit(main())
