"""Tiny models that vLLM's CPU kernels can run (heads of 32), and one engine per kind of model for the whole session."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from rollout_models import make_folder
from transformers import AutoModelForCausalLM

from verl.config.schema import vllm_installed
from verl.types import Completion, Sampling
from verl.workers.weight_sync import WeightChannel, WeightManifest

T = TypeVar("T")

needs_vllm = pytest.mark.skipif(
    not vllm_installed(), reason="vLLM is not installed (CHATR1_VLLM=1 make setup installs it)"
)
from_vllm_itself = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
"""vLLM's modules warn when they are imported."""
SHAPE = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}


def make_vllm_folder(path: Path, seed: int, **overrides: Any) -> Path:
    """Write a random model whose attention vLLM has kernels for."""
    return make_folder(path, seed, **(SHAPE | overrides))


def load(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


class Served:
    """An engine with the event loop that it lives on, and a channel for its weights."""

    def __init__(self, folder: Path, weights: Path, **settings: Any) -> None:
        from verl.workers.rollout.vllm import VllmEngine, VllmSettings

        limits = {"max_num_seqs": 8, "max_model_len": 256, "max_num_batched_tokens": 64}
        self.folder = folder
        self.engine = VllmEngine(VllmSettings(str(folder), "float32", **(limits | settings)))
        self.channel = WeightChannel(weights, checksums=True, bucket_bytes=20_000)
        self._runner = asyncio.Runner()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self._runner.run(work)

    def manifest(self, model: Any, version: int) -> WeightManifest:
        return self.channel.publish(model.named_parameters(), version)

    def publish(self, model: Any, version: int) -> None:
        self.run(self.engine.take_over(self.manifest(model, version)))

    def generate(self, requests: Sequence[tuple[Sequence[int], Sampling]]) -> list[Completion]:
        async def together() -> list[Completion]:
            return list(await asyncio.gather(*(self.engine.generate(*request) for request in requests)))

        return self.run(together())

    def close(self) -> None:
        self.engine.close()
        self._runner.close()
        self.channel.close()


def trainer_logprobs(model: Any, context: Sequence[int], ids: Sequence[int], temperature: float = 1.0) -> list[float]:
    """Return log softmax(logits / T) of ``ids`` after ``context``, from the transformers model, softmax in float64."""
    with torch.no_grad():
        logits = model(torch.tensor([[*context, *ids]])).logits[0].double()
    logprobs = (logits / temperature).log_softmax(-1)
    return [float(logprobs[len(context) - 1 + i, token]) for i, token in enumerate(ids)]
