"""Corpora, queries and an encoder that are made up, so that the retrieval benchmark needs nothing from outside.

Words follow Zipf's law. The most frequent are English stop words, which every analyzer drops, as in real text.
"""

from __future__ import annotations

import itertools
import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np

STOP_WORDS = (
    "the",
    "of",
    "and",
    "to",
    "in",
    "a",
    "is",
    "that",
    "it",
    "for",
    "as",
    "was",
    "on",
    "with",
    "by",
    "be",
    "at",
)
_SYLLABLES = [a + b for a in "bdfgklmnprstvz" for b in ("a", "e", "i", "o", "u", "ar", "en", "il", "os", "um")]
_BLOCK = 10_000
_SAMPLED_PASSAGES = 20_000


def vocabulary(size: int) -> list[str]:
    """Return ``size`` words, most frequent first: stop words, then made-up ones of two and more syllables."""
    made = ("".join(parts) for n in itertools.count(2) for parts in itertools.product(_SYLLABLES, repeat=n))
    words = list(itertools.islice(made, size - len(STOP_WORDS)))
    random.Random(1).shuffle(words)
    return [*STOP_WORDS, *words]


def write_corpus(path: Path, n_passages: int, seed: int = 1, mean_words: int = 60, n_words: int = 200_000) -> None:
    """Write ``n_passages`` as JSON lines (id, contents), in blocks, so that memory does not depend on their number."""
    words = np.array(vocabulary(n_words))
    weights = 1.0 / np.arange(1, n_words + 1) ** 1.05
    edges = np.cumsum(weights / weights.sum())
    generator = np.random.default_rng(seed)
    partial = path.with_suffix(".partial")
    with partial.open("w", encoding="utf-8") as file:
        for start in range(0, n_passages, _BLOCK):
            lengths = np.maximum(8, generator.poisson(mean_words, min(_BLOCK, n_passages - start)))
            drawn = words[np.searchsorted(edges, generator.random(int(lengths.sum())))]
            ends = np.cumsum(lengths)
            for i, (end, length) in enumerate(zip(ends.tolist(), lengths.tolist(), strict=True)):
                text = drawn[end - length : end].tolist()
                contents = f'"{" ".join(text[:3])}"\n{" ".join(text[3:])}.'
                file.write(json.dumps({"id": f"p{start + i}", "contents": contents}, ensure_ascii=False) + "\n")
            sys.stderr.write(f"\rcorpus: {start + len(ends):,} passages")
    sys.stderr.write("\n")
    partial.rename(path)


def sample_texts(corpus: Path, seed: int = 2) -> list[list[str]]:
    """Return the words of up to 20,000 passages spread over the corpus; queries are made of them."""
    size = corpus.stat().st_size
    chooser = random.Random(seed)
    texts = []
    with corpus.open("rb") as file:
        for offset in sorted(chooser.randrange(size) for _ in range(_SAMPLED_PASSAGES)):
            file.seek(offset)
            file.readline()  # the rest of a line
            if line := file.readline().strip():
                row = json.loads(line)
                words = str(row.get("contents") or f"{row.get('title', '')} {row['text']}").replace('"', " ").split()
                if len(words) >= 8:
                    texts.append(words)
    return texts


def queries(texts: list[list[str]], seed: int) -> Iterator[str]:
    """Yield queries without end: 6 to 12 words of one passage in their order. Two alike are next to impossible."""
    chooser = random.Random(seed)
    while True:
        words = chooser.choice(texts)
        kept = sorted(chooser.sample(range(len(words)), min(len(words), chooser.randint(6, 12))))
        yield " ".join(words[i] for i in kept)


def write_encoder(folder: Path) -> None:
    """Write an encoder of MiniLM's shape (6 layers, 384 wide) with random weights: its cost is that of the real one."""
    import torch
    from tokenizers import BertWordPieceTokenizer
    from transformers import BertConfig, BertModel, BertTokenizerFast

    folder.mkdir(parents=True, exist_ok=True)
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *STOP_WORDS, *"abcdefghijklmnopqrstuvwxyz0123456789.,?'-"]
    pieces += [f"##{piece}" for piece in (*"abcdefghijklmnopqrstuvwxyz0123456789", *_SYLLABLES)] + _SYLLABLES
    unique = list(dict.fromkeys(pieces))
    vocabulary_file = folder / "vocab.txt"
    vocabulary_file.write_text("\n".join(unique) + "\n", encoding="utf-8")
    tokenizer = BertWordPieceTokenizer(str(vocabulary_file))
    tokenizer.save(str(folder / "tokenizer.json"))
    BertTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), model_max_length=512).save_pretrained(folder)
    torch.manual_seed(1)
    config = BertConfig(
        vocab_size=len(unique),
        hidden_size=384,
        num_hidden_layers=6,
        num_attention_heads=12,
        intermediate_size=1536,
    )
    BertModel(config).save_pretrained(folder)


def write_flat_index(path: Path, n_passages: int, dimension: int = 384, seed: int = 3) -> None:
    """Write a FAISS Flat index of random unit vectors [N, D]: the speed of exact search does not depend on them."""
    import faiss

    generator = np.random.default_rng(seed)
    index = faiss.IndexFlatIP(dimension)
    for start in range(0, n_passages, _BLOCK):
        block = generator.standard_normal((min(_BLOCK, n_passages - start), dimension), dtype=np.float32)
        index.add(block / np.linalg.norm(block, axis=1, keepdims=True))
    faiss.write_index(index, str(path))
