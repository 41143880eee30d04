"""Cross-encoders small enough for tests: a random BERT, and one whose logit is known by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import BertConfig, BertForSequenceClassification, BertTokenizer

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "title", ":", "(", ")", '"', *"abcdefghijklmnopqrstuvwxyz"]
WORDS += ["lake", "river", "boat", "fish", "town", "sea", "festival"]


def tokenizer() -> BertTokenizer:
    """Whole words of WORDS; everything else is unknown."""
    return BertTokenizer(vocab={word: number for number, word in enumerate(WORDS)})


def random_model(n_labels: int = 1, **changes: Any) -> BertForSequenceClassification:
    """A random BERT with weights large enough that different pairs get clearly different logits."""
    torch.manual_seed(3)
    options: dict[str, Any] = {
        "vocab_size": len(WORDS), "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
        "intermediate_size": 32, "max_position_embeddings": 64, "initializer_range": 0.5, "num_labels": n_labels,
    }  # fmt: skip
    return BertForSequenceClassification(BertConfig(**{**options, **changes})).eval()


def save(folder: Path, model: Any) -> str:
    """Save model and tokenizer as Hugging Face does, and return the folder."""
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return str(folder)


class CountingScorer:
    """Scores a pair by how often the query's words occur in the passage; remembers what it was asked."""

    def __init__(self) -> None:
        self.calls: list[list[tuple[str, str]]] = []

    def logits(self, pairs: Any) -> list[float]:
        self.calls.append(list(pairs))
        if any("explode" in query for query, _ in pairs):
            raise ValueError("scripted failure")
        return [float(sum(passage.lower().split().count(word) for word in query.split())) for query, passage in pairs]
