"""Audit: run episodes and show that what was sampled is what is trained, for this model, template and engine.

    python -m verl.trainer.main_audit --config-name tiny_ppo retriever.url=http://127.0.0.1:8002/retrieve
    python -m verl.trainer.main_audit --config-name smollm2 audit.episodes=16 actor_rollout_ref.rollout.name=hf

The configuration is that of training (``audit.*`` sets the number of episodes and the limits). A table goes to standard
output and ``audit.json`` into ``trainer.default_local_dir``. Exit status: 0 exact, 1 something is not, 2 a mistake
that the message explains.
"""

from __future__ import annotations

import asyncio
import json
import math
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from verl.config import RunConfig
from verl.errors import DataError, HealthError
from verl.tracking import write_atomically
from verl.trainer.main_ppo import run_program
from verl.types import Finding, Level, Prompt, Sample, Task, Trajectory

if TYPE_CHECKING:
    from verl.trainer.audit import Gap, Gaps

VERSION = 0
"""Weight version that is published and sampled from."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run with the arguments of ``verl.trainer.main_ppo``; returns the exit status."""
    return run_program(arguments, audit)


def audit(config: RunConfig, _recipe: str) -> int:
    """Run the audit that ``config`` describes, print and write its result; 0 exact, 1 not exact."""
    from verl.registry import import_object
    from verl.trainer.audit import ChecksTemplate, check_gaps, check_round_trip, check_tokens, measure_gaps
    from verl.trainer.run_folder import check_writable
    from verl.workers.models import load_tokenizer

    folder = Path(config.trainer.default_local_dir)
    check_writable(folder, "trainer.default_local_dir")
    folder.mkdir(parents=True, exist_ok=True)
    model = config.actor_rollout_ref.model
    tokenizer = load_tokenizer(model.path, model.trust_remote_code)
    task: Task = import_object(config.task, "task").from_config(config, tokenizer)
    findings = task.check_template() if isinstance(task, ChecksTemplate) else []
    prompts, per_prompt = choose_prompts(task.prompts(config.audit.split), config.audit.episodes)
    asyncio.run(_check_services(task))
    trajectories, recordings, samples = run_episodes(config, prompts, per_prompt)
    if not samples:
        raise HealthError(f"none of {len(trajectories)} episodes has tokens of the model to compare")
    gaps = measure_gaps(trajectories, samples)
    findings += check_tokens(trajectories, recordings, samples)
    findings += [check_round_trip(trajectories, tokenizer), check_gaps(gaps, *gap_limits(config))]
    text = render(config, trajectories, findings, gaps)
    sys.stdout.write(text)
    record = {"model": model.path, "exact": is_exact(findings), "findings": [asdict(f) for f in findings]}
    record |= {"gaps": asdict(gaps), "engine": config.actor_rollout_ref.rollout.name, "episodes": len(trajectories)}
    path = folder / "audit.json"
    write_atomically(path, json.dumps(record, indent=2) + "\n")
    sys.stdout.write(f"{path}\n")
    return 0 if is_exact(findings) else 1


def choose_prompts(prompts: Sequence[Prompt], episodes: int) -> tuple[list[Prompt], int]:
    """Return prompts and samples per prompt that make at least ``episodes`` episodes; refused prompts are left out."""
    usable = [prompt for prompt in prompts if prompt.token_ids]
    if not usable:
        raise DataError("audit.split: none of its prompts fits data.max_start_length")
    per_prompt = math.ceil(episodes / len(usable))
    return usable[: math.ceil(episodes / per_prompt)], per_prompt


async def _check_services(task: Task) -> None:
    try:
        await task.start()
    finally:
        await task.close()


def run_episodes(
    config: RunConfig, prompts: Sequence[Prompt], per_prompt: int
) -> tuple[list[Trajectory], dict[str, Any], list[Sample]]:
    """Publish the model to the engines, run the episodes as training would, and score them with the trainer."""
    from verl.data.samples import assemble, fill
    from verl.trainer.session import make_cluster
    from verl.workers.policy import PolicyWorker
    from verl.workers.rollout.manager import DealingGroup, Rollouts
    from verl.workers.rollout.recording import RecordingWorker

    rollout_config = config.actor_rollout_ref.rollout
    cluster = make_cluster(config)
    try:
        rollout = cluster.spawn("rollout", RecordingWorker, config.n_rollout_workers, config)
        policy = cluster.spawn("policy", PolicyWorker, config.world_size, config, 1)
        rollouts = Rollouts(cast(DealingGroup, rollout), config)
        rollouts.begin_setup()
        policy.wait(policy.submit("setup"))
        rollouts.setup()
        with tempfile.TemporaryDirectory(dir=config.trainer.default_local_dir, prefix="audit-weights-") as weights:
            manifests = policy.wait(policy.submit("publish", VERSION, weights))
            rollouts.publish(manifests[0])
            trajectories = rollouts.generate(
                prompts,
                0,
                per_prompt,
                temperature=rollout_config.temperature,
                top_p=rollout_config.top_p,
                top_k=rollout_config.top_k,
            )
            recordings: dict[str, Any] = {}
            for share in rollout.wait(rollout.submit("recordings")):
                recordings |= share
            samples = assemble(trajectories).samples
            if samples:
                shares = policy.wait(policy.submit("log_probs", samples))
                samples = fill(samples, "old_logprobs", shares)
        return trajectories, recordings, samples
    finally:
        cluster.close()


def gap_limits(config: RunConfig) -> tuple[float, float]:
    """Return (max, mean) nats that are allowed; in lower precision one token may be off by anything."""
    exact = {config.actor_rollout_ref.model.dtype, config.actor_rollout_ref.rollout.dtype} == {"float32"}
    default = 1e-4 if exact else math.inf
    return config.audit.max_gap if config.audit.max_gap is not None else default, config.audit.mean_gap


def is_exact(findings: Sequence[Finding]) -> bool:
    """True when no check failed."""
    return all(finding.level is not Level.FAIL for finding in findings)


def render(config: RunConfig, trajectories: Sequence[Trajectory], findings: Sequence[Finding], gaps: Gaps) -> str:
    """Return the report as text: what was run, every check, the gaps, the verdict with its remedies."""
    rollout, model = config.actor_rollout_ref.rollout, config.actor_rollout_ref.model
    turns = sum(trajectory.n_turns for trajectory in trajectories)
    lines = [
        f"model {model.path} ({model.dtype}), engine {rollout.name} ({rollout.dtype}), T={rollout.temperature:g}",
        f"{len(trajectories)} episodes, {turns} turns, {gaps.whole.tokens} sampled tokens",
        "",
    ]
    lines += [f"{f.level.value:<5} {f.check:<18} {f.detail}" for f in findings]
    lines += ["", f"{'gap in nats':<18} {'tokens':>8} {'max':>10} {'mean':>10} {'k1':>11} {'k3':>10}"]
    lines.append(_row("all", gaps.whole))
    lines += [_row(f"turn {name}", gap) for name, gap in gaps.by_turn.items()]
    lines += [_row(f"position {name}", gap) for name, gap in gaps.by_position.items()]
    lines += [f"largest gap of a whole episode: {gaps.largest_ratio:.3g} nats", ""]
    failed = [finding for finding in findings if finding.level is Level.FAIL]
    lines.append("verdict: NOT exact" if failed else "verdict: exact; what was sampled is what is trained")
    lines += [f"  {finding.check}: {finding.remedy}" for finding in findings if finding.level is not Level.OK]
    return "\n".join(lines) + "\n"


def _row(name: str, gap: Gap) -> str:
    return f"{name:<18} {gap.tokens:>8} {gap.largest:>10.2e} {gap.mean:>10.2e} {gap.k1:>11.2e} {gap.k3:>10.2e}"


if __name__ == "__main__":
    sys.exit(main())
