"""From a validated configuration to a finished run: what is built, in which order, and what is left behind.

Everything that can fail cheaply is tried before anything heavy starts: the disk, the tokenizer, every row of the data,
the retrieval service; only then workers are spawned and models loaded.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from verl.algorithms.entropy import entropy_controller
from verl.algorithms.kl import kl_controller
from verl.config import RunConfig, flatten
from verl.config.describe import count_parameters
from verl.data.prompts import PromptStream
from verl.errors import CheckpointError
from verl.identity import model_fingerprint
from verl.registry import import_object
from verl.timing import Stopwatch, format_duration, process_tree_cpu_seconds
from verl.tracking import RunInfo, Tracker
from verl.trainer.checkpoint import Checkpoint, CheckpointStore
from verl.trainer.evaluate import Evaluator, MeasuresBounds, read_trajectories
from verl.trainer.loop import Parts, TrainingLoop
from verl.trainer.models import WorkerModels, spawn_models, weights_folder
from verl.trainer.report import write_report
from verl.trainer.run_folder import RunFolder, check_free_space, check_writable, config_hash, open_run
from verl.trainer.summary import Summary, source_commit, text_table, versions
from verl.types import Cluster, Prompt, Task, Trajectory
from verl.workers.models import load_tokenizer
from verl.workers.rollout.manager import DealingGroup, Rollouts
from verl.workers.rollout.worker import RolloutWorker

logger = logging.getLogger(__name__)

#: float32 weights, two moments of AdamW, and the float32 export.
_CHECKPOINT_BYTES = 16


def run_session(config: RunConfig, recipe: str) -> Path:
    """Run to the end and return the path of ``summary.json``. A stop signal raises SystemExit after saving."""
    watch = Stopwatch()
    base = Path(config.trainer.default_local_dir)
    check_writable(base, "trainer.default_local_dir")
    if config.save_val and config.save_val_dir is not None:
        check_writable(Path(config.save_val_dir), "save_val_dir")
    check_free_space(base, _checkpoint_bytes(config))
    with watch.phase("startup"):
        model = config.actor_rollout_ref.model
        tokenizer = load_tokenizer(model.path, model.trust_remote_code)
        task: Task = import_object(config.task, "task").from_config(config, tokenizer)
        train = [] if config.trainer.val_only else task.prompts("train")
        val = task.prompts("val")
        # An evaluation has no training rows; its stream is never asked for a batch.
        prompts = PromptStream(
            train or val, config.data.train_batch_size, config.trainer.seed, config.data.shuffle_train_dataloader
        )
        plan = _Plan(prompts, _prompts_hash(prompts.items), total_steps(config, prompts))
        asyncio.run(_check_services(task))
        resume = "never" if config.trainer.val_only else config.trainer.resume
        folder = open_run(
            base,
            resume,
            flatten(config),
            config.trainer.keep_checkpoints,
            plan.check,
        )
    logger.info("run folder: %s", folder.path)
    try:
        loop, cpu_seconds = _run_loop(config, folder, task, plan, val, watch)
        return _finish(loop, task, tokenizer.decode, recipe, watch, cpu_seconds)
    finally:
        folder.lock.close()


@dataclass(frozen=True, slots=True)
class _Plan:
    """What is trained on, and for how long."""

    prompts: PromptStream
    prompts_hash: str
    total_steps: int

    def check(self, checkpoint: Checkpoint) -> None:
        """Raise CheckpointError when the run cannot go on from a checkpoint: other rows, or fewer steps than it has."""
        checkpoint.state().check_data(self.prompts_hash, checkpoint.path)
        if self.total_steps < checkpoint.step:
            raise CheckpointError(
                f"trainer.total_training_steps (or total_epochs) asks for {self.total_steps} steps, but "
                f"{checkpoint.path} has done {checkpoint.step}; ask for more, or begin anew with trainer.resume=never"
            )


def _run_loop(
    config: RunConfig, folder: RunFolder, task: Task, plan: _Plan, val: list[Prompt], watch: Stopwatch
) -> tuple[TrainingLoop, float]:
    """Spawn the workers, train, end the workers; return the loop and the run's CPU seconds."""
    # Read now: the checkpoint that the run goes on from may be retired before its end.
    earlier = _earlier_cpu_seconds(folder)
    with watch.phase("startup"):
        cluster = make_cluster(config)
    try:
        with watch.phase("startup"):
            loop, models = _build(config, folder, cluster, task, plan, val)
        try:
            loop.run()
        finally:
            loop.parts.tracker.close()
            models.close()
        # Workers take their CPU seconds with them, so they are counted before the cluster goes.
        return loop, process_tree_cpu_seconds() + earlier
    finally:
        cluster.close()


def make_cluster(config: RunConfig) -> Cluster:
    """Return the cluster of ``cluster.kind``; Ray is imported only when it is used."""
    if config.cluster.kind == "local":
        from verl.cluster.local import LocalCluster

        return LocalCluster()
    from verl.cluster.ray import RayCluster

    own = ("rollout",) if config.actor_rollout_ref.rollout.placement == "split" else ()
    return RayCluster(
        threads_per_worker=config.cluster.threads_per_worker,
        oversubscribe=config.cluster.oversubscribe,
        own_devices=own,
        devices_per_worker={"rollout": config.actor_rollout_ref.rollout.tensor_model_parallel_size},
    )


async def _check_services(task: Task) -> None:
    try:
        await task.start()
    finally:
        await task.close()


def _build(
    config: RunConfig, folder: RunFolder, cluster: Cluster, task: Task, plan: _Plan, val: list[Prompt]
) -> tuple[TrainingLoop, WorkerModels]:
    """Spawn the workers and put the loop together."""
    total = plan.total_steps
    workers = cluster.spawn("rollout", RolloutWorker, config.n_rollout_workers, config)
    rollouts = Rollouts(cast(DealingGroup, workers), config)
    weights = weights_folder(folder.path, folder.run_id, config.trainer.nnodes, _checkpoint_bytes(config) // 4)
    models = spawn_models(cluster, config, rollouts, max(1, total), weights)
    flat = flatten(config)
    info = RunInfo(
        directory=folder.path,
        project=config.trainer.project_name,
        experiment=config.trainer.experiment_name,
        total_steps=total,
        resumed_step=folder.step if folder.restored is not None else None,
        run_id=folder.run_id,
        config=flat,
    )
    parts = Parts(
        config=config,
        folder=folder,
        config_hash=config_hash(flat),
        prompts=plan.prompts,
        prompts_hash=plan.prompts_hash,
        rollouts=rollouts,
        models=models,
        kl=kl_controller(config.algorithm.kl_ctrl),
        entropy=entropy_controller(config.actor_rollout_ref.actor),
        evaluator=Evaluator(task, val, rollouts, config, folder.path, run_facts(config)),
        tracker=Tracker(info, config.trainer.logger),
        store=CheckpointStore(folder.path, config.trainer.keep_checkpoints),
        total_steps=total,
    )
    return TrainingLoop(parts), models


def run_facts(config: RunConfig) -> dict[str, dict[str, Any]]:
    """Return what the trainer knows of an evaluation, by section: model, decoding, code, and the whole config."""
    model, rollout = config.actor_rollout_ref.model, config.actor_rollout_ref.rollout
    return {
        "decoding": {"engine": rollout.name, "dtype": rollout.dtype, "deterministic": rollout.deterministic}
        | {"seed": config.trainer.seed},
        "model": {"path": model.path, "weights": model_fingerprint(Path(model.path))},
        "code": {"commit": source_commit(), "versions": versions()},
        "config": flatten(config),
    }


def total_steps(config: RunConfig, prompts: PromptStream) -> int:
    """Return the number of updates of the run; 0 for an evaluation."""
    if config.trainer.val_only:
        return 0
    return config.trainer.total_training_steps or config.trainer.total_epochs * prompts.batches_per_epoch


def _prompts_hash(prompts: Sequence[Prompt]) -> str:
    digest = hashlib.sha256()
    for prompt in prompts:
        digest.update(f"{prompt.prompt_id}\0{prompt.token_ids}\n".encode())
    return digest.hexdigest()[:16]


def _checkpoint_bytes(config: RunConfig) -> int:
    parameters = count_parameters(Path(config.actor_rollout_ref.model.path)) or 0
    return parameters * _CHECKPOINT_BYTES * (2 if config.uses_critic else 1)


def _earlier_cpu_seconds(folder: RunFolder) -> float:
    """Return the CPU seconds of the sessions before this one; ``step`` is the sum of its phases."""
    if folder.restored is None:
        return 0.0
    return math.fsum(value for name, value in folder.restored.state().cpu_seconds.items() if name != "step")


# ---------------------------------------------------------------------------------------------------------------
# What is left behind


def _finish(loop: TrainingLoop, task: Task, decode: Any, recipe: str, watch: Stopwatch, cpu_seconds: float) -> Path:
    """Write report and summary, log the table."""
    folder, config = loop.parts.folder.path, loop.config
    first, last = _evaluation(folder, 0), _evaluation(folder, loop.step)
    if loop.step == 0:
        first = []
    evaluator = loop.parts.evaluator
    before, after = (evaluator.figures(step) if side else None for step, side in ((0, first), (loop.step, last)))
    checkpoints = {checkpoint.step: str(checkpoint.path) for checkpoint in loop.parts.store.complete()}
    watch.absorb(loop.watch)
    summary = Summary(
        recipe=recipe,
        seed=config.trainer.seed,
        commit=source_commit(),
        versions=versions(),
        steps=loop.step,
        wall_seconds={name: value for name, value in watch.wall_seconds.items() if name != "step"},
        cpu_minutes=cpu_seconds / 60,
        checkpoint=checkpoints.get(loop.step),
        best_checkpoint=checkpoints.get(loop.best[0]) if loop.best[0] is not None else None,
        before=before,
        after=after,
        bounds=evaluator.read_bounds(loop.step),
        gain=_gain(task, first, last),
        watches=loop.watchman.history(),
        folder=str(folder),
        report=str(folder / "report.html"),
        evaluation=str(folder / "eval" / "val" / f"step_{loop.step}.jsonl"),
    )
    write_report(folder / "report.html", vars(summary), loop.parts.tracker.file.rows(), first, last, decode)
    path = summary.write(folder)
    logger.info("%s", text_table(before, after, _SHOWN))
    logger.info(
        "%d steps, %s of wall time, %.1f CPU minutes; everything is in %s",
        summary.steps,
        format_duration(math.fsum(summary.wall_seconds.values())),
        summary.cpu_minutes,
        folder,
    )
    return path


def _gain(task: Task, first: Sequence[Trajectory], last: Sequence[Trajectory]) -> Mapping[str, Any] | None:
    """Return the task's paired comparison; None, with a warning, when the two evaluations asked other questions."""
    if not isinstance(task, MeasuresBounds) or not first or not last:
        return None
    if [trajectory.prompt_id for trajectory in first] != [trajectory.prompt_id for trajectory in last]:
        logger.warning("no gain is computed: the first evaluation asked other questions (data.val_files has changed)")
        return None
    return dict(task.compare(first, last))


#: Shown first in the table that ends a run, where the task has them.
_SHOWN = ("n", "em", "f1", "rewrite_f1", "recall_at_3", "searches", "format_valid", "bertscore", "judge")


def _evaluation(folder: Path, step: int) -> list[Trajectory]:
    path = folder / "eval" / "val" / f"step_{step}.jsonl"
    return read_trajectories(path) if path.exists() else []
