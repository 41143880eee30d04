"""Where this process computes, and with whom: the only place that branches on the kind of device.

A worker's place in its group comes from the usual environment variables (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR,
MASTER_PORT), which the cluster sets before the worker is built; without them the process is rank 0 of 1.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import random
import resource
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from verl.errors import ConfigError, ResourceError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Device:
    """One process of a group of ``world_size``; ``torch_device`` is where its tensors live."""

    torch_device: torch.device
    rank: int
    world_size: int

    @property
    def is_accelerator(self) -> bool:
        """True on a GPU or another accelerator, False on the CPU."""
        return self.torch_device.type != "cpu"

    @property
    def is_main(self) -> bool:
        """True on the rank that writes files which exist once per group."""
        return self.rank == 0


def dtype_of(name: str) -> torch.dtype:
    """Return the torch dtype of a config name; raise ConfigError naming the known ones."""
    if name not in DTYPES:
        raise ConfigError(f"unknown dtype {name!r}; known: {', '.join(DTYPES)}")
    return DTYPES[name]


def setup_device(threads: int | None = None, timeout_s: float = 1800.0) -> Device:
    """Choose the device, set the thread count (CPU) and join the process group of RANK/WORLD_SIZE.

    Calling it twice in one process is harmless. Raises ResourceError when a rank has no accelerator of its own
    although the machine has some.
    """
    if threads is not None:
        torch.set_num_threads(threads)
    rank = int(os.environ.get("RANK", "0"))
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        device = torch.device("cpu")
    else:
        count = torch.accelerator.device_count()
        index = int(os.environ.get("LOCAL_RANK", "0")) if count > 1 else 0
        if index >= count:
            raise ResourceError(f"local rank {index} has no device: {count} visible; lower trainer.n_gpus_per_node")
        torch.accelerator.set_device_index(index)
        device = torch.device(accelerator.type, index)
    if world_size > 1 and not dist.is_initialized():
        # gloo beside the accelerator's backend: checkpoints and small reductions travel as CPU tensors.
        backend = "gloo" if accelerator is None else f"cpu:gloo,{accelerator.type}:nccl"
        dist.init_process_group(backend, rank=rank, world_size=world_size, timeout=timedelta(seconds=timeout_s))
    return Device(device, rank, world_size)


def close_device() -> None:
    """Leave the process group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()


def seed_everything(seed: int) -> None:
    """Seed Python, numpy and torch (all devices) of this process."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def rng_state(device: Device) -> dict[str, Any]:
    """Return the torch generators' states as tensors (safe to load with ``weights_only``)."""
    state: dict[str, Any] = {"cpu": torch.get_rng_state()}
    if device.is_accelerator:
        state[device.torch_device.type] = torch.get_device_module(device.torch_device).get_rng_state()
    return state


def restore_rng(device: Device, state: dict[str, Any]) -> None:
    """Invert ``rng_state``; a state of another kind of device restores the CPU generator only."""
    torch.set_rng_state(state["cpu"])
    kind = device.torch_device.type
    if device.is_accelerator and kind in state:
        torch.get_device_module(device.torch_device).set_rng_state(state[kind])


def sum_over_ranks(device: Device, values: Sequence[float]) -> list[float]:
    """Add ``values`` [K] element by element over all ranks, in double precision; every rank gets the same result."""
    if device.world_size == 1:
        return [float(value) for value in values]
    total = torch.tensor(list(values), dtype=torch.float64)
    dist.all_reduce(total)
    return [float(value) for value in total.tolist()]


def max_over_ranks(device: Device, value: float) -> float:
    """Return the largest ``value`` of all ranks."""
    if device.world_size == 1:
        return float(value)
    largest = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return float(largest.item())


def gather_objects(device: Device, value: Any) -> list[Any]:
    """Return the ``value`` of every rank in rank order, on every rank."""
    if device.world_size == 1:
        return [value]
    gathered: list[Any] = [None] * device.world_size
    dist.all_gather_object(gathered, value)
    return gathered


def barrier(device: Device) -> None:
    """Wait until every rank is here."""
    if device.world_size > 1:
        dist.barrier()


def peak_memory_bytes(device: Device) -> int:
    """Return the highest memory use so far: of the accelerator, or of the process on a CPU."""
    if device.is_accelerator:
        return int(torch.get_device_module(device.torch_device).max_memory_allocated(device.torch_device))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def logit_chunk_elements(device: torch.device) -> int:
    """Return how many logits to hold at once: what stays in a CPU's caches, or half a GiB of float32 elsewhere."""
    return 2**22 if device.type == "cpu" else 2**27


def flash_attention_available(tensor: torch.Tensor) -> bool:
    """True when the flash-attn package is installed and can take this tensor (CUDA, half precision)."""
    return _FLASH_INSTALLED and tensor.is_cuda and tensor.dtype in (torch.bfloat16, torch.float16)


_FLASH_INSTALLED = importlib.util.find_spec("flash_attn") is not None


def empty_cache(device: Device) -> None:
    """Return cached blocks to the driver so that another engine on the same device can have them."""
    if device.is_accelerator:
        torch.get_device_module(device.torch_device).empty_cache()


def free_bytes(device: Device) -> int | None:
    """Return the accelerator's free memory, None on a CPU."""
    if not device.is_accelerator:
        return None
    free, _ = torch.get_device_module(device.torch_device).mem_get_info(device.torch_device)
    return int(free)


@contextlib.contextmanager
def compute_dtype(device: Device, dtype: torch.dtype) -> Iterator[None]:
    """Run matrix products in ``dtype`` while master weights stay float32 (no-op for float32)."""
    if dtype is torch.float32:
        yield
        return
    with torch.autocast(device.torch_device.type, dtype=dtype):
        yield
