"""The sizes of a decoder-only transformer, read from its ``config.json``.

Axes: h hidden size, q query width (heads x head size), k key width (key/value heads x head size), f feed-forward width,
V vocabulary, L layers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl.errors import ModelError


@dataclass(frozen=True)
class Architecture:
    """Sizes of a model with gated feed-forward layers (Llama, Qwen2, Qwen3, SmolLM2, Mistral, Gemma ...)."""

    layers: int
    hidden: int
    query: int
    """Query width: heads times head size."""
    key: int
    """Key width: key/value heads times head size."""
    feed_forward: int
    vocabulary: int
    tied: bool
    """The output head is the embedding."""
    attention_bias: bool = False

    @property
    def body_parameters(self) -> int:
        """Parameters of all layers and of the last norm."""
        attention = 2 * self.hidden * self.query + 2 * self.hidden * self.key
        bias = self.query + 2 * self.key if self.attention_bias else 0
        return self.layers * (attention + bias + 3 * self.hidden * self.feed_forward + 2 * self.hidden) + self.hidden

    @property
    def head_parameters(self) -> int:
        """Parameters of the output head (shared with the embedding when tied)."""
        return self.vocabulary * self.hidden

    @property
    def parameters(self) -> int:
        """All parameters, tied ones once."""
        return self.body_parameters + self.head_parameters * (1 if self.tied else 2)

    @property
    def cache_elements(self) -> int:
        """Keys and values of one token, over all layers."""
        return 2 * self.layers * self.key

    def flops(self, tokens: float, scored: float, pairs: float) -> float:
        """Return the floating-point operations of a forward pass.

        ``tokens`` go through the body, ``scored`` of them through the head, and ``pairs`` (query, visible key) pairs
        are attended to. A product of n x m by m counts 2nm (Kaplan et al. 2020, section 2.1).
        """
        return (
            2 * self.body_parameters * tokens + 2 * self.head_parameters * scored + 4 * self.layers * self.query * pairs
        )

    def saved_elements(self) -> int:
        """Return what one token of one layer keeps for the backward pass, in elements.

        Inputs and outputs of both norms (4h), queries, keys, values and the attention's output (2q + 2k), gate, up,
        activation and product (4f). The score matrix is not kept. After Korthikanti et al. 2022, section 4.
        """
        return 4 * self.hidden + 2 * self.query + 2 * self.key + 4 * self.feed_forward


def read_architecture(path: str) -> Architecture:
    """Return the sizes of a model folder, or of a published model by its hub name. Raises ModelError."""
    file = Path(path) / "config.json"
    if file.is_file():
        try:
            return from_config(json.loads(file.read_text(encoding="utf-8")))
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise ModelError(f"{file}: no sizes of a decoder-only transformer in it ({error!r})") from error
    found = PUBLISHED.get(path.rpartition("/")[2].removesuffix("-Instruct").removesuffix("-Base"))
    if found is None:
        raise ModelError(
            f"actor_rollout_ref.model.path = {path}: no folder with a config.json, and no model whose sizes are "
            f"known ({', '.join(PUBLISHED)}); name a folder"
        )
    return found


def from_config(config: Mapping[str, Any]) -> Architecture:
    """Read the keys of a Hugging Face ``config.json``; the KeyError of what is missing is left to the caller."""
    config = config.get("text_config", config)
    heads = int(config["num_attention_heads"])
    head = int(config.get("head_dim") or config["hidden_size"] // heads)
    return Architecture(
        layers=int(config["num_hidden_layers"]),
        hidden=int(config["hidden_size"]),
        query=heads * head,
        key=int(config.get("num_key_value_heads") or heads) * head,
        feed_forward=int(config["intermediate_size"]),
        vocabulary=int(config["vocab_size"]),
        tied=bool(config.get("tie_word_embeddings", True)),
        attention_bias=bool(config.get("attention_bias", config.get("model_type") == "qwen2")),
    )


PUBLISHED: dict[str, Architecture] = {
    "Qwen2.5-0.5B": Architecture(24, 896, 896, 128, 4864, 151936, True, True),
    "Qwen2.5-1.5B": Architecture(28, 1536, 1536, 256, 8960, 151936, True, True),
    "Qwen2.5-3B": Architecture(36, 2048, 2048, 256, 11008, 151936, True, True),
    "Qwen2.5-7B": Architecture(28, 3584, 3584, 512, 18944, 152064, False, True),
    "Llama-3.2-3B": Architecture(28, 3072, 3072, 1024, 8192, 128256, True),
    "Llama-3.1-8B": Architecture(32, 4096, 4096, 1024, 14336, 128256, False),
}
"""Sizes as in the models' published ``config.json``."""
