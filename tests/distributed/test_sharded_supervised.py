"""Supervised training on two ranks is the same training, with either optimiser."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from ranks import run_ranks
from training_cases import make_model

from verl.config import load_sft_config
from verl.trainer.sft import SftTrainer
from verl.workers.device import setup_device

OPTIMISERS = ("adamw", "muon")


def train(model: Path, rows: Path, out: Path) -> dict[str, list[float]]:
    found = {}
    for name in OPTIMISERS:
        config = load_sft_config(
            overrides=[
                f"model.partial_pretrain={model}",
                "model.dtype=float32",
                f"data.train_files={rows}",
                f"data.val_files={rows}",
                "data.train_batch_size=7",
                "data.max_length=40",
                "data.max_token_len_per_gpu=40",
                f"optim.name={name}",
                "optim.lr=3e-3",
                "trainer.total_training_steps=4",
                f"trainer.default_local_dir={out / name}",
            ]
        )
        result = SftTrainer(config, setup_device(1)).run()
        log = [json.loads(line) for line in result.metrics.read_text().splitlines()]
        found[name] = [row["sft/loss"] for row in log] + [row["sft/grad_norm"] for row in log]
        assert result.val_loss is not None
        found[name].append(result.val_loss)
    return found


def test_two_ranks_equal_one(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", weights=False)
    rows = tmp_path / "rows.jsonl"
    with rows.open("w") as file:
        for index in range(15):
            segments = [["prompt", "x" * (index + 1)], ["model", "abcdefghij"[: 1 + index % 9], 1 + index % 2]]
            file.write(json.dumps({"segments": segments}) + "\n")
    one = train(model, rows, tmp_path / "one")
    for view in run_ranks(2, train, tmp_path / "ranks", model, rows, tmp_path / "two"):
        assert view["adamw"] == pytest.approx(one["adamw"], rel=1e-4)
        assert view["muon"] == pytest.approx(one["muon"], rel=1e-3)
