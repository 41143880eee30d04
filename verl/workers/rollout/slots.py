"""A causal language model that decodes many sequences at once over one key/value buffer.

Axes: n rows (sequences in the batch), T new tokens per row, K tokens a row may attend to, H key/value heads, G query
heads per key/value head, D head size.

Row i of the batch owns slot i of the buffer. Active rows are always slots 0..n-1, so that attention reads views and
never copies: a finished row is replaced by the last one. Transformers' cache classes append with ``torch.cat`` and
pad on the left; both copy the whole buffer at every step or waste it. The model's own layers run unchanged: only the
attention function is ours, through transformers' AttentionInterface.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor
from transformers import AttentionInterface

from verl.errors import ModelError
from verl.workers.device import dtype_of
from verl.workers.models import load_causal_lm

ATTENTION = "chatr1_slots"
_BLOCK = 128
"""The buffer's length grows in steps of at least this many tokens."""


class SlotCache:
    """Keys and values of all layers: one tensor [layers, 2, rows, H, length, D], grown on demand.

    Zero-initialised: masked positions still enter products, and zero times garbage may be NaN.
    """

    def __init__(self, shape: tuple[int, int, int], max_rows: int, dtype: torch.dtype, device: torch.device) -> None:
        """``shape`` is (layers, H, D); ``max_rows`` bounds the growth."""
        self._layers, self._heads, self._head_dim = shape
        self._max_rows, self._dtype, self._device = max_rows, dtype, device
        self._buffer: Tensor | None = None

    @property
    def buffer(self) -> Tensor:
        """The tensor; only valid until the next ``reserve``."""
        return self.reserve(1, 1) if self._buffer is None else self._buffer

    def reserve(self, rows: int, length: int) -> Tensor:
        """Return the buffer with room for ``rows`` rows of ``length`` tokens; keeps what it holds."""
        old = self._buffer
        if old is not None:
            old_rows, old_length = old.shape[2], old.shape[4]
            if old_rows >= rows and old_length >= length:
                return old
            # Grow by more than asked, so that growing copies little overall.
            rows = max(rows, min(2 * old_rows, self._max_rows)) if rows > old_rows else old_rows
            length = max(length, 3 * old_length // 2) if length > old_length else old_length
        length = -(-length // _BLOCK) * _BLOCK
        shape = (self._layers, 2, rows, self._heads, length, self._head_dim)
        new = torch.zeros(shape, dtype=self._dtype, device=self._device)
        if old is not None:
            new[:, :, : old.shape[2], :, : old.shape[4]] = old
        self._buffer = new
        return new

    def copy_row(self, source: int, target: int, length: int) -> None:
        """Copy the first ``length`` tokens of one row over another."""
        self.buffer[:, :, target, :, :length] = self.buffer[:, :, source, :, :length]

    def take(self, row: int, length: int) -> Tensor:
        """Return a copy [layers, 2, H, length, D] of a row's first tokens."""
        return self.buffer[:, :, row, :, :length].clone()

    def put(self, row: int, states: Tensor) -> None:
        """Write what ``take`` returned to the start of a row."""
        self.buffer[:, :, row, :, : states.shape[3]] = states

    def clear(self) -> None:
        """Forget everything and free the memory."""
        self._buffer = None


@dataclass
class _Plan:
    """What the attention function must know about the running forward pass."""

    cache: SlotCache
    first: int
    """Slot of the pass's first row; its rows are ``first .. first + n - 1``."""
    positions: Tensor
    """[n, T] position of each new token in its row."""
    length: int
    """K: one more than the largest position."""
    fresh: bool
    """Every row starts at position 0 with nothing cached: plain causal attention."""
    masks: dict[int | None, Tensor]
    """Mask [n, 1, T, K] by sliding window, built once per pass."""

    def mask(self, window: int | None) -> Tensor:
        """Return the boolean mask: a token sees its own row up to itself, at most ``window`` tokens back."""
        if window not in self.masks:
            keys = torch.arange(self.length, device=self.positions.device)
            queries = self.positions.unsqueeze(-1)
            visible = keys <= queries
            if window is not None:
                visible &= keys > queries - window
            self.masks[window] = visible.unsqueeze(1)
        return self.masks[window]


def _slot_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    slot_plan: _Plan | None = None,
    **extra: Any,
) -> tuple[Tensor, None]:
    """Write the new keys and values into their slots, then attend: query [n, H*G, T, D] -> [n, T, H*G, D]."""
    assert slot_plan is not None, "the slot attention works inside SlotModel only"
    for name in ("softcap", "s_aux", "position_bias"):
        # The comparison at load could miss these: on short sequences of small scores they change little.
        if extra.get(name) is not None:
            raise ModelError(f"{type(module).__name__} uses {name} in its attention; the hf rollout engine has no such")
    plan, (rows, heads, width, head_dim) = slot_plan, key.shape
    buffer = plan.cache.reserve(plan.first + rows, plan.length)
    keys, values = buffer[module.layer_idx, :, plan.first : plan.first + rows]  # type: ignore[index]
    if plan.fresh:
        keys[:, :, :width], values[:, :, :width] = key, value
        if sliding_window is None or width <= sliding_window:
            output = functional.scaled_dot_product_attention(
                query, key, value, is_causal=True, scale=scaling, enable_gqa=query.shape[1] != heads
            )
            return output.transpose(1, 2), None
    else:
        index = torch.arange(rows, device=key.device).unsqueeze(1)
        keys[index, :, plan.positions] = key.transpose(1, 2)
        values[index, :, plan.positions] = value.transpose(1, 2)
    keys, values = keys[:, :, : plan.length], values[:, :, : plan.length]
    mask = plan.mask(sliding_window)
    if width == 1:
        # The query heads that share a key head become query positions: no copy of the keys is needed.
        grouped = query.view(rows, heads, -1, head_dim)
        output = functional.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask, scale=scaling)
        return output.reshape(rows, 1, -1, head_dim), None
    output = functional.scaled_dot_product_attention(
        query, keys, values, attn_mask=mask, scale=scaling, enable_gqa=query.shape[1] != heads
    )
    return output.transpose(1, 2), None


AttentionInterface.register(ATTENTION, _slot_attention)


def load_slot_model(
    path: str, dtype: str, device: torch.device, max_rows: int, trust_remote_code: bool = False
) -> SlotModel:
    """Load a causal LM from a model folder for decoding.

    At most ``max_rows`` sequences are decoded at once.

    Raises ModelError when the folder cannot be used, ConfigError for an unknown dtype.
    """
    wanted = dtype_of(dtype)
    model: Any = load_causal_lm(path, attention=ATTENTION, trust_remote_code=trust_remote_code)
    for parameter in model.parameters():
        # Not ``model.to(dtype)``: that would round the rotary frequencies too, which stay float32 buffers.
        parameter.data = parameter.data.to(wanted)
    return SlotModel(model.to(device).eval().requires_grad_(False), device, max_rows)


class SlotModel:
    """A loaded model with its slot buffer: ``prefill`` and ``decode`` return the next token's logits."""

    def __init__(self, model: Any, device: torch.device, max_rows: int) -> None:
        """Take a loaded causal LM; raises ModelError when decoding over slots does not give the model's own logits."""
        self.model, self.device = model, device
        config = model.config.get_text_config()
        self.vocabulary = int(model.get_output_embeddings().weight.shape[0])
        self.max_length = int(getattr(config, "max_position_embeddings", None) or 2**31)
        self._softcap: float | None = getattr(config, "final_logit_softcapping", None)
        self._dtype = next(model.parameters()).dtype
        heads = int(config.num_attention_heads)
        shape = (
            int(config.num_hidden_layers),
            int(getattr(config, "num_key_value_heads", None) or heads),
            int(getattr(config, "head_dim", None) or config.hidden_size // heads),
        )
        self.cache = SlotCache(shape, max_rows, self._dtype, device)
        self._check(path=str(model.name_or_path))

    def clear(self) -> None:
        """Forget all keys and values."""
        self.cache.clear()

    @torch.inference_mode()
    def prefill(self, first: int, suffixes: Sequence[Sequence[int]], starts: Sequence[int]) -> Tensor:
        """Read ``suffixes[i]`` at position ``starts[i]`` of slot ``first + i``; return logits [n, V] float32.

        Rows are padded on the right to the longest suffix. Padding writes keys behind the row's end, which nothing
        sees before they are overwritten.
        """
        width = max(map(len, suffixes))
        ids = torch.zeros((len(suffixes), width), dtype=torch.int64)
        for i, suffix in enumerate(suffixes):
            ids[i, : len(suffix)] = torch.as_tensor(suffix)
        offsets = torch.as_tensor(starts, device=self.device).unsqueeze(1)
        positions = offsets + torch.arange(width, device=self.device)
        plan = _Plan(self.cache, first, positions, max(starts) + width, not any(starts), {})
        hidden = self._hidden(ids.to(self.device), plan)
        last = torch.tensor([len(suffix) - 1 for suffix in suffixes], device=self.device)
        return self._logits(hidden[torch.arange(len(suffixes), device=self.device), last])

    @torch.inference_mode()
    def decode(self, tokens: Tensor, positions: Tensor, longest: int) -> Tensor:
        """Append one token to each of the slots 0..n-1; return logits [n, V] float32.

        ``tokens`` and ``positions`` are [n]; ``longest`` is the largest position.
        """
        plan = _Plan(self.cache, 0, positions.unsqueeze(1), longest + 1, False, {})
        return self._logits(self._hidden(tokens.unsqueeze(1), plan)[:, 0])

    def _hidden(self, ids: Tensor, plan: _Plan) -> Tensor:
        # Positions past the model's limit occur only in padding; they are clamped so that no table lookup fails.
        positions = plan.positions.clamp(max=self.max_length - 1)
        output = self.model.base_model(input_ids=ids, position_ids=positions, use_cache=False, slot_plan=plan)
        hidden: Tensor = output.last_hidden_state
        return hidden

    def _logits(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.model.get_output_embeddings()(hidden).float()
        return logits if self._softcap is None else torch.tanh(logits / self._softcap) * self._softcap

    @torch.inference_mode()
    def _check(self, path: str) -> None:
        """Compare the three ways through the buffer with the model's own forward pass on a short sequence.

        Architectures with other kinds of memory (linear attention, soft-capped scores, attention sinks) differ here
        and are refused at load instead of sampling from a wrong distribution.
        """
        tokens = [(7 * i + 3) % self.vocabulary for i in range(8)]
        ids = torch.tensor([tokens], device=self.device)
        try:
            self.model.set_attn_implementation("eager")
            expected = self.model(input_ids=ids, use_cache=False).logits[0].float()
            self.model.set_attn_implementation(ATTENTION)
            first = self.prefill(0, [tokens[:5]], [0])
            second = self.prefill(0, [tokens[5:7]], [5])
            third = self.decode(ids[0, 7:], torch.tensor([7], device=self.device), 7)
        except (AttributeError, TypeError, ValueError, RuntimeError, AssertionError) as error:
            raise ModelError(
                f"model {path} ({type(self.model).__name__}) cannot run in the hf rollout engine: {error}"
            ) from error
        found = torch.cat([first, second, third])
        wanted = expected[[4, 6, 7]]
        gap = float((found - wanted).abs().max())
        limit = (1e-3 if self._dtype is torch.float32 else 0.1) * max(1.0, float(wanted.abs().max()))
        self.clear()
        if not gap <= limit:
            raise ModelError(
                f"model {path} ({type(self.model).__name__}): cached decoding differs from the model's forward pass by "
                f"{gap:.2e} (limit {limit:.2e}); this architecture needs another rollout engine"
            )
