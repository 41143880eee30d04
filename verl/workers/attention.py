"""Attention over packed sequences: several sequences share one row, and none of them sees another.

transformers calls ``packed_attention`` in place of its own implementations (``attn_implementation=PACKED``) and hands
through the ``packing`` keyword given to the model. On CUDA with flash-attn installed one kernel handles the whole row;
elsewhere each sequence is one causal SDPA call, so the result of a sequence does not depend on its neighbours at all.

Axes: T tokens of the row, H query heads, K key/value heads, D head dimension, B rows (always 1).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from verl.errors import ModelError
from verl.workers.device import flash_attention_available

PACKED = "chatr1_packed"
"""Name under which the function is known to transformers."""


@dataclass(frozen=True)
class Packing:
    """How one row of T tokens is cut into sequences."""

    lengths: tuple[int, ...]
    """[n] tokens per sequence, in order; they sum to T."""
    cu_seqlens: Tensor
    """[n + 1] int32 running sum from 0, on the model's device."""

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device) -> Packing:
        """Build it from the lengths alone."""
        bounds = torch.zeros(len(lengths) + 1, dtype=torch.int32)
        bounds[1:] = torch.tensor(list(lengths), dtype=torch.int32).cumsum(0)
        return cls(tuple(lengths), bounds.to(device))


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    packing: Packing | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Return the attention output [B=1, T, H, D] for query [1, H, T, D] and key, value [1, K, T, D].

    ``attention_mask`` is always None here: transformers builds none for an implementation it has no mask for.
    Raises ModelError for architectures that need more than causal (optionally windowed) softmax attention.
    """
    if packing is None:
        raise ModelError(f"{type(module).__name__} does not hand keyword arguments on to its attention")
    for extra in ("softcap", "s_aux", "position_bias"):
        if kwargs.get(extra) is not None:
            raise ModelError(f"{type(module).__name__} uses {extra} in its attention, which packing does not support")
    if flash_attention_available(query):
        return _flash(query, key, value, packing, scaling, dropout, sliding_window), None
    gqa = key.shape[1] != query.shape[1]
    outputs = []
    pieces = zip(*(tensor.split(packing.lengths, dim=2) for tensor in (query, key, value)), strict=True)
    for q, k, v in pieces:
        mask = _window_mask(q.shape[2], sliding_window, q.device)
        out = scaled_dot_product_attention(
            q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=mask is None, scale=scaling, enable_gqa=gqa
        )
        outputs.append(out.transpose(1, 2))
    return (outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)), None


def _window_mask(length: int, window: int | None, device: torch.device) -> Tensor | None:
    """Return the [S, S] mask of a sliding window, or None where plain causal attention is the same."""
    if window is None or length <= window:
        return None
    position = torch.arange(length, device=device)
    distance = position[:, None] - position[None, :]
    return (distance >= 0) & (distance < window)


def _flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    packing: Packing,
    scaling: float | None,
    dropout: float,
    window: int | None,
) -> Tensor:
    from flash_attn import flash_attn_varlen_func  # optional, CUDA only

    longest = max(packing.lengths)
    output: Tensor = flash_attn_varlen_func(
        *(tensor[0].transpose(0, 1) for tensor in (query, key, value)),
        cu_seqlens_q=packing.cu_seqlens,
        cu_seqlens_k=packing.cu_seqlens,
        max_seqlen_q=longest,
        max_seqlen_k=longest,
        dropout_p=dropout,
        softmax_scale=scaling,
        causal=True,
        window_size=(-1, -1) if window is None else (window - 1, 0),
    )
    return output[None]


AttentionInterface.register(PACKED, packed_attention)
