"""The table of rollout engines, and what the worker needs of one beyond ``Generate``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from verl.registry import Registry
from verl.types import Generate
from verl.workers.device import Device
from verl.workers.rollout.hf import HfEngine
from verl.workers.rollout.state import HeldWeights
from verl.workers.weight_sync import WeightManifest


class EpisodeSession(Generate, Protocol):
    """One episode's access to an engine."""

    def close(self) -> None:
        """End the episode's access; what the engine keeps for it is freed."""
        ...


class Engine(Generate, Protocol):
    """A rollout engine inside a worker. It owns a copy of the weights and receives it through ``take_over`` only."""

    tokenizer: Any
    max_num_seqs: int
    weights: HeldWeights

    def session(self, order: int) -> EpisodeSession:
        """Open the session of one episode; ``order`` is its place in deterministic batches."""
        ...

    async def take_over(self, manifest: WeightManifest) -> None:
        """Replace all weights by a publish; later completions carry its version.

        Raises EngineError. When it fails before the first write the engine stays as it was; after that nothing is
        generated until a whole publish has succeeded.
        """
        ...

    async def sleep(self) -> None:
        """Leave the device to training until the next ``take_over``, where the device supports it."""
        ...

    async def check_alive(self) -> None:
        """Raise EngineDeadError, naming the cause, when the engine can never generate again."""
        ...

    def reset_cache(self) -> None:
        """Forget keys and values of earlier generations (engines that can run deterministically)."""
        ...

    def totals(self) -> Mapping[str, float]:
        """Return running totals since the engine was built: the fields of ``EngineStats``, and its own."""
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


def _vllm(config: Any, device: Device) -> Engine:
    from verl.workers.rollout.vllm import VllmEngine, VllmSettings  # heavy, and there only where it is installed

    return VllmEngine(VllmSettings.from_config(config, device))


ENGINES: Registry[Callable[[Any, Device], Engine]] = Registry("rollout engine", {"hf": _hf, "vllm": _vllm})
"""``actor_rollout_ref.rollout.name`` -> function of the run config and the worker's device."""
