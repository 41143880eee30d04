"""The tiny model, made once per session, and engines on it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rollout_models import make_folder

from verl.workers.rollout.hf import HfEngine


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("model"), seed=0)


@pytest.fixture
def make_engine(model_folder: Path) -> Iterator[Callable[..., HfEngine]]:
    engines: list[HfEngine] = []

    def make(**options: Any) -> HfEngine:
        engines.append(HfEngine(str(options.pop("folder", model_folder)), **options))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()
