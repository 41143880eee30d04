"""A random very small model, and runs of the real program on it, in this process or as a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from run_records import toy_run

HERE = Path(__file__).resolve().parent


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen2 of two layers with a tokenizer of 64 single characters."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    folder = tmp_path_factory.mktemp("model")
    vocabulary = {"<pad>": 0, "<eos>": 1} | {chr(63 + n): n for n in range(2, 64)}
    raw = Tokenizer(models.BPE(vocabulary, []))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<eos>", pad_token="<pad>")
    fast.save_pretrained(folder)
    config = Qwen2Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        eos_token_id=1,
        bos_token_id=None,
        pad_token_id=0,
    )
    torch.manual_seed(3)
    Qwen2ForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture
def toy_arguments(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Arguments of a run of a few seconds: ``toy.yaml`` on the tiny model, in a fresh folder."""
    monkeypatch.syspath_prepend(str(HERE))
    return [*toy_run(tiny_model), f"trainer.default_local_dir={tmp_path / 'run'}"]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[[list[str]], dict[str, Any]]:
    """Run ``main_ppo`` in this process; return its summary."""

    def call(arguments: list[str]) -> dict[str, Any]:
        from verl.trainer.main_ppo import main

        status = main(arguments)
        captured = capsys.readouterr()
        assert status == 0, captured.err
        summary: dict[str, Any] = json.loads(Path(captured.out.strip().splitlines()[-1]).read_text())
        return summary

    return call


@pytest.fixture(scope="session")
def start() -> Callable[[list[str]], subprocess.Popen[str]]:
    """Start ``main_ppo`` as a process."""

    def call(arguments: list[str]) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "verl.trainer.main_ppo", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=HERE.parents[1],
            env={**os.environ, "PYTHONPATH": os.pathsep.join((str(HERE.parents[1]), str(HERE)))},
        )

    return call
