"""The index that most tests of this folder read."""

from __future__ import annotations

from pathlib import Path

import pytest
from retrieval_helpers import make_plan, write_corpus

from retrieval_server.backends.bm25_build import build


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(index folder, corpus file) of PASSAGES; not to be changed, copy it first."""
    folder = tmp_path_factory.mktemp("built")
    corpus = write_corpus(folder / "corpus.jsonl")
    build(make_plan(corpus, folder / "index"))
    return folder / "index", corpus
