"""How weights travel from the training workers to the rollout engines.

``WeightChannel.publish`` writes the tensors of an iterator into files of bounded size, one bucket at a time, so that
the whole model is never held in one process; the manifest it returns travels to the engines by any means. ``receive``
compares the manifest with what the engine expects before it yields the first tensor. The files live in shared memory
(one machine) or in a folder that all machines see.

Assumptions about the folder: it belongs to one channel, and a renamed file is visible to the readers.
"""

from __future__ import annotations

import contextlib
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from verl.errors import EngineError, ResourceError

BUCKET_BYTES = 2**30
_PATTERN = "weights-*.safetensors"


@dataclass(frozen=True)
class WeightEntry:
    """One tensor of a publish. Example: ``WeightEntry("lm_head.weight", (2048, 128), "bfloat16", 0, None)``."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    """Name without the ``torch.`` prefix."""
    file: int
    """Index into the manifest's files."""
    checksum: int | None
    """CRC-32 of the tensor's bytes; None unless the channel was told to make checksums."""


@dataclass(frozen=True)
class WeightManifest:
    """What one publish consists of; small, picklable, sent to every rollout worker."""

    version: int
    files: tuple[str, ...]
    """Paths of the buckets."""
    entries: tuple[WeightEntry, ...]
    """In the order they were written."""

    @property
    def digest(self) -> int | None:
        """One checksum over those of all tensors, their names and order; None when the channel makes none."""
        if not self.entries or any(entry.checksum is None for entry in self.entries):
            return None
        return zlib.crc32("".join(f"{entry.name}:{entry.checksum};" for entry in self.entries).encode())

    def to_record(self) -> dict[str, Any]:
        """Return the manifest as plain data; ``from_record`` inverts it, lists in place of tuples included."""
        return asdict(self)

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> WeightManifest:
        """Rebuild a manifest from ``to_record``'s form."""
        entries = (WeightEntry(**(entry | {"shape": tuple(entry["shape"])})) for entry in record["entries"])
        return cls(record["version"], tuple(record["files"]), tuple(entries))


class WeightChannel:
    """The file transport: one publisher, any number of receivers."""

    def __init__(self, directory: str | Path, checksums: bool = False, bucket_bytes: int = BUCKET_BYTES) -> None:
        """Use ``directory`` for the buckets; leftovers of an earlier run in it are removed.

        ``checksums`` (debugging) adds a CRC-32 per tensor, compared on arrival.
        """
        self.directory = Path(directory)
        self._checksums = checksums
        self._bucket_bytes = bucket_bytes
        self._files: list[Path] = []
        self._cleaned = False

    def publish(
        self,
        named_tensors: Iterable[tuple[str, Tensor]],
        version: int,
        dtype: torch.dtype | None = None,
        write: bool = True,
    ) -> WeightManifest:
        """Write the tensors, as ``dtype`` when given (floating-point ones), and return the manifest.

        The previous version's files are removed first: engines copy what they receive. With ``write=False`` the
        iterator is only consumed (the ranks that take part in gathering but do not write) and the manifest is empty.
        Raises ResourceError when the folder is full.
        """
        if not write:
            for _ in named_tensors:
                pass
            return WeightManifest(version, (), ())
        self._prepare()
        entries: list[WeightEntry] = []
        bucket: dict[str, Tensor] = {}
        size = 0
        for name, tensor in named_tensors:
            value = tensor.detach()
            if dtype is not None and value.is_floating_point():
                value = value.to(dtype)
            # A copy in any case: a file must not share storage between tensors, nor change under a late writer.
            value = value.to("cpu", copy=True).contiguous()
            if bucket and size + value.nbytes > self._bucket_bytes:
                self._write(bucket, version)
                bucket, size = {}, 0
            checksum = _checksum(value) if self._checksums else None
            shape, kind = tuple(value.shape), str(value.dtype).removeprefix("torch.")
            entries.append(WeightEntry(name, shape, kind, len(self._files), checksum))
            bucket[name] = value
            size += value.nbytes
        if bucket:
            self._write(bucket, version)
        return WeightManifest(version, tuple(map(str, self._files)), tuple(entries))

    def close(self) -> None:
        """Remove the files."""
        for path in self._files:
            path.unlink(missing_ok=True)
        self._files = []
        with contextlib.suppress(OSError):  # not empty: it was not ours alone
            self.directory.rmdir()

    def _prepare(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        old = self._files if self._cleaned else list(self.directory.glob(_PATTERN))
        for path in old:
            path.unlink(missing_ok=True)
        self._files, self._cleaned = [], True

    def _write(self, bucket: dict[str, Tensor], version: int) -> None:
        path = self.directory / f"weights-{version}-{len(self._files)}.safetensors"
        partial = path.with_suffix(".partial")
        try:
            save_file(bucket, str(partial))
            os.replace(partial, path)
        except (OSError, SafetensorError) as error:
            with contextlib.suppress(OSError):
                partial.unlink(missing_ok=True)
            raise ResourceError(f"cannot write weights version {version} to {self.directory}: {error}") from error
        self._files.append(path)


def weight_spec(model: nn.Module) -> dict[str, tuple[tuple[int, ...], str]]:
    """Return shape and dtype name of every weight of a Hugging Face model, tied weights once."""
    return {name: (tuple(p.shape), str(p.dtype).removeprefix("torch.")) for name, p in model.named_parameters()}


def tied_names(model: nn.Module) -> dict[str, str]:
    """Return alias -> name in ``weight_spec`` for weights that share storage, such as a tied head."""
    by_identity = {id(p): name for name, p in model.named_parameters()}
    every = model.named_parameters(remove_duplicate=False)
    return {name: by_identity[id(p)] for name, p in every if by_identity[id(p)] != name}


def receive(
    manifest: WeightManifest,
    expected: Mapping[str, tuple[tuple[int, ...], str]],
    aliases: Mapping[str, str] | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Check the manifest against ``expected`` (name -> shape, dtype), then yield every expected tensor once.

    ``aliases`` maps further names of tied weights to the expected one (a head that is the embedding): such an entry may
    stand for it, or be sent beside it with equal values. All checks of names, shapes and dtypes are made before the
    first tensor is yielded; damaged files and checksums that differ show later. Raises EngineError.
    """
    chosen = _match(manifest, expected, aliases or {})
    return _read(manifest, chosen)


def _match(
    manifest: WeightManifest, expected: Mapping[str, tuple[tuple[int, ...], str]], aliases: Mapping[str, str]
) -> list[tuple[WeightEntry, str, bool]]:
    """Return (entry, expected name, is a second copy) in file order."""
    counts: dict[str, int] = {}
    chosen, problems = [], []
    direct = {entry.name for entry in manifest.entries}
    for entry in manifest.entries:
        name = entry.name if entry.name in expected else aliases.get(entry.name, entry.name)
        if name not in expected:
            problems.append(f"{entry.name}: not a weight of the engine's model")
            continue
        shape, dtype = expected[name]
        if (entry.shape, entry.dtype) != (tuple(shape), dtype):
            problems.append(f"{entry.name}: sent {entry.dtype}{entry.shape}, expected {dtype}{tuple(shape)}")
        second = counts.get(name, 0) > 0 or (entry.name != name and name in direct)
        if entry.name == name and name in counts:
            problems.append(f"{entry.name}: sent twice")
        if not second:
            counts[name] = 1
        chosen.append((entry, name, second))
    problems += [f"{name}: missing" for name in expected if name not in counts]
    if problems:
        shown = "; ".join(problems[:5]) + (f"; and {len(problems) - 5} more" if len(problems) > 5 else "")
        raise EngineError(f"weights version {manifest.version} do not fit the rollout engine: {shown}")
    return chosen


def _read(manifest: WeightManifest, chosen: list[tuple[WeightEntry, str, bool]]) -> Iterator[tuple[str, Tensor]]:
    """Yield (expected name, tensor); second copies are compared with the first instead."""
    origin = {name: entry for entry, name, second in chosen if not second}
    for entry, name, second in chosen:
        tensor = _load(manifest, entry)
        if not second:
            yield name, tensor
        elif not torch.equal(tensor, _load(manifest, origin[name])):
            raise EngineError(
                f"weights version {manifest.version}: {entry.name} and {origin[name].name} are one tied weight in the "
                "rollout engine but were sent with different values; the trainer's model is not tied"
            )


def _load(manifest: WeightManifest, entry: WeightEntry) -> Tensor:
    path = manifest.files[entry.file]
    try:
        with safe_open(path, framework="pt") as file:
            tensor: Tensor = file.get_tensor(entry.name)
    except (OSError, SafetensorError) as error:
        raise EngineError(f"cannot read weights version {manifest.version} from {path}: {error}") from error
    if entry.checksum is not None and _checksum(tensor) != entry.checksum:
        raise EngineError(f"weights version {manifest.version}: the checksum of {entry.name} changed on the way")
    return tensor


def _checksum(tensor: Tensor) -> int:
    return zlib.crc32(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
