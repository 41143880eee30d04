"""Log-probabilities and entropies of chosen tokens from hidden states, without ever holding [tokens, vocabulary].

The logits of a chunk of tokens are made, used and dropped; backward makes them again. For 16k tokens and a vocabulary
of 152k entries the whole tensor would take 10 GB a copy.

Axes: N scored tokens, C tokens of a chunk, V vocabulary, E hidden size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from verl.workers.device import logit_chunk_elements


def token_statistics(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: float = 1.0,
    bias: Tensor | None = None,
    softcap: float | None = None,
    chunk_elements: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Return (log-probs [N], entropies [N]) in float32, in nats, of softmax(logits / temperature).

    hidden [N, E], weight [V, E], targets [N] int64, bias [V]; ``softcap`` c replaces z by c * tanh(z / c) before the
    temperature; at most ``chunk_elements`` logits exist at once (None: by device). Gradients flow from both outputs to
    hidden, weight and bias.
    """
    chunk = max(1, (chunk_elements or logit_chunk_elements(hidden.device)) // weight.shape[0])
    result: tuple[Tensor, Tensor] = _TokenStatistics.apply(hidden, weight, bias, targets, temperature, softcap, chunk)
    return result


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: float, softcap: float | None) -> Tensor:
    """Return float32 logits [C, V] with the soft cap and the temperature applied."""
    logits = torch.nn.functional.linear(hidden, weight, bias).float()
    if softcap is not None:
        logits = logits.div_(softcap).tanh_().mul_(softcap)
    return logits if temperature == 1.0 else logits.div_(temperature)


class _TokenStatistics(torch.autograd.Function):
    """The analytic gradient: d logp/dz = onehot - p and d H/dz = -p (log p + H), with z the tempered logits."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        softcap: float | None,
        chunk: int,
    ) -> tuple[Tensor, Tensor]:
        # Under autocast the products run in the lower precision; made explicit here, since backward runs outside it.
        kind = hidden.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype
        count = targets.shape[0]
        logprobs = torch.empty(count, dtype=torch.float32, device=hidden.device)
        entropies = torch.empty_like(logprobs)
        log_norms = torch.empty_like(logprobs)
        low_weight, low_hidden = weight.to(dtype), hidden.to(dtype)
        low_bias = None if bias is None else bias.to(dtype)
        with torch.autocast(kind, enabled=False):
            for start in range(0, count, chunk):
                rows = slice(start, start + chunk)
                logits = _logits(low_hidden[rows], low_weight, low_bias, temperature, softcap)
                norm = logits.logsumexp(-1)
                log_norms[rows] = norm
                logprobs[rows] = logits.gather(-1, targets[rows, None]).squeeze(-1) - norm
                logits = logits.sub_(norm[:, None])
                entropies[rows] = -(logits.exp() * logits).sum(-1)
        ctx.save_for_backward(low_hidden, weight, bias, targets, log_norms, entropies)
        ctx.settings = (temperature, softcap, chunk, dtype, hidden.dtype)
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, grad_logprobs: Tensor, grad_entropies: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, log_norms, entropies = ctx.saved_tensors
        temperature, softcap, chunk, dtype, hidden_dtype = ctx.settings
        low_weight = weight.to(dtype)
        low_bias = None if bias is None else bias.to(dtype)
        grad_hidden = torch.empty(hidden.shape, dtype=hidden_dtype, device=hidden.device)
        grad_weight = torch.zeros_like(weight)
        grad_bias = None if bias is None else torch.zeros_like(bias)
        entropy_used = bool(grad_entropies.any())
        for start in range(0, targets.shape[0], chunk):
            rows = slice(start, start + chunk)
            logits = _logits(hidden[rows], low_weight, low_bias, temperature, softcap)
            # d tanh-cap: 1 - (z_capped / cap)^2, with z_capped recovered from the tempered logits.
            slope = None if softcap is None else 1.0 - (logits * (temperature / softcap)).square()
            logits.sub_(log_norms[rows, None])
            probs = logits.exp()
            upstream = grad_logprobs[rows, None].float()
            if entropy_used:
                factor = logits.add_(entropies[rows, None]).mul_(grad_entropies[rows, None]).add_(upstream)
                grad = probs.mul_(factor).neg_()
            else:
                grad = probs.mul_(-upstream)
            grad.scatter_add_(-1, targets[rows, None], upstream)
            if temperature != 1.0:
                grad.div_(temperature)
            if slope is not None:
                grad.mul_(slope)
            low_grad = grad.to(dtype)
            grad_hidden[rows] = (low_grad @ low_weight).to(hidden_dtype)
            if dtype == weight.dtype:
                grad_weight.addmm_(low_grad.t(), hidden[rows])
            else:
                grad_weight += (low_grad.t() @ hidden[rows]).to(weight.dtype)
            if grad_bias is not None:
                grad_bias += grad.sum(0).to(grad_bias.dtype)
        return grad_hidden, grad_weight, grad_bias, None, None, None, None
