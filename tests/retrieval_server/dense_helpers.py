"""A corpus of known words, plans and specs for dense indexes, and the whole pipeline written down a second time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from retrieval_helpers import make_plan
from tiny_encoders import WORDS, reference, token_ids

from retrieval_server.backends.dense import DenseRetriever
from retrieval_server.backends.dense_build import build
from retrieval_server.building import BuildPlan
from retrieval_server.encode_options import EncodeOptions
from retrieval_server.manifest import Manifest
from retrieval_server.specs import DenseSpec
from retrieval_server.types import LoadProgress

N = 300
_rng = np.random.default_rng(7)
TEXTS = [" ".join(_rng.choice(WORDS[6:38], _rng.integers(2, 20))) for _ in range(N)]
TEXTS[40] = TEXTS[11] = TEXTS[250]  # equal passages: equal scores
QUERIES = [" ".join(_rng.choice(WORDS[6:38], _rng.integers(1, 9))) for _ in range(12)]
BATCH = ["w1", *QUERIES]


def write_texts(path: Path, texts: list[str] = TEXTS) -> Path:
    """A corpus without titles, blank lines in between: a passage's row is not its line."""
    lines = [
        json.dumps({"id": f"p{i}", "contents": text}) + ("\n" if i % 50 == 0 else "") for i, text in enumerate(texts)
    ]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def dense_plan(corpus: Path, save_dir: Path, model: Path, force: bool = False, **options: Any) -> BuildPlan:
    return make_plan(
        corpus,
        save_dir,
        force=force,
        encode=EncodeOptions(**{"method": "e5", "model_path": str(model), "max_length": 32, **options}),
    )


def build_dense(corpus: Path, save_dir: Path, model: Path, force: bool = False, **options: Any) -> Manifest:
    return build(dense_plan(corpus, save_dir, model, force, **options))


def load_dense(index: Path, corpus: Path | None, **options: Any) -> DenseRetriever:
    return DenseRetriever.load(
        DenseSpec(index_path=index, corpus_path=corpus, **{"dtype": "float32", **options}), LoadProgress()
    )


def ids(retriever: DenseRetriever, queries: list[str], k: int = 10) -> list[list[str]]:
    return [[hit.document.id for hit in hits] for hits in retriever.search(queries, k)]


def expected_scores(model: Path, queries: list[str], query: str = "query: ", passage: str = "passage: ") -> np.ndarray:
    """[Q, N]: e5 by hand, in float64, text by text."""
    passages = []
    for text in TEXTS:
        tokens = token_ids(passage + text)
        passages.append(reference(model, tokens if len(tokens) <= 32 else [*tokens[:31], 3]))
    return np.stack([reference(model, token_ids(query + text)) for text in queries]) @ np.stack(passages).T
