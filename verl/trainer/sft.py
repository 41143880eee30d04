"""Supervised training: batches of rows, weighted negative log-likelihood, one update per step.

Simplified on purpose: no LoRA, one learning-rate schedule, the same packed engine as reinforcement learning. The loss
of a step is the sum over trained tokens of weight * -log p, divided by the sum of weights of the step over all ranks.
"""

from __future__ import annotations

import json
import logging
import shutil
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from verl.config import SftConfig
from verl.data.batch import Scored, pack_batch
from verl.data.packing import plan_micro_batches
from verl.data.prompts import Stream
from verl.data.supervised import RowFormat, load_rows
from verl.errors import CheckpointError, HealthError
from verl.tracking import RunInfo, Tracker, write_atomically
from verl.trainer.run_folder import check_writable
from verl.workers import device as devices
from verl.workers.device import Device
from verl.workers.engine import Engine, EngineSpec
from verl.workers.models import load_tokenizer
from verl.workers.optim import OptimSpec

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SftResult:
    """What a run leaves behind."""

    export: Path
    """Hugging Face folder of the trained model."""
    metrics: Path
    """``metrics.jsonl``: one row per step."""
    steps: int
    loss: float
    """Training loss of the last step."""
    val_loss: float | None
    cpu_seconds: float


class SftTrainer:
    """One supervised run, seen from this process's rank. ``run`` does all of it."""

    def __init__(self, config: SftConfig, device: Device) -> None:
        self.config = config
        self.device = device
        self.folder = Path(config.trainer.default_local_dir)
        check_writable(self.folder, "trainer.default_local_dir")
        tokenizer = load_tokenizer(config.model.partial_pretrain, config.model.trust_remote_code)
        form = RowFormat(**{name: getattr(config.data, name) for name in RowFormat.__dataclass_fields__})
        rows = load_rows(config.data.train_files, tokenizer, form)
        self.val_rows = load_rows(config.data.val_files, tokenizer, form)
        self.stream: Stream[Scored] = Stream(
            rows, config.data.train_batch_size, config.trainer.seed, config.data.shuffle
        )
        self.total_steps = (
            config.trainer.total_training_steps or self.stream.batches_per_epoch * config.trainer.total_epochs
        )
        self.engine = Engine(self._spec(), device)
        if config.trainer.resume_path is not None:
            self._load(Path(config.trainer.resume_path))
        logger.info("%d training rows, %d held-out rows, %d steps", len(rows), len(self.val_rows), self.total_steps)

    def _spec(self) -> EngineSpec:
        model, optim = self.config.model, self.config.optim
        return EngineSpec(
            model_path=model.partial_pretrain,
            seed=self.config.trainer.seed,
            random_start=True,
            dtype=model.dtype,
            trust_remote_code=model.trust_remote_code,
            gradient_checkpointing=model.enable_gradient_checkpointing,
            max_grad_norm=optim.clip_grad,
            param_offload=model.fsdp_config.param_offload,
            optimizer_offload=model.fsdp_config.optimizer_offload,
            optim=OptimSpec(
                lr=optim.lr,
                total_steps=self.total_steps,
                name=optim.name,
                betas=optim.betas,
                weight_decay=optim.weight_decay,
                warmup_ratio=optim.warmup_steps_ratio,
                schedule=optim.warmup_style,
                min_lr_ratio=optim.min_lr_ratio or 0.0,
                matrix_lr=optim.muon_lr,
            ),
        )

    @property
    def step(self) -> int:
        """Updates made so far."""
        return self.engine.update

    # -- one step ----------------------------------------------------------------------------------------------------

    def train_step(self, rows: Sequence[Scored]) -> dict[str, float]:
        """Make one update on ``rows`` and return its figures (the same on every rank)."""
        self.engine.update += 1
        cpu = time.process_time()
        total_weight = sum(sum(row.columns["weights"]) for row in rows)
        self.engine.train_mode()
        micros = self._my_share(rows)
        loss_sum = 0.0
        for number, indices in enumerate(micros):
            batch = pack_batch([rows[i] for i in indices], ("weights",)).to(self.device.torch_device)
            logprobs, _ = self.engine.forward(batch)
            loss = -(logprobs * batch.columns["weights"]).sum() / total_weight
            self.engine.backward(loss, last=number == len(micros) - 1)
            loss_sum += float(loss.detach())
        figures = self.engine.step()
        if figures is None:
            raise HealthError(
                f"supervised training: the gradient of update {self.engine.update} is not finite, and no weight was "
                "changed; lower optim.lr or grad_clip"
            )
        loss_sum, cpu = devices.sum_over_ranks(self.device, [loss_sum, time.process_time() - cpu])
        return {
            "sft/loss": loss_sum,
            "sft/grad_norm": figures["grad_norm"],
            "sft/lr": figures["lr"],
            "sft/tokens": float(sum(row.cost for row in rows)),
            "sft/trained_tokens": float(sum(sum(row.mask) for row in rows)),
            "cpu_s/step": cpu,
        }

    def validation_loss(self) -> float | None:
        """Return the weighted loss per token over the held-out rows, None without any."""
        if not self.val_rows:
            return None
        total = 0.0
        for indices in self._my_share(self.val_rows):
            batch = pack_batch([self.val_rows[i] for i in indices], ("weights",))
            logprobs, _ = self.engine.score(batch)
            total -= float((logprobs * batch.columns["weights"]).sum())
        weight = sum(sum(row.columns["weights"]) for row in self.val_rows)
        return devices.sum_over_ranks(self.device, [total])[0] / weight

    def _my_share(self, rows: Sequence[Scored]) -> tuple[tuple[int, ...], ...]:
        data = self.config.data
        limit: dict[str, int] = (
            {"max_tokens": data.max_token_len_per_gpu}
            if data.use_dynamic_bsz
            else {"max_sequences": data.micro_batch_size}
        )
        return plan_micro_batches([row.cost for row in rows], self.device.world_size, **limit)[self.device.rank]

    # -- the run -----------------------------------------------------------------------------------------------------

    def run(self) -> SftResult:
        """Train to the end, log every step, export the model. Returns where everything is."""
        trainer = self.config.trainer
        tracker = self._tracker()
        last = min(self.total_steps, trainer.stop_after or self.total_steps)
        started, cpu_started = time.perf_counter(), time.process_time()
        first_step = self.step
        val_loss: float | None = None
        figures: dict[str, float] = {"sft/loss": float("nan")}
        if trainer.validate_before_training and self.step == 0 and (val_loss := self.validation_loss()) is not None:
            self._log(tracker, 0, {"sft/val_loss": val_loss})
        while self.step < last:
            began = time.perf_counter()
            figures = self.train_step(self.stream.next_batch())
            final = self.step == last
            if (final or _due(self.step, trainer.test_freq)) and (val_loss := self.validation_loss()) is not None:
                figures["sft/val_loss"] = val_loss
            figures["timing_s/step"] = time.perf_counter() - began
            per_step = (time.perf_counter() - started) / (self.step - first_step)
            figures["progress/remaining"] = per_step * (last - self.step)
            self._log(tracker, self.step, figures)
            if not final and _due(self.step, trainer.save_freq):
                self.save(self.folder / f"global_step_{self.step}")
        if trainer.save_freq > 0:
            self.save(self.folder / f"global_step_{self.step}")
        self.engine.export(self.folder / "hf")
        devices.barrier(self.device)
        if tracker is not None:
            tracker.close()
        cpu = devices.sum_over_ranks(self.device, [time.process_time() - cpu_started])[0]
        return SftResult(
            self.folder / "hf", self.folder / "metrics.jsonl", self.step, figures["sft/loss"], val_loss, cpu
        )

    def _tracker(self) -> Tracker | None:
        """Open the log on rank 0: cut back to the restored step, or begun anew."""
        if not self.device.is_main:
            return None
        trainer = self.config.trainer
        self.folder.mkdir(parents=True, exist_ok=True)
        info = RunInfo(
            directory=self.folder,
            project=trainer.project_name,
            experiment=trainer.experiment_name,
            total_steps=self.total_steps,
            resumed_step=self.step or None,
            run_id=trainer.experiment_name,
            config=self.config.model_dump(mode="json"),
        )
        tracker = Tracker(info, [name for name in trainer.logger if name != "console"])
        if self.step:
            tracker.file.cut_back(self.step)
        else:
            tracker.file.path.unlink(missing_ok=True)
        return tracker

    def _log(self, tracker: Tracker | None, step: int, figures: dict[str, float]) -> None:
        if tracker is None:
            return
        tracker.log(step, figures)
        trainer = self.config.trainer
        due = step % trainer.log_every_n_steps == 0 or step in (0, 1, self.total_steps) or "sft/val_loss" in figures
        if due and "console" in trainer.logger:
            shown = {name.removeprefix("sft/"): value for name, value in figures.items() if name in _SHOWN}
            text = "  ".join(f"{name} {value:.4g}" for name, value in shown.items())
            logger.info("step %d/%d  %s", step, self.total_steps, text)

    # -- checkpoints -------------------------------------------------------------------------------------------------

    def save(self, folder: Path) -> None:
        """Write a resumable checkpoint; its ``state.json`` comes last and marks it complete."""
        if self.device.is_main:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
        devices.barrier(self.device)
        self.engine.save(folder / "trainer")
        self.engine.export(folder / "hf")
        if self.device.is_main:
            state = {"step": self.step, "stream": self.stream.state()}
            write_atomically(folder / "state.json", json.dumps(state))
        devices.barrier(self.device)

    def _load(self, folder: Path) -> None:
        file = folder / "state.json"
        if not file.is_file():
            raise CheckpointError(f"trainer.resume_path: {folder} holds no complete checkpoint (state.json is missing)")
        state = json.loads(file.read_text(encoding="utf-8"))
        self.engine.load(folder / "trainer")
        self.stream.restore(state["stream"])


_SHOWN = ("sft/loss", "sft/val_loss", "sft/lr", "sft/grad_norm", "timing_s/step", "progress/remaining")


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def summary(result: SftResult) -> dict[str, Any]:
    """Return the result as JSON values."""
    return {name: str(value) if isinstance(value, Path) else value for name, value in asdict(result).items()}
