"""Rows of ``gpu_check`` about training: sharding, packing, memory, the loop itself, speed."""

from __future__ import annotations

import math
import os
import socket
import time
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from gpu_setting import EvenTokens, Setting

from verl.data.batch import pack_batch
from verl.data.prompts import PromptStream
from verl.workers.device import Device, dtype_of
from verl.workers.engine import Engine, shard_module
from verl.workers.logits import token_statistics

GIB = 2**30


class _ShardedAlone(Engine):
    """An engine whose module is sharded over a group of one rank: FSDP2's code on a single device."""

    def _shard(self) -> None:
        super()._shard()
        shard_module(self.module, self.device, self._dtype)


def _step_norm(engine: Engine) -> float:
    """Make the optimiser's step; return the gradient's norm. Raises FloatingPointError when it is not finite."""
    figures = engine.step()
    if figures is None:
        raise FloatingPointError("the gradient is not finite, so the optimiser made no step")
    return figures["grad_norm"]


def _one_step(engine: Engine, setting: Setting) -> tuple[float, float, float]:
    """Make one step on -mean log-prob; return loss before, loss after, gradient norm."""
    lengths = (48, 33, 20) if setting.tiny else (512, 700, 300, 411)
    batch = setting.batch(lengths)
    engine.update = 1
    losses = []
    for update in range(2):
        engine.train_mode()
        logprobs, _ = engine.forward(batch)
        loss = -logprobs.sum() / batch.total_tokens
        losses.append(float(loss.detach()))
        if update == 0:
            engine.backward(loss, last=True)
            norm = _step_norm(engine)
    return losses[0], losses[1], norm


def fsdp_step(setting: Setting) -> str:
    """One optimiser step under FSDP2 equals one without."""
    plain = _one_step(setting.engine(), setting)
    backend = "nccl" if setting.device.torch_device.type == "cuda" else "gloo"
    address = f"file://{setting.folder / 'store'}"
    dist.init_process_group(backend, rank=0, world_size=1, init_method=address)
    try:
        sharded = _one_step(_ShardedAlone(setting.spec(), setting.device), setting)
    finally:
        dist.destroy_process_group()
    assert plain[1] < plain[0], f"the loss did not fall: {plain}"
    for name, one, other in zip(("loss", "loss after", "gradient norm"), plain, sharded, strict=True):
        assert abs(one - other) <= 0.02 * abs(one), f"{name}: {one} without, {other} with FSDP2"
    return f"loss {sharded[0]:.4f} -> {sharded[1]:.4f} (plain {plain[0]:.4f} -> {plain[1]:.4f}), norm {sharded[2]:.3g}"


def _packed(setting: Setting, dtype: str, limit: float) -> str:
    engine = setting.engine(dtype, optim=None)
    lengths = (40, 17, 29, 5) if setting.tiny else (900, 257, 640, 33)
    sequences = setting.sequences(lengths)
    together, _ = engine.score(pack_batch(sequences))
    alone = torch.cat([engine.score(pack_batch([sequence]))[0] for sequence in sequences])
    worst = float((together - alone).abs().max())
    assert worst <= limit, f"a packed log-prob is off by {worst} nats (limit {limit})"
    return f"{len(together)} tokens of {len(lengths)} sequences, max difference {worst:.2g} nats"


def packed_sdpa(setting: Setting) -> str:
    """Packed sequences do not see each other (SDPA, float32)."""
    return _packed(setting, "float32", 1e-3)


def packed_flash(setting: Setting) -> str:
    """The same with flash-attn's kernel for packed rows (bfloat16)."""
    return _packed(setting, "bfloat16", 0.25)


def chunked_head(setting: Setting) -> str:
    """Chunked log-probs equal plain ones and need a fraction of the memory."""
    n, width, vocabulary = (64, 32, 512) if setting.tiny else (4096, 896, 151936)
    device = setting.device.torch_device
    torch.manual_seed(2)
    weight = torch.randn(vocabulary, width, device=device) * 0.02
    hidden = torch.randn(n, width, device=device)
    targets = torch.randint(0, vocabulary, (n,), device=device)

    def peak(function: Any) -> tuple[torch.Tensor, torch.Tensor, float]:
        inputs = hidden.clone().requires_grad_()
        if setting.device.is_accelerator:
            torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated() if setting.device.is_accelerator else 0
        values = function(inputs)
        values.sum().backward()
        assert inputs.grad is not None
        used = (torch.cuda.max_memory_allocated() - before) / GIB if setting.device.is_accelerator else math.nan
        return values.detach(), inputs.grad, used

    chunk = vocabulary * 16 if setting.tiny else None
    chunked = peak(lambda h: token_statistics(h, weight, targets, chunk_elements=chunk)[0])
    plain = peak(lambda h: (h @ weight.t()).log_softmax(-1).gather(-1, targets[:, None]).squeeze(-1))
    worst = max(float((one - other).abs().max()) for one, other in zip(chunked[:2], plain[:2], strict=True))
    assert worst < 2e-2, f"values or gradients differ by {worst}"
    memory = "memory is measured on CUDA only"
    if setting.device.is_accelerator:
        assert chunked[2] < 0.5 * plain[2], f"chunked {chunked[2]:.2f} GiB, plain {plain[2]:.2f} GiB"
        memory = f"peak {chunked[2]:.2f} GiB instead of {plain[2]:.2f} GiB"
    return f"{n} x {vocabulary} logits, max difference {worst:.2g}, {memory}"


def offload(setting: Setting) -> str:
    """Parameters and optimiser state leave the device and come back unchanged."""
    engine = setting.engine(param_offload=True, optimizer_offload=True)
    engine.load_back()
    _one_step(engine, setting)
    before = engine.score(setting.batch((20, 30)))[0]
    held = torch.cuda.memory_allocated() if setting.device.is_accelerator else 0
    engine.offload()
    left = torch.cuda.memory_allocated() if setting.device.is_accelerator else 0
    engine.load_back()
    after = engine.score(setting.batch((20, 30)))[0]
    assert torch.equal(before, after), "log-probs changed on the way"
    if not setting.device.is_accelerator:
        return "nothing moves on a CPU; log-probs unchanged"
    assert left < 0.1 * held, f"{left / GIB:.2f} of {held / GIB:.2f} GiB stay on the device"
    return f"{held / GIB:.2f} -> {left / GIB:.2f} GiB, log-probs unchanged"


def ppo_steps(setting: Setting) -> str:
    """Twenty steps of the training loop itself: rollouts, critic, policy, publish."""
    from verl.algorithms.entropy import entropy_controller
    from verl.algorithms.kl import kl_controller
    from verl.cluster.local import LocalCluster
    from verl.config import flatten
    from verl.tracking import RunInfo, Tracker
    from verl.trainer.checkpoint import CheckpointStore
    from verl.trainer.evaluate import Evaluator
    from verl.trainer.loop import Parts, TrainingLoop
    from verl.trainer.models import spawn_models
    from verl.trainer.run_folder import open_run
    from verl.workers.rollout.manager import DealingGroup, Rollouts
    from verl.workers.rollout.worker import RolloutWorker

    steps, config = 20, setting.config()
    cluster = LocalCluster()
    try:
        workers = cluster.spawn("rollout", RolloutWorker, 1, config)
        rollouts = Rollouts(cast(DealingGroup, workers), config)
        models = spawn_models(cluster, config, rollouts, steps, setting.folder / "ppo-weights")
        task: Any = EvenTokens.from_config(config, None)
        flat = flatten(config)
        folder = open_run(setting.folder / "ppo", "never", flat, 1)
        stream = PromptStream(task.prompts("train"), config.data.train_batch_size, 1, True)
        info = RunInfo(folder.path, "gpu_check", "ppo", steps, None, folder.run_id, flat)
        parts = Parts(
            config=config, folder=folder, config_hash="", prompts=stream, prompts_hash="", rollouts=rollouts,
            models=models, kl=kl_controller(config.algorithm.kl_ctrl),
            entropy=entropy_controller(config.actor_rollout_ref.actor),
            evaluator=Evaluator(task, [], rollouts, config, folder.path), tracker=Tracker(info, ()),
            store=CheckpointStore(folder.path, 1),
            total_steps=steps + 1,  # the last step would be saved and evaluated
        )  # fmt: skip
        loop = TrainingLoop(parts)
        models.publish(0)
        started = time.monotonic()
        for step in range(1, steps + 1):
            loop.train_step(step)
        seconds = time.monotonic() - started
        rows = parts.tracker.file.rows()
        parts.tracker.close()
        models.close()
        folder.lock.close()
    finally:
        cluster.close()
    rewards = [row["reward/total/mean"] for row in rows]
    gap = max(row["policy/rollout_kl"] for row in rows)
    assert len(rows) == steps and all(math.isfinite(row["policy/loss"]) for row in rows), "a loss is not finite"
    assert abs(gap) < 0.05, f"policy/rollout_kl reached {gap}"
    tokens = sum(row["data/trained_tokens"] for row in rows)
    return (
        f"{seconds / steps:.2f} s a step, {tokens / seconds:.0f} trained tokens/s, reward {rewards[0]:.3f} -> "
        f"{rewards[-1]:.3f}, rollout_kl at most {gap:.2g}"
    )


def throughput(setting: Setting) -> str:
    """Tokens per second of forward and backward, and the share of the measured matrix-product rate."""
    dtype = "float32" if setting.tiny else "bfloat16"
    engine = setting.engine(dtype)
    length = 64 if setting.tiny else 1024
    batch = setting.batch((length,) * 4)
    rounds = 2 if setting.tiny else 6
    engine.train_mode()
    seconds = math.inf
    for number in range(rounds + 1):
        _synchronise(setting.device)
        started = time.monotonic()
        logprobs, _ = engine.forward(batch)
        engine.backward(-logprobs.sum() / batch.total_tokens, last=True)
        _synchronise(setting.device)
        if number:  # the first round warms up
            seconds = min(seconds, time.monotonic() - started)
        assert engine.optimizers is not None
        engine.optimizers.zero_grad()
    tokens = int(batch.token_ids.shape[0])
    shape = engine.config
    parameters = sum(p.numel() for p in engine.module.parameters())
    attention = 12 * shape.num_hidden_layers * shape.hidden_size * length / 2  # causal: half of the square
    flops = tokens * (6 * parameters + attention)
    peak = _matmul_rate(setting.device, dtype_of(dtype), 256 if setting.tiny else 8192)
    return (
        f"{tokens / seconds:,.0f} tokens/s forward+backward, {flops / seconds / 1e12:.3g} TFLOP/s = "
        f"{flops / seconds / peak:.0%} of {peak / 1e12:.3g} measured ({dtype})"
    )


def _synchronise(device: Device) -> None:
    if device.is_accelerator:
        torch.accelerator.synchronize()


def _matmul_rate(device: Device, dtype: torch.dtype, size: int) -> float:
    """Return the best measured FLOP/s of square matrix products."""
    left = torch.randn(size, size, device=device.torch_device, dtype=dtype)
    best = math.inf
    for _ in range(6):
        _synchronise(device)
        started = time.monotonic()
        for _ in range(4):
            left @ left
        _synchronise(device)
        best = min(best, (time.monotonic() - started) / 4)
    return 2 * size**3 / best


def _rank(rank: int, setting: Setting, port: int, answers: Any) -> None:
    from verl.workers.device import close_device, setup_device

    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    device = setup_device()
    own = Setting(device, setting.folder, setting.tiny)
    # Every rank computes the same batch; gradients are summed, so each rank brings half of the loss.
    engine = own.engine()
    batch = own.batch((48, 33, 20) if own.tiny else (512, 700, 300, 411))
    engine.update = 1
    engine.train_mode()
    logprobs, _ = engine.forward(batch)
    loss = -logprobs.sum() / batch.total_tokens
    engine.backward(loss / 2, last=True)
    norm = _step_norm(engine)
    if rank == 0:
        answers.put((float(loss.detach()), norm))
    close_device()


def two_ranks(setting: Setting) -> str:
    """FSDP2 over two ranks (NCCL on CUDA, gloo on a CPU) makes the step that one rank makes."""
    wanted = _one_step(setting.engine(), setting)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = mp.get_context("spawn")
    answers = context.Queue()
    ranks = [context.Process(target=_rank, args=(rank, setting, port, answers)) for rank in range(2)]
    for process in ranks:
        process.start()
    try:
        loss, norm = answers.get(timeout=180)
    finally:
        for process in ranks:
            process.join(30)
            if process.is_alive():
                process.kill()
    for name, one, other in (("loss", wanted[0], loss), ("gradient norm", wanted[2], norm)):
        assert abs(one - other) <= 0.02 * abs(one), f"{name}: {one} on one rank, {other} on two"
    backend = "NCCL" if setting.device.torch_device.type == "cuda" else "gloo"
    return f"{backend}: loss {loss:.4f}, norm {norm:.4g} (one rank {wanted[0]:.4f}, {wanted[2]:.4g})"
