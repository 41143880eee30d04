"""What runs inside vLLM's own worker processes: taking over published weights.

The class is named to vLLM as a worker extension, so its methods are called on every tensor-parallel rank. Every rank
reads the published files itself and keeps its share. What a method returns is plain data: vLLM carries the result of a
call between processes, and an exception only as text.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.platforms import current_platform

from verl.errors import EngineError
from verl.workers.weight_sync import WeightManifest, receive


class WeightReceiver:
    """Mixed into vLLM's worker, whose ``model_runner`` and ``vllm_config`` it uses."""

    model_runner: Any
    vllm_config: Any

    def load_published(
        self, record: Mapping[str, Any], expected: Mapping[str, Any], aliases: Mapping[str, str]
    ) -> dict[str, Any]:
        """Overwrite the model with a publish; return ``{"written": tensors, "error": text or None}``.

        ``record`` is a manifest as plain data; ``expected`` (name -> shape, dtype) and ``aliases`` are those of
        ``verl.workers.weight_sync.receive``. An error with ``written`` 0 left the model as it was; any other left a
        mixture, which the next whole load replaces.
        """
        spec = {name: (tuple(shape), str(dtype)) for name, (shape, dtype) in expected.items()}
        counter = _Counter()
        try:
            tensors = counter.count(receive(WeightManifest.from_record(record), spec, aliases))
            with set_current_vllm_config(self.vllm_config), torch.no_grad():
                self._reload(tensors)
        except Exception as error:
            return {"written": counter.written, "error": f"{error}" or type(error).__name__}
        return {"written": counter.written, "error": None}

    def _reload(self, tensors: Iterator[tuple[str, Tensor]]) -> None:
        model: nn.Module = self.model_runner.get_model()
        head, embedding = _tied_head(model)
        wanted = {name for name, _ in model.named_parameters()}
        # vLLM packs and fuses weights when it loads them; this gives every layer its loading form back, layer by layer.
        initialize_layerwise_reload(model)
        try:
            loaded = model.load_weights(tensors)
        finally:
            # Also after a failure: else the next load would count on what this one had begun.
            finalize_layerwise_reload(model, self.vllm_config.model_config)
        if head is not None:
            wanted -= {name for name, module in model.named_modules() if module is head for name in (f"{name}.weight",)}
            _renew_tied_head(head, embedding)
        missing = sorted(wanted - set(loaded))
        if missing:
            raise EngineError(f"vLLM kept old values of {len(missing)} weights, such as {missing[0]}")


class _Counter:
    """Counts what passes through an iterator."""

    def __init__(self) -> None:
        self.written = 0

    def count(self, tensors: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in tensors:
            self.written += 1
            yield name, tensor


def _tied_head(model: nn.Module) -> tuple[Any, Any]:
    """Return the output head and the embedding whose weight it shares; (None, None) when they are two weights."""
    head, inner = getattr(model, "lm_head", None), getattr(model, "model", None)
    embedding = getattr(inner, "embed_tokens", None)
    if head is None or embedding is None or head is embedding or not model.config.tie_word_embeddings:
        return None, None
    return head, embedding


def _renew_tied_head(head: Any, embedding: Any) -> None:
    """Give a tied head the new embedding.

    Nothing is loaded under the head's name, so reloading leaves it as it was; on the CPU build it even computes with a
    packed copy of the old weight, without a word.
    """
    head.weight = embedding.weight
    if current_platform.is_cpu():
        dispatch_cpu_unquantized_gemm(head, remove_weight=False)
