"""What a file or a model is, by its bytes: so that a result can say what it was made from."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path

_EDGE_BYTES = 1 << 20


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file's bytes as hex digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@functools.lru_cache(maxsize=16)
def model_fingerprint(folder: Path) -> str | None:
    """Return a hash of a model folder's config and weights: names, sizes, first and last MiB of each file.

    It tells models apart without reading gigabytes; it is no proof against tampering. None for a folder without any.
    """
    files = sorted(path for path in folder.glob("*") if path.suffix == ".safetensors" or path.name == "config.json")
    if not files:
        return None
    digest = hashlib.sha256()
    for path in files:
        size = path.stat().st_size
        digest.update(f"{path.name}:{size}\n".encode())
        with path.open("rb") as file:
            digest.update(file.read(_EDGE_BYTES))
            file.seek(max(0, size - _EDGE_BYTES))
            digest.update(file.read(_EDGE_BYTES))
    return digest.hexdigest()
