"""The table of rollout engines, and what the worker needs of one beyond ``Generate``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

from torch import Tensor

from verl.registry import Registry
from verl.types import Generate
from verl.workers.device import Device
from verl.workers.rollout.hf import HfEngine


class EpisodeSession(Generate, Protocol):
    """One episode's access to an engine."""

    def close(self) -> None:
        """End the episode's access; what the engine keeps for it is freed."""
        ...


class Engine(Generate, Protocol):
    """A rollout engine inside a worker. It owns a copy of the weights and receives it through ``load_weights`` only."""

    tokenizer: Any
    max_num_seqs: int

    @property
    def policy_version(self) -> int:
        """Version of the weights; -1 before the first ``load_weights``."""
        ...

    def session(self, order: int) -> EpisodeSession:
        """Open the session of one episode; ``order`` is its place in deterministic batches."""
        ...

    def weight_spec(self) -> Mapping[str, tuple[tuple[int, ...], str]]:
        """Return name -> (shape, dtype) of every weight."""
        ...

    def tied_names(self) -> Mapping[str, str]:
        """Return alias -> name of tied weights."""
        ...

    def load_weights(self, tensors: Iterator[tuple[str, Tensor]], version: int) -> None:
        """Overwrite all weights; after a failure in the middle nothing is generated until a load succeeds."""
        ...

    def reset_cache(self) -> None:
        """Forget keys and values of earlier generations."""
        ...

    def totals(self) -> Mapping[str, float]:
        """Return running totals since the engine was built."""
        ...

    def close(self) -> None:
        """Free what the engine holds."""
        ...


def _hf(config: Any, device: Device) -> Engine:
    model, rollout = config.actor_rollout_ref.model, config.actor_rollout_ref.rollout
    return HfEngine(
        model.path,
        dtype=rollout.dtype,
        max_num_seqs=rollout.max_num_seqs,
        max_model_len=config.data.max_prompt_length + config.data.max_response_length,
        deterministic=rollout.deterministic,
        device=device.torch_device,
        trust_remote_code=model.trust_remote_code,
        await_weights=True,
    )


ENGINES: Registry[Callable[[Any, Device], Engine]] = Registry("rollout engine", {"hf": _hf})
"""``actor_rollout_ref.rollout.name`` -> function of the run config and the worker's device."""
