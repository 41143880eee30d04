"""The table of ``gpu_check``: (a) torch and transformers alone, (b) vLLM, (c) two devices; and what rows may need."""

from __future__ import annotations

import importlib.util

import torch
from gpu_engine_rows import bf16_parity, cuda_ipc, fp32_parity, publish_hf, publish_vllm, vllm_gap, vllm_sleep
from gpu_setting import Row, Setting
from gpu_training_rows import (
    chunked_head,
    fsdp_step,
    offload,
    packed_flash,
    packed_sdpa,
    ppo_steps,
    throughput,
    two_ranks,
)

from verl.workers.device import flash_attention_available


def _cuda(setting: Setting) -> str | None:
    return None if setting.device.torch_device.type == "cuda" else "a CUDA device"


def _two_devices(setting: Setting) -> str | None:
    enough = not setting.device.is_accelerator or torch.accelerator.device_count() >= 2
    return None if enough else "a second CUDA device"


def _flash(setting: Setting) -> str | None:
    if _cuda(setting):
        return _cuda(setting)
    probe = torch.zeros(1, dtype=torch.bfloat16, device=setting.device.torch_device)
    return None if flash_attention_available(probe) else "the package flash-attn"


def _vllm(setting: Setting) -> str | None:
    return "the package vllm" if importlib.util.find_spec("vllm") is None else None


ROWS = (
    Row("bf16 log-prob parity", bf16_parity),
    Row("fp32 log-prob parity", fp32_parity),
    Row("FSDP2 step", fsdp_step),
    Row("packed forward (SDPA)", packed_sdpa),
    Row("packed forward (flash)", packed_flash, (_flash,)),
    Row("chunked head memory", chunked_head),
    Row("weight publish (hf)", publish_hf),
    Row("CUDA IPC", cuda_ipc, (_cuda,)),
    Row("offload memory", offload),
    Row("20 PPO steps", ppo_steps),
    Row("tokens/s and MFU", throughput),
    Row("vllm log-prob gap", vllm_gap, (_vllm,)),
    Row("weight publish (vllm)", publish_vllm, (_vllm,)),
    Row("vllm sleep and wake", vllm_sleep, (_vllm, _cuda)),
    Row("FSDP2 on two ranks", two_ranks, (_two_devices,)),
)
"""In the order in which they run: a machine that runs out of time has the important ones."""
