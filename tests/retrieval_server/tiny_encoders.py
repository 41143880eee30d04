"""Encoders small enough to build in a test: random BERTs with a vocabulary of their own, and a reference encoding.

The reference is written down independently of the code under test: one text at a time, no padding, float64.
"""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import BertConfig, BertModel, BertTokenizerFast

_WORDS = (
    "query passage : , . ? the of a in who what when is was city river lake town north sea boats fishing rome orvel "
    "sand mirel tron ada painted born allowed may deep long short history museum king war year ##s ##ed ##ing "
)
WORDS = [*_WORDS.split(), *[f"w{i}" for i in range(60)]]


def write_encoder(folder: Path, seed: int = 0, dim: int = 32, positions: int = 64, **files: Any) -> Path:
    """Write a random BERT; ``files`` are further JSON files, name (without .json, ``__`` for ``/``) -> content."""
    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
    (folder / "vocab.txt").write_text("\n".join(vocabulary) + "\n", encoding="utf-8")
    BertTokenizerFast(vocab=str(folder / "vocab.txt"), model_max_length=positions).save_pretrained(folder)
    torch.manual_seed(seed)
    config = BertConfig(
        vocab_size=len(vocabulary), hidden_size=dim, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=2 * dim, max_position_embeddings=positions, initializer_range=0.4,
    )  # fmt: skip
    BertModel(config).save_pretrained(folder)
    for name, content in files.items():
        path = folder / (name.replace("__", "/") + ".json")
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(content), encoding="utf-8")
    return folder


def sentence_transformer(pooling: str = "mean_tokens", normalize: bool = True, **config: Any) -> dict[str, Any]:
    """The further files of a sentence-transformers folder, for ``write_encoder``."""
    kinds = ["Transformer", "Pooling", *(["Normalize"] if normalize else [])]
    paths = ["", "1_Pooling", "2_Normalize"]
    modes = ("cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens")
    return {
        "modules": [
            {"idx": i, "name": str(i), "path": paths[i], "type": f"sentence_transformers.models.{kind}"}
            for i, kind in enumerate(kinds)
        ],
        "1_Pooling__config": {f"pooling_mode_{mode}": mode == pooling for mode in modes},
        "config_sentence_transformers": config,
    }


def reference(folder: Path, ids: list[int], pooling: str = "mean", normalize: bool = True) -> np.ndarray:
    """Return the vector of token ids, computed alone and in float64."""
    model = _double(folder)
    with torch.no_grad():
        output = model(input_ids=torch.tensor([ids]), attention_mask=torch.ones(1, len(ids), dtype=torch.long))
    states = output.last_hidden_state[0].numpy()
    vector = {"mean": states.mean(axis=0), "cls": states[0], "pooler": output.pooler_output[0].numpy()}[pooling]
    return vector / np.sqrt((vector**2).sum()) if normalize else vector


@lru_cache(maxsize=4)
def _double(folder: Path) -> BertModel:
    return BertModel.from_pretrained(folder).double().eval()


def token_ids(text: str) -> list[int]:
    """Return the ids of a text of known words, by hand: [CLS], the words, [SEP]."""
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
    words = text.replace(":", " : ").split()
    return [2, *(vocabulary.index(word) if word in vocabulary else 1 for word in words), 3]
