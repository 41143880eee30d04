"""Initial weights of the shipped model: random, except that the first two layers start as an induction circuit.

From a plain random start a million-parameter model needs most of its training to discover copying ("what came after
this the last time?"). Here it is given:

* layer 0, head k: attends to the token k + 1 places back. The offset lives in the query and key biases, which rotary
  embeddings turn into a pure function of distance. What the heads read goes into two summaries of the residual stream:
  "what came before me" (the key) and "what has just been said, me included" (the query);
* layer 1, all heads: compare the query of the current position with the keys of all earlier ones, in rotary dimensions
  that turn too slowly to notice the distance, and copy the token found there.

Nothing about the world is in here except how far back a sentence keeps its subject; codes and projections are random,
and training is free to change all of it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]


@dataclass(frozen=True)
class ModelShape:
    """A Qwen2 decoder with tied embeddings; ``n_heads * 32`` must be ``hidden``, so that every engine has a kernel."""

    vocab_size: int
    hidden: int = 128
    intermediate: int = 384
    n_layers: int = 4
    n_heads: int = 4
    max_positions: int = 2048
    rope_theta: float = 1e6

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.hidden // self.n_heads

    def config(self, eos_token_id: int, pad_token_id: int) -> dict[str, Any]:
        """The ``config.json`` of the Hugging Face folder."""
        return {
            "architectures": ["Qwen2ForCausalLM"],
            "model_type": "qwen2",
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.n_layers,
            "num_attention_heads": self.n_heads,
            "num_key_value_heads": self.n_heads,
            "hidden_act": "silu",
            "max_position_embeddings": self.max_positions,
            "rms_norm_eps": 1e-6,
            "rope_parameters": {"rope_type": "default", "rope_theta": self.rope_theta},
            "tie_word_embeddings": True,
            "use_sliding_window": False,
            "attention_dropout": 0.0,
            "bos_token_id": None,
            "eos_token_id": eos_token_id,
            "pad_token_id": pad_token_id,
            "dtype": "bfloat16",
        }


@dataclass(frozen=True)
class Circuit:
    """Strengths of the initial circuit. At step 0 it continues words said before with accuracy 0.92."""

    scale: float = 0.15
    """Standard deviation of embeddings; everything written to the residual stream is measured in it."""
    offsets: tuple[int, ...] = (1, 2, 3, 4)
    """How far back each head of layer 0 looks, in tokens."""
    key_offsets: tuple[int, ...] = (1, 3, 4)
    """What a key remembers: in "Fort Tor|va has warden Na|zel" these are warden, va and Tor, seen from Na."""
    sharpness: float = 60.0
    match: float = 4.0
    copy: float = 8.0


_RANDOM_STD = 0.02
_QUIET = 0.15
"""Factor on the random part of everything that writes to the residual stream."""
_N_POSITION_PAIRS = 8
_SLOWEST_ANGLE = 0.008
"""Radians per token below which a rotary pair compares contents at any distance of an episode."""


def initial_weights(shape: ModelShape, seed: int, circuit: Circuit | None = None) -> dict[str, Array]:
    """State dict (float32) of ``Qwen2ForCausalLM`` without the tied ``lm_head``.

    The residual stream is laid out as token contents [hidden / 2], key [hidden / 4], query [hidden / 4].
    """
    circuit = circuit or Circuit()
    rng = np.random.default_rng(seed)
    weights = _random_weights(shape, rng, circuit.scale)
    n_key = shape.hidden // 4
    code = _orthogonal(shape.hidden // 2, rng)[:n_key]
    mixes = {offset: _orthogonal(n_key, rng) for offset in circuit.key_offsets}
    _previous_tokens(weights, shape, circuit, code, mixes)
    _matching(weights, shape, circuit, code, mixes, rng)
    return {name: np.ascontiguousarray(array, dtype=np.float32) for name, array in weights.items()}


def _random_weights(shape: ModelShape, rng: np.random.Generator, scale: float) -> dict[str, Array]:
    def normal(rows: int, columns: int, std: float = _RANDOM_STD) -> Array:
        return rng.normal(0.0, std, (rows, columns)).astype(np.float32)

    d, ff = shape.hidden, shape.intermediate
    contents, rest = normal(shape.vocab_size, d // 2, scale), normal(shape.vocab_size, d - d // 2)
    weights = {"model.embed_tokens.weight": np.concatenate([contents, rest], axis=1)}
    for i in range(shape.n_layers):
        layer = f"model.layers.{i}"
        for name in ("q_proj", "k_proj", "v_proj"):
            weights[f"{layer}.self_attn.{name}.weight"] = normal(d, d)
            weights[f"{layer}.self_attn.{name}.bias"] = np.zeros(d, np.float32)
        weights[f"{layer}.self_attn.o_proj.weight"] = normal(d, d, _RANDOM_STD * _QUIET)
        weights[f"{layer}.mlp.gate_proj.weight"] = normal(ff, d)
        weights[f"{layer}.mlp.up_proj.weight"] = normal(ff, d)
        weights[f"{layer}.mlp.down_proj.weight"] = normal(d, ff, _RANDOM_STD * _QUIET)
        weights[f"{layer}.input_layernorm.weight"] = np.ones(d, np.float32)
        weights[f"{layer}.post_attention_layernorm.weight"] = np.ones(d, np.float32)
    weights["model.norm.weight"] = np.ones(d, np.float32)
    return weights


def _orthogonal(n: int, rng: np.random.Generator) -> Array:
    return np.linalg.qr(rng.normal(size=(n, n)))[0].astype(np.float32)


def _angles(shape: ModelShape) -> Array:
    """Radians per token of every rotary pair of a head [head_dim / 2]."""
    half = shape.head_dim // 2
    return (shape.rope_theta ** (-np.arange(half) / half)).astype(np.float32)


def _previous_tokens(
    weights: Mapping[str, Array], shape: ModelShape, circuit: Circuit, code: Array, mixes: Mapping[int, Array]
) -> None:
    """Layer 0. Rotating a head's query bias back by its offset moves the peak of the attention there."""
    layer = "model.layers.0.self_attn"
    width, half, n_key = shape.head_dim, shape.head_dim // 2, len(code)
    angles = _angles(shape)[:_N_POSITION_PAIRS]
    amplitude = math.sqrt(circuit.sharpness)
    contents, keys, queries = shape.hidden // 2, slice(-2 * n_key, -n_key), slice(-n_key, None)
    for head, offset in enumerate(circuit.offsets[: shape.n_heads]):
        start = head * width
        first, second = slice(start, start + len(angles)), slice(start + half, start + half + len(angles))
        weights[f"{layer}.k_proj.bias"][first] = amplitude
        weights[f"{layer}.q_proj.bias"][first] = amplitude * np.cos(angles * offset)
        weights[f"{layer}.q_proj.bias"][second] = -amplitude * np.sin(angles * offset)
        weights[f"{layer}.q_proj.weight"][start : start + width] *= 0.3
        weights[f"{layer}.k_proj.weight"][start : start + width] *= 0.3
        read = slice(start, start + n_key)
        weights[f"{layer}.v_proj.weight"][read, :contents] += code
        if offset in mixes:
            weights[f"{layer}.o_proj.weight"][keys, read] += mixes[offset] * circuit.scale
        if offset + 1 in mixes:  # seen from the next token, which is the one to be found, it is one place further
            weights[f"{layer}.o_proj.weight"][queries, read] += mixes[offset + 1] * circuit.scale


def _matching(
    weights: Mapping[str, Array],
    shape: ModelShape,
    circuit: Circuit,
    code: Array,
    mixes: Mapping[int, Array],
    rng: np.random.Generator,
) -> None:
    """Layer 1. Heads come in groups that match alike and copy different parts of the contents."""
    layer = "model.layers.1.self_attn"
    width, n_key, contents = shape.head_dim, len(code), shape.hidden // 2
    slow = np.flatnonzero(_angles(shape) < _SLOWEST_ANGLE)
    steady = np.concatenate([slow, slow + width // 2])
    query, key = np.zeros((n_key, shape.hidden)), np.zeros((n_key, shape.hidden))
    query[:, -n_key:] = np.eye(n_key)
    query[:, :contents] = math.sqrt(2.0) * mixes[1] @ code
    key[:, -2 * n_key : -n_key] = np.eye(n_key)
    group = contents // width
    gain = circuit.copy * circuit.scale / (shape.n_heads // group)
    mix: NDArray[np.floating] = np.eye(n_key)
    for head in range(shape.n_heads):
        part = slice(head % group * width, (head % group + 1) * width)
        if part.start == 0:
            mix = _orthogonal(n_key, rng)[: len(steady)] * math.sqrt(circuit.match * n_key / len(steady))
        rows = slice(head * width, (head + 1) * width)
        weights[f"{layer}.q_proj.weight"][rows][steady] = mix @ query
        weights[f"{layer}.k_proj.weight"][rows][steady] = mix @ key
        weights[f"{layer}.v_proj.weight"][rows] = np.eye(shape.hidden)[part]
        weights[f"{layer}.o_proj.weight"][part, rows] += np.eye(width) * gain
