"""Run a function on N gloo ranks, each a process of its own, and collect what every rank returns."""

from __future__ import annotations

import multiprocessing
import os
import socket
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch


def run_ranks(world_size: int, function: Callable[..., Any], folder: Path, *arguments: Any) -> list[Any]:
    """Return ``function(*arguments)`` of every rank, in rank order; an exception of a rank fails the test."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    folder.mkdir(parents=True, exist_ok=True)
    context = multiprocessing.get_context("spawn")
    processes = [
        context.Process(target=_enter, args=(rank, world_size, port, function, folder, arguments), daemon=True)
        for rank in range(world_size)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout=240)
    errors = [file.read_text() for file in sorted(folder.glob("error_*.txt"))]
    for process in processes:
        if process.is_alive():
            process.kill()
            errors.append(f"{process.name} did not end in time")
    assert not errors, "\n".join(errors)
    return [torch.load(folder / f"result_{rank}.pt", weights_only=False) for rank in range(world_size)]


def _enter(
    rank: int, world_size: int, port: int, function: Callable[..., Any], folder: Path, arguments: tuple[Any, ...]
) -> None:
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        GLOO_SOCKET_IFNAME="lo",
    )
    torch.set_num_threads(1)
    try:
        torch.save(function(*arguments), folder / f"result_{rank}.pt")
    except BaseException:
        (folder / f"error_{rank}.txt").write_text(f"rank {rank}:\n{traceback.format_exc()}")
        os._exit(1)
    os._exit(0)
