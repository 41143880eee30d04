"""A tiny random Qwen2 with a byte-level tokenizer, for the tests of rollout."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen2Config

EOS = 0
PIECES = ("<|end|>", "<search>", "</answer", "</sea", "rch>", "rch>and", ">", "é</search>")
"""Further tokens after the 256 bytes: a tag whole, tags in parts, and tags with something around them."""


def build_tokenizer(extra: Sequence[str] = ()) -> Any:
    """Ids 1..256 are the bytes in the order of the byte-level alphabet; then come the pieces, as plain tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<|end|>": EOS} | {character: i + 1 for i, character in enumerate(alphabet)}
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    for piece in (*PIECES[1:], *extra):
        ((encoded, _),) = to_bytes.pre_tokenize_str(piece)
        vocabulary.setdefault(encoded, len(vocabulary))
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = to_bytes
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")


def id_of(tokenizer: Any, text: str) -> int:
    """Return the id of the token that decodes to exactly this text."""
    return next(i for i in range(len(tokenizer)) if tokenizer.decode([i]) == text)


def make_folder(path: Path, seed: int, extra: Sequence[str] = (), **overrides: Any) -> Path:
    """Write config, weights and tokenizer (with ``extra`` tokens) of a random model to ``path``."""
    tokenizer = build_tokenizer(extra)
    tokenizer.save_pretrained(path)
    shape: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 64,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
        "initializer_range": 0.3,
        "eos_token_id": EOS,
        "bos_token_id": EOS,
    }
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(Qwen2Config(**(shape | overrides)), dtype=torch.float32)
    model.save_pretrained(path)
    return path
