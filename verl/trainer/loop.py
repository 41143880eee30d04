"""The training loop. ``train_step`` is the algorithm on one screen; everything else here serves it.

One step: roll out, assemble samples, score them (old policy, reference, values), estimate advantages, update critic and
policy, publish the weights, evaluate, save, log. What each phase means is defined by the part that does it.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from verl.algorithms.advantages import estimate
from verl.algorithms.correction import correct
from verl.algorithms.entropy import EntropyController
from verl.algorithms.kl import KlController
from verl.data.prompts import PromptStream
from verl.data.samples import Assembled, assemble, permute_rewards
from verl.errors import EngineError, HealthError, RetrievalError, WatchError
from verl.metrics import StepMetrics
from verl.timing import Stopwatch
from verl.tracking import Tracker
from verl.trainer.checkpoint import CheckpointStore, TrainerState
from verl.trainer.evaluate import Evaluation, Evaluator, Generates
from verl.trainer.run_folder import RunFolder, write_records
from verl.trainer.signals import StopRequest
from verl.trainer.step_figures import add_advantage_figures, add_episode_figures, add_sample_figures
from verl.trainer.step_rollouts import StepRollouts, roll_out
from verl.trainer.watches import Watchman
from verl.types import Sample, episode_seed

logger = logging.getLogger(__name__)


class Models(Protocol):
    """The worker groups as the loop sees them: one call per phase (``verl.trainer.models.WorkerModels``)."""

    def score(self, samples: Sequence[Sample]) -> tuple[list[Sample], Mapping[str, float]]: ...

    def update(self, samples: Sequence[Sample], train_policy: bool, entropy_coeff: float) -> Mapping[str, float]: ...

    def dropped_prompts(self) -> tuple[str, ...]: ...

    def publish(self, version: int) -> None: ...

    def save(self, folder: Path, export: bool) -> None: ...

    def load(self, folder: Path) -> None: ...


@dataclass
class Parts:
    """What the loop is built from; see ``verl.trainer.session``."""

    config: Any
    folder: RunFolder
    config_hash: str
    prompts: PromptStream
    prompts_hash: str
    rollouts: Generates
    models: Models
    kl: KlController
    entropy: EntropyController
    evaluator: Evaluator
    tracker: Tracker
    store: CheckpointStore
    total_steps: int


class TrainingLoop:
    """Runs a new or restored run to its last step."""

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self.config = parts.config
        self.step = 0
        self.best: tuple[int | None, float | None] = (None, None)
        self.watchman = Watchman(parts.config.health)
        self.watch = Stopwatch()
        """Seconds by phase over the whole run, earlier sessions included."""
        self._stop = StopRequest()
        self._done: tuple[Mapping[str, float], Evaluation | None] = ({}, None)
        """Figures and evaluation of the last step."""
        self._saved = 0
        """The last step that has a checkpoint."""
        self._whole = True
        """The weights are those of ``step``: no update is under way."""

    def run(self) -> None:
        """Train to ``total_steps``. After a SIGTERM or SIGINT: save, then raise ``SystemExit(128 + signal)``."""
        with self._stop.listening():
            self.restore()
            self.parts.models.publish(self.step)
            if self.step == 0 and self.config.trainer.val_before_train:
                evaluation = self._evaluate(0)
                self.parts.tracker.log(0, evaluation.metrics() | self.watch.metrics())
            self._measure_bounds(only_at=0)
            while self.step < self.parts.total_steps:
                self._stop.raise_if_requested()
                self._train_or_save()
            self._stop.raise_if_requested()
            self._measure_bounds(only_at=self.parts.total_steps)

    def _train_or_save(self) -> None:
        """Make the next step; when its episodes fail, save the one before: an outage must not cost what was learned."""
        position = self.parts.prompts.state()
        try:
            self.train_step(self.step + 1)
        except WatchError:
            raise  # the weights are what is wrong
        except (EngineError, HealthError, RetrievalError):
            if self._whole and self.step > self._saved:
                self.parts.prompts.restore(position)
                self._save(*self._done)
                logger.info("saved step %d; start again once the cause is mended", self.step)
            raise

    def train_step(self, step: int) -> None:
        """Make one step: the algorithm, phase by phase."""
        parts, watch, figures = self.parts, Stopwatch(), StepMetrics()
        with watch.phase("step"):
            with watch.phase("rollout"):
                rolled = self._rollout(step)
            trajectories = rolled.trained
            add_episode_figures(rolled.generated, figures)
            if self.config.algorithm.permute_rewards:
                trajectories = permute_rewards(trajectories, episode_seed(self.config.trainer.seed, step, "permute", 0))
            batch = assemble(trajectories)
            self._check_batch(step, batch, figures)
            with watch.phase("score"):
                samples, scoring = parts.models.score(batch.samples)
            add_sample_figures(samples, step - 1, figures)
            with watch.phase("advantage"):
                coefficient = parts.kl.value if self.config.kl_in_reward else 0.0
                samples, estimation = estimate(samples, self.config.algorithm, coefficient)
                samples, correction = correct(samples, self.config.algorithm.correction)
            add_advantage_figures(samples, figures)
            self._whole = False
            bonus = parts.entropy.value(scoring["policy/entropy"])
            with watch.phase("update"):
                training = parts.models.update(samples, step > self.config.trainer.critic_warmup, bonus)
            self._check_health(step, training)
            self._name_dropped(step, training)
            with watch.phase("publish"):
                parts.models.publish(step)
        self.step, self._whole = step, True
        for produced in (rolled.figures, scoring, estimation, correction, training):
            figures.merge(produced)
        figures.add("policy/entropy_coeff", bonus)
        parts.entropy.update(scoring["policy/entropy"])
        self._control_kl(figures, len(samples))
        self.watch.absorb(watch)
        evaluation = self._evaluate(step, watch) if self._evaluation_due(step) else None
        self._finish_step(watch, figures, evaluation)

    # -----------------------------------------------------------------------------------------------------------

    def _rollout(self, step: int) -> StepRollouts:
        rolled = roll_out(self.parts.prompts, self.parts.rollouts, self.config, step)
        path = self.parts.folder.path / "rollouts" / f"step_{step}.jsonl"
        write_records(path, [trajectory.to_record() for trajectory in rolled.generated])
        return rolled

    def _check_batch(self, step: int, batch: Assembled, figures: StepMetrics) -> None:
        figures.merge({f"data/dropped/{reason}": count for reason, count in batch.drops.items()})
        if not batch.samples:
            raise HealthError(f"step {step}: no episode can be trained on; dropped: {dict(batch.drops)}")
        for sample in batch.samples:
            if not math.isfinite(sample.score):
                raise HealthError(f"step {step}: the reward of {sample.sample_id} is {sample.score}, not a number")

    def _check_health(self, step: int, figures: Mapping[str, float]) -> None:
        """Stop before damaged weights are published or saved."""
        broken = sorted(name for name, value in figures.items() if not math.isfinite(value))
        if broken:
            raise HealthError(
                f"step {step}: {', '.join(broken)} not finite; the run stops before these weights are saved. Lower the "
                f"learning rate, or look at {self.parts.folder.path / 'rollouts' / f'step_{step}.jsonl'}"
            )

    def _name_dropped(self, step: int, figures: Mapping[str, float]) -> None:
        """Say which prompts an update left out; the figures say how many optimiser steps."""
        if any(name.endswith("/dropped_updates") for name in figures):
            prompts = self.parts.models.dropped_prompts()
            logger.warning(
                "step %d: a gradient is not finite; the optimiser step is left out, with prompts %s",
                step, ", ".join(prompts),
            )  # fmt: skip

    def _control_kl(self, figures: StepMetrics, n: int) -> None:
        """Move the KL coefficient by this step's divergence; it applies from the next step on."""
        if not self.config.kl_in_reward:
            return
        figures.add("kl/coefficient", self.parts.kl.value)
        divergence = figures.result().get("kl/reference")
        if divergence is not None:
            self.parts.kl.update(divergence, n)

    def _evaluate(self, step: int, watch: Stopwatch | None = None) -> Evaluation:
        """Evaluate; the seconds go to the run and, when given, to the step's ``watch``."""
        own = Stopwatch()
        with own.phase("evaluate"):
            evaluation = self.parts.evaluator.run(step)
        for other in (self.watch, watch):
            if other is not None:
                other.absorb(own)
        return evaluation

    def _measure_bounds(self, only_at: int) -> None:
        """Run the task's fixed pipelines with the weights of this step: the same reader, another query."""
        if self.config.job.evaluate_bounds and self.step == only_at:
            with self.watch.phase("bounds"):
                self.parts.evaluator.measure_bounds(self.step)

    def _evaluation_due(self, step: int) -> bool:
        frequency = self.config.trainer.test_freq
        return step == self.parts.total_steps or (frequency > 0 and step % frequency == 0)

    def _finish_step(self, watch: Stopwatch, figures: StepMetrics, evaluation: Evaluation | None) -> None:
        """Save when due, then log. The checkpoint holds the row too, so that a kill between the two loses nothing."""
        done, wall = figures.result(), watch.wall_seconds["step"]
        figures.add("data/epoch", self.parts.prompts.epoch)
        figures.add("throughput/episodes_per_s", done["data/episodes"] / wall)
        figures.add("throughput/trained_tokens_per_s", done["data/trained_tokens"] / wall)
        figures.add("progress/remaining", self._remaining())
        row = figures.result() | watch.metrics() | ({} if evaluation is None else evaluation.metrics())
        row |= self.watchman.observe(self.step, row)
        self._done = row, evaluation
        if self.watchman.stops:
            self.parts.tracker.log(self.step, row)
            raise WatchError(self._fall_back())
        if self._save_due(self.step):
            saving = Stopwatch()
            with saving.phase("save"):
                self._save(row, evaluation)
            self.watch.absorb(saving)
            row |= saving.metrics()
        self.parts.tracker.log(self.step, row)

    def _remaining(self) -> float:
        """Return the wall seconds to the end, by the averages of this run so far."""
        total, seconds = self.parts.total_steps, self.watch.wall_seconds
        steps = seconds["step"] / self.step * (total - self.step)
        done = sum(self._evaluation_due(step) for step in range(1, self.step + 1))
        done += self.config.trainer.val_before_train
        ahead = sum(self._evaluation_due(step) for step in range(self.step + 1, total + 1))
        return steps + (seconds["evaluate"] / done * ahead if done else 0.0)

    def _fall_back(self) -> str:
        """Put checkpoints that are newer than the last good one out of the way of a resume; return why the run ends."""
        store, cause = self.parts.store, "; ".join(self.watchman.stops)
        good = self.watchman.last_good(checkpoint.step for checkpoint in store.complete())
        if good is None:
            return f"step {self.step}: {cause}. No checkpoint is known to be good (trainer.save_freq); begin anew"
        store.cut_back(good)
        kept = store.at(good)
        begin = f", or with other settings from {kept.export}" if kept.export else ""
        return f"step {self.step}: {cause}. {kept.path} is the last good checkpoint: go on from it{begin}"

    # -----------------------------------------------------------------------------------------------------------

    def _save_due(self, step: int) -> bool:
        frequency = self.config.trainer.save_freq
        last = step == self.parts.total_steps or self._stop.number is not None
        return last or (frequency > 0 and step % frequency == 0)

    def _save(self, row: Mapping[str, float], evaluation: Evaluation | None) -> None:
        parts, score = self.parts, None if evaluation is None else evaluation.score
        if score is not None and (self.best[1] is None or score > self.best[1]):
            self.best = (self.step, score)
        state = TrainerState(
            step=self.step,
            run_id=parts.folder.run_id,
            config_hash=parts.config_hash,
            prompts=parts.prompts.state(),
            prompts_hash=parts.prompts_hash,
            kl=parts.kl.state(),
            entropy=parts.entropy.state(),
            score=score,
            best_step=self.best[0],
            best_score=self.best[1],
            figures=dict(row),
            wall_seconds=self.watch.wall_seconds,
            cpu_seconds=self.watch.cpu_seconds,
        )
        every, frequency = self.config.trainer.export_every, max(1, self.config.trainer.save_freq)
        export = self.step == parts.total_steps or (every > 0 and self.step // frequency % every == 0)
        good = self.watchman.protected(checkpoint.step for checkpoint in parts.store.complete())
        parts.store.save(state, lambda folder: parts.models.save(folder, export), good)
        self._saved = self.step

    def restore(self) -> None:
        """Load the restored checkpoint, if there is one, into every part; its data were checked with the folder."""
        checkpoint, parts = self.parts.folder.restored, self.parts
        if checkpoint is None:
            return
        state = checkpoint.state()
        parts.models.load(checkpoint.path)
        parts.prompts.restore(state.prompts)
        parts.kl.restore(state.kl)
        parts.entropy.restore(state.entropy)
        self.step, self.best = state.step, (state.best_step, state.best_score)
        self._saved = state.step
        self.watch = Stopwatch(state.wall_seconds, state.cpu_seconds)
        parts.tracker.log_again(state.step, state.figures)
        self.watchman.remember(parts.tracker.file.rows())
        logger.info("resumed from %s: %d of %d steps are done", checkpoint.path, state.step, parts.total_steps)
