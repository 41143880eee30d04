"""Tiny random models of four architectures with tokenizers and chat templates in the structure of the real families.

The templates are written here after the families' turn layout; their default system messages are ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rollout_models import build_tokenizer
from tokenizers import AddedToken
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig, Qwen2Config, Qwen3Config

CHATML = (
    "{%- if messages[0].role != 'system' %}<|im_start|>system\nAnswer well.<|im_end|>\n{% endif %}"
    "{%- for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
QWEN3 = (
    "{%- set ns = namespace(last=0) %}"
    "{%- for message in messages %}{%- if message.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}"
    "{%- endfor %}"
    "{%- for message in messages %}"
    "{%- if message.role == 'assistant' %}"
    "{%- set content = message.content %}{%- set reasoning = '' %}"
    "{%- if '</think>' in content %}"
    "{%- set reasoning = content.split('</think>')[0].split('<think>')[-1].strip('\n') %}"
    "{%- set content = content.split('</think>')[-1].lstrip('\n') %}"
    "{%- endif %}"
    "{%- if loop.index0 > ns.last and (loop.last or reasoning) %}"
    "{{- '<|im_start|>assistant\n<think>\n' + reasoning + '\n</think>\n\n' + content }}"
    "{%- else %}{{- '<|im_start|>assistant\n' + content }}{%- endif %}"
    "{{- '<|im_end|>\n' }}"
    "{%- else %}{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}{%- endif %}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}"
    "{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}"
    "{%- endif %}"
)
LLAMA = (
    "{%- if not date_string is defined %}"
    "{%- if strftime_now is defined %}{%- set date_string = strftime_now('%d %b %Y') %}"
    "{%- else %}{%- set date_string = '26 Jul 2024' %}{%- endif %}{%- endif %}"
    "{{- bos_token }}<|start_header_id|>system<|end_header_id|>\n\nToday: {{ date_string }}\n\n<|eot_id|>"
    "{%- for message in messages %}"
    "{{- '<|start_header_id|>' + message.role + '<|end_header_id|>\n\n' + message.content | trim + '<|eot_id|>' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}"
)


@dataclass(frozen=True)
class Family:
    """What a family's folder consists of."""

    config: type
    template: str
    controls: tuple[str, ...]
    """Special tokens; the first ends a turn."""
    words: tuple[str, ...] = ()
    """Added tokens that are plain text."""
    shape: tuple[tuple[str, Any], ...] = ()


FAMILIES = {
    "Qwen2.5": Family(Qwen2Config, CHATML, ("<|im_end|>", "<|im_start|>", "<|endoftext|>")),
    "Qwen3": Family(
        Qwen3Config, QWEN3, ("<|im_end|>", "<|im_start|>", "<|endoftext|>"), ("<think>", "</think>"), (("head_dim", 8),)
    ),
    "Llama-3.2": Family(
        LlamaConfig, LLAMA, ("<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>", "<|begin_of_text|>")
    ),
    "SmolLM2": Family(LlamaConfig, CHATML, ("<|im_end|>", "<|im_start|>", "<|endoftext|>")),
}


def make_family(path: Path, name: str, extra: Sequence[str] = (), template: str | None = None, seed: int = 0) -> Path:
    """Write a random model of the family with its tokenizer, plus ``extra`` tokens, to ``path``."""
    family = FAMILIES[name]
    tokenizer = build_tokenizer(extra)
    tokenizer.add_tokens([AddedToken(word, normalized=False) for word in family.words])
    tokenizer.add_special_tokens({"additional_special_tokens": list(family.controls)})
    tokenizer.eos_token = family.controls[0]
    if "<|begin_of_text|>" in family.controls:
        tokenizer.bos_token = "<|begin_of_text|>"
    tokenizer.chat_template = family.template if template is None else template
    tokenizer.save_pretrained(path)
    shape: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 64,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
        "initializer_range": 0.3,
        "eos_token_id": tokenizer.eos_token_id,
        "bos_token_id": None,
    }
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        config = family.config(**(shape | dict(family.shape)))
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id)
    model.save_pretrained(path)
    return path
