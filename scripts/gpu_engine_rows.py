"""Rows of ``gpu_check`` about rollout engines: agreement with the trainer, published weights, memory."""

from __future__ import annotations

import asyncio
import math
import time
from typing import Any

import torch
import torch.multiprocessing as mp
from gpu_setting import EvenTokens, Setting

from verl.trainer.audit import check_gaps, check_tokens, measure_gaps
from verl.trainer.main_audit import run_episodes
from verl.types import Level, Sampling
from verl.workers.engine import Engine
from verl.workers.rollout.engines import ENGINES
from verl.workers.weight_sync import WeightChannel, WeightManifest

GIB = 2**30


def _gap(setting: Setting, dtype: str, max_gap: float, mean_gap: float, name: str = "hf") -> str:
    config = setting.config(dtype, name=name)
    prompts = EvenTokens.from_config(config, None).prompts("train")[:16]
    trajectories, recordings, samples = run_episodes(config, prompts, 1)
    wrong = [f.detail for f in check_tokens(trajectories, recordings, samples) if f.level is Level.FAIL]
    assert not wrong, wrong[0]
    gaps = measure_gaps(trajectories, samples)
    found = check_gaps(gaps, max_gap, mean_gap)
    assert found.level is not Level.FAIL, found.detail
    return f"{gaps.whole.tokens} tokens, gap max {gaps.whole.largest:.2g} mean {gaps.whole.mean:.2g} nats"


def bf16_parity(setting: Setting) -> str:
    """Engine and trainer in bfloat16 agree on average."""
    return _gap(setting, "bfloat16", math.inf, 0.05)


def fp32_parity(setting: Setting) -> str:
    """Engine and trainer in float32 agree at every token."""
    return _gap(setting, "float32", 1e-3 if setting.device.is_accelerator else 1e-4, 1e-4)


def _take_over(setting: Setting, runner: asyncio.Runner, rollout: Any, trainer: Engine, version: int) -> WeightManifest:
    """Publish the trainer's weights to the engine; let it generate with them; return what was published."""
    channel = WeightChannel(setting.folder / "weights", checksums=True)
    try:
        manifest = channel.publish(trainer.named_full_tensors(), version, dtype=torch.bfloat16)
        runner.run(rollout.take_over(manifest))
    finally:
        channel.close()
    held = rollout.weights
    assert held.version == version and held.digest == manifest.digest, f"the engine holds {held}, not {version}"
    completion = runner.run(rollout.session(0).generate((5, 6, 7), Sampling(8, temperature=0.0)))
    assert completion.policy_version == version, f"version {completion.policy_version}, published {version}"
    return manifest


def _publish(setting: Setting, name: str) -> str:
    """Publish twice with a change between; the engine holds the trainer's weights and stamps the version."""
    trainer = setting.engine(optim=None)
    with asyncio.Runner() as runner:
        rollout = ENGINES[name](setting.config("bfloat16", name=name), setting.device)
        try:
            _take_over(setting, runner, rollout, trainer, 0)
            with torch.no_grad():
                for parameter in trainer.module.parameters():
                    parameter.mul_(1.01)
            started = time.monotonic()
            manifest = _take_over(setting, runner, rollout, trainer, 1)
            seconds = time.monotonic() - started
        finally:
            rollout.close()
    size = sum(math.prod(entry.shape) for entry in manifest.entries) * 2
    return f"{size / 1e9:.3f} GB in {seconds:.2f} s through files, checksums equal, version 1 generates"


def publish_hf(setting: Setting) -> str:
    """The weight channel into the hf engine."""
    return _publish(setting, "hf")


def _sum_in_child(queue: Any, answers: Any) -> None:
    tensor = queue.get()
    answers.put(float(tensor.double().sum()))
    del tensor


def cuda_ipc(setting: Setting) -> str:
    """A tensor on the device is read by another process without a copy through the host."""
    context = mp.get_context("spawn")
    queue, answers = context.Queue(), context.Queue()
    tensor = torch.arange(2**20, dtype=torch.float32, device=setting.device.torch_device) / 2**10
    child = context.Process(target=_sum_in_child, args=(queue, answers))
    child.start()
    try:
        queue.put(tensor)
        seen = answers.get(timeout=120)
    finally:
        child.join(30)
        if child.is_alive():
            child.kill()
    assert seen == float(tensor.double().sum()), f"the other process sums {seen}"
    return f"{tensor.nbytes / 1e6:.1f} MB shared, equal sums"


def vllm_gap(setting: Setting) -> str:
    """vLLM and the trainer agree on what was sampled."""
    return _gap(setting, "bfloat16", math.inf, 0.05, name="vllm")


def publish_vllm(setting: Setting) -> str:
    """The weight channel into vLLM."""
    return _publish(setting, "vllm")


def vllm_sleep(setting: Setting) -> str:
    """A sleeping engine gives its memory back, and wakes with the next publish."""
    trainer = setting.engine(optim=None)
    with asyncio.Runner() as runner:
        engine = ENGINES["vllm"](setting.config(name="vllm"), setting.device)
        try:
            _take_over(setting, runner, engine, trainer, 0)
            before, _ = torch.cuda.mem_get_info()
            runner.run(engine.sleep())
            asleep, _ = torch.cuda.mem_get_info()
            assert asleep > before, f"free memory went from {before / GIB:.2f} to {asleep / GIB:.2f} GiB"
            _take_over(setting, runner, engine, trainer, 1)
        finally:
            engine.close()
    return f"{(asleep - before) / GIB:.2f} GiB given back, version 1 generates"
