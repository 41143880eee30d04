"""What a file or a model is, by its bytes."""

from __future__ import annotations

import hashlib
from pathlib import Path

from verl.identity import file_sha256, model_fingerprint


def test_file_hash_is_that_of_its_bytes(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"abc" * 1000)
    assert file_sha256(tmp_path / "a") == hashlib.sha256(b"abc" * 1000).hexdigest()


def test_models_are_told_apart_by_config_size_and_ends_of_their_weights(tmp_path: Path) -> None:
    def model(name: str, weights: bytes, config: str = "{}", other: str = "x") -> str | None:
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text(config)
        (folder / "model.safetensors").write_bytes(weights)
        (folder / "README.md").write_text(other)
        return model_fingerprint(folder)

    weights = bytes(range(256)) * 10
    first = model("a", weights)
    assert first == model("b", weights, other="another page") and len(first or "") == 64
    changed = [model("c", weights[:-1] + b"?"), model("d", b"?" + weights[1:]), model("e", weights + b"0")]
    changed.append(model("f", weights, '{"n": 1}'))
    assert len({first, *changed}) == 5
    (tmp_path / "empty").mkdir()
    assert model_fingerprint(tmp_path / "empty") is None
