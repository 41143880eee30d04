"""Where a torch model runs and in which precision: one rule for encoders and cross-encoders."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch

from retrieval_server.errors import SettingsError

_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def pick_device(wanted: str) -> torch.device:
    """Return the device named, or for "auto" the accelerator if there is one; raises SettingsError if it is absent."""
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if wanted == "auto":
        return found or torch.device("cpu")
    try:
        device = torch.device(wanted)
    except RuntimeError:
        raise SettingsError(f"device {wanted!r} is unknown; for example auto, cpu, cuda, cuda:1") from None
    if device.type == "cpu":
        return device
    if found is None or device.type != found.type:
        here = "cpu" if found is None else f"cpu and {found.type}"
        raise SettingsError(f"device {wanted!r} is not on this machine, which has {here}; or this torch cannot use it")
    count = torch.accelerator.device_count()
    if device.index is not None and device.index >= count:
        raise SettingsError(f"device {wanted!r} does not exist; this machine has {count}, counted from 0")
    return device


def pick_dtype(wanted: str, device: torch.device) -> torch.dtype:
    """Return the precision of the matrix products.

    "auto" is float16 on an accelerator, bfloat16 on a CPU that multiplies it in hardware, else float32. float16 on a
    CPU is a SettingsError: nothing there computes it, and one batch takes minutes.
    """
    if wanted == "auto":
        if device.type != "cpu":
            return torch.float16
        return torch.bfloat16 if _cpu_multiplies_bfloat16() else torch.float32
    if wanted == "float16" and device.type == "cpu":
        raise SettingsError("dtype is float16 on a CPU, which would take minutes a batch; take auto or bfloat16")
    return _DTYPES[wanted]


def _cpu_multiplies_bfloat16(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    try:
        text = cpuinfo.read_text(encoding="ascii", errors="replace")
    except OSError:
        return False
    return "avx512_bf16" in text or "amx_bf16" in text


def mixed_precision(device: torch.device, dtype: torch.dtype) -> AbstractContextManager[Any]:
    """Return the context of a forward pass: weights stay float32, products are computed in ``dtype``."""
    return nullcontext() if dtype == torch.float32 else torch.autocast(device.type, dtype)


def tokens_per_pass(device: torch.device) -> int:
    """Return how many tokens, padding included, one forward pass of an encoder should hold at most.

    A CPU gains nothing beyond what its caches hold; an accelerator wants to be filled.
    """
    return 4096 if device.type == "cpu" else 131_072


def length_groups(
    lengths: Sequence[int], device: torch.device, max_rows: int, max_length: int, step: int = 8
) -> Iterator[tuple[list[int], int]]:
    """Yield (rows, padded length) of forward passes, longest first: what does not fit in memory fails at once.

    The padded length of a text follows from its own (the next multiple of ``step`` tokens) and not from its company, or
    its result would change in the last bits with it.
    """
    groups: dict[int, list[int]] = {}
    for row, length in enumerate(lengths):
        padded = -(-length // step) * step
        groups.setdefault(max(length, min(padded, max_length)), []).append(row)
    for length in sorted(groups, reverse=True):
        rows = groups[length]
        size = max(1, min(max_rows, tokens_per_pass(device) // length))
        for start in range(0, len(rows), size):
            yield rows[start : start + size], length


def set_threads(threads: int) -> None:
    """Let torch compute with so many threads on the CPU; 0 leaves its choice (the cores, or OMP_NUM_THREADS)."""
    if threads:
        torch.set_num_threads(threads)
