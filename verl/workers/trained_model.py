"""What the policy and the critic worker have in common: one trained model in one process of a group.

Every method is called on all ranks with the same arguments, in the same order.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from verl.workers import device as devices
from verl.workers.engine import Engine, EngineSpec
from verl.workers.optim import OptimSpec


class TrainedModel(ABC):
    """``setup`` must be called first; the constructor only keeps its arguments, so that building a worker is cheap."""

    def __init__(self, config: Any, total_steps: int) -> None:
        self.config = config
        self.total_steps = total_steps
        self._engine: Engine | None = None
        self._dropped: tuple[str, ...] = ()

    @property
    def engine(self) -> Engine:
        """The training engine; an error before ``setup``."""
        if self._engine is None:
            raise RuntimeError(f"{type(self).__name__}.setup was not called")
        return self._engine

    @abstractmethod
    def spec(self) -> EngineSpec:
        """Return what to load and how to train it."""

    def setup(self) -> None:
        """Join the group and load the model. Raises ModelError, ResourceError."""
        self.device = devices.setup_device(self.config.cluster.threads_per_worker)
        devices.seed_everything(self.config.trainer.seed)
        self._engine = Engine(self.spec(), self.device)
        self.engine.offload()

    def dropped_prompts(self) -> tuple[str, ...]:
        """Return the prompt ids that the last update left out, because a gradient was not finite."""
        return self._dropped

    def peak_memory(self) -> float:
        """Return the most memory that any rank has held, in bytes; a collective call."""
        return devices.max_over_ranks(self.device, float(devices.peak_memory_bytes(self.device)))

    def save(self, directory: str | Path) -> None:
        """Write the trainer state (model, optimiser, schedule, random state) into an empty folder."""
        self.engine.save(directory)

    def load(self, directory: str | Path) -> None:
        """Restore what ``save`` wrote, at any number of ranks. Raises CheckpointError."""
        self.engine.load(directory)

    def close(self) -> None:
        """Leave the process group."""
        devices.close_device()


@contextmanager
def on_device(engine: Engine) -> Iterator[Engine]:
    """Hold an engine's weights on the device for the duration of a block, where they are kept elsewhere."""
    engine.load_back()
    try:
        yield engine
    finally:
        engine.offload()


def optim_spec(section: Any, total_steps: int) -> OptimSpec:
    """Read a config section ``optim``."""
    return OptimSpec(
        lr=section.lr,
        total_steps=total_steps,
        betas=tuple(section.betas),
        weight_decay=section.weight_decay,
        warmup_ratio=section.lr_warmup_steps_ratio,
        schedule=section.warmup_style,
        min_lr_ratio=section.min_lr_ratio if section.min_lr_ratio is not None else 0.0,
    )
