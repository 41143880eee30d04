"""Where a torch model runs and in which precision: one rule for encoders and cross-encoders."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, TypeVar

import torch

from retrieval_server.errors import SettingsError

T = TypeVar("T")

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
    """Return the context of a forward pass: products are computed in ``dtype``, the rest in float32."""
    return nullcontext() if dtype == torch.float32 else torch.autocast(device.type, dtype)


def convert_linear(model: torch.nn.Module, dtype: torch.dtype) -> None:
    """Convert the weights of all linear layers once; ``mixed_precision`` would do the same anew in every pass."""
    for module in model.modules():
        if type(module) is torch.nn.Linear:
            module.to(dtype)


def tokens_per_pass(device: torch.device) -> int:
    """Return how many tokens, padding included, one forward pass of an encoder should hold at most.

    A CPU gains nothing beyond what its caches hold; an accelerator wants to be filled.
    """
    return 4096 if device.type == "cpu" else 131_072


def length_groups(
    lengths: Sequence[int], device: torch.device, max_rows: int, max_length: int, step: int, shares: int
) -> Iterator[tuple[list[int], int]]:
    """Yield (rows, padded length) of forward passes, longest first: what does not fit in memory fails at once.

    A pass has at most ``max_rows`` texts, and about one of ``shares`` equal parts of the work.
    The padded length of a text follows from its own (the next multiple of ``step`` tokens) and not from its company, or
    its result would change in the last bits with it.
    """
    groups: dict[int, list[int]] = {}
    for row, length in enumerate(lengths):
        padded = -(-length // step) * step
        groups.setdefault(max(length, min(padded, max_length)), []).append(row)
    share = -(-sum(length * len(rows) for length, rows in groups.items()) // shares)
    for length in sorted(groups, reverse=True):
        rows = groups[length]
        size = max(1, min(max_rows, tokens_per_pass(device) // length, -(-share // length)))
        for start in range(0, len(rows), size):
            yield rows[start : start + size], length


class Passes:
    """Runs forward passes: one after the other on an accelerator, on a CPU several side by side.

    Threads that share a pass of a few short texts wait for each other longer than they compute.
    """

    def __init__(self, device: torch.device, max_rows: int) -> None:
        """``max_rows``: of one pass. On a CPU as many threads as torch has now compute from then on."""
        self._device, self._max_rows = device, max_rows
        self._threads = torch.get_num_threads() if device.type == "cpu" else 1
        self._pool = ThreadPoolExecutor(self._threads, thread_name_prefix="forward", initializer=_compute_alone)

    def run(
        self, forward: Callable[[list[int], int], T], lengths: Sequence[int], max_length: int, step: int = 8
    ) -> Iterator[tuple[list[int], T]]:
        """Yield (rows, what ``forward(rows, padded length)`` gave) of all rows. One call at a time."""
        groups = list(length_groups(lengths, self._device, self._max_rows, max_length, step, self._threads))
        if self._threads == 1 or len(groups) == 1:
            yield from ((rows, forward(rows, length)) for rows, length in groups)
            return
        torch.set_num_threads(1)
        try:
            yield from zip(
                (rows for rows, _ in groups), self._pool.map(lambda group: forward(*group), groups), strict=True
            )
        finally:
            torch.set_num_threads(self._threads)


def _compute_alone() -> None:
    torch.set_num_threads(1)  # counts for the calling thread


def set_threads(threads: int) -> None:
    """Let torch compute with so many threads on the CPU; 0 leaves its choice (the cores, or OMP_NUM_THREADS)."""
    if threads:
        torch.set_num_threads(threads)
