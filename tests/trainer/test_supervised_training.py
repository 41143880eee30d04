"""Supervised training end to end on a tiny model: learning, loss weights, determinism, resume, command line."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from training_cases import make_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from verl.config import load_sft_config
from verl.trainer import main_sft
from verl.trainer.sft import SftResult, SftTrainer
from verl.workers.device import setup_device


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a configuration and a tokenizer, and no weights."""
    return make_model(tmp_path_factory.mktemp("model"), weights=False)


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copying tasks of different lengths: the model repeats two letters of its prompt."""
    draw = random.Random(0)
    file = tmp_path_factory.mktemp("data") / "rows.jsonl"
    with file.open("w") as out:
        for _ in range(24):
            pair = "".join(draw.choices("abcdef", k=2))
            filler = "x" * draw.randint(1, 12)
            segments = [
                ["prompt", f"{filler}{pair}>"],
                ["model", f"{pair}<|im_end|>"],
                ["env", "..."],
                ["model", "k", 2],
            ]
            out.write(json.dumps({"segments": segments}) + "\n")
    return file


def settings(model: Path, rows: Path, out: Path, *more: str) -> list[str]:
    return [
        f"model.partial_pretrain={model}",
        "model.dtype=float32",
        f"data.train_files={rows}",
        f"data.val_files={rows}",
        "data.train_batch_size=10",
        "trainer.total_training_steps=6",
        "optim.lr=3e-3",
        f"trainer.default_local_dir={out}",
        *more,
    ]


def train(model: Path, rows: Path, out: Path, *more: str) -> tuple[SftResult, list[dict[str, Any]]]:
    trainer = SftTrainer(load_sft_config(overrides=settings(model, rows, out, *more)), setup_device())
    result = trainer.run()
    return result, [json.loads(line) for line in result.metrics.read_text().splitlines()]


def losses(log: list[dict[str, Any]]) -> list[float]:
    return [row["sft/loss"] for row in log if "sft/loss" in row]


@pytest.mark.parametrize("optimiser", ["adamw", "muon"])
def test_loss_falls_and_the_export_is_the_trained_model(
    model: Path, rows: Path, tmp_path: Path, optimiser: str
) -> None:
    result, log = train(model, rows, tmp_path, f"optim.name={optimiser}", "trainer.total_training_steps=30")
    assert [row["step"] for row in log] == list(range(1, 31))
    assert losses(log)[-1] < 0.6 * losses(log)[0]
    assert result.val_loss is not None
    assert result.val_loss == pytest.approx(plain_loss(result.export, rows), rel=1e-4)


def plain_loss(folder: Path, rows: Path) -> float:
    """The weighted held-out loss by plain transformers, row by row."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    total = weight = 0.0
    for line in rows.read_text().splitlines():
        ids: list[int] = []
        weights: list[float] = []
        for origin, text, *given in json.loads(line)["segments"]:
            tokens = tokenizer.encode(text, add_special_tokens=False)
            ids += tokens
            weights += [(given[0] if given else 1.0) if origin == "model" else 0.0] * len(tokens)
        with torch.no_grad():
            table = model(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)
        total -= sum(w * float(table[i - 1, ids[i]]) for i, w in enumerate(weights) if w)
        weight += sum(weights)
    return total / weight


def test_the_loss_does_not_depend_on_micro_batches(model: Path, rows: Path, tmp_path: Path) -> None:
    _, whole = train(model, rows, tmp_path / "a")
    _, small = train(model, rows, tmp_path / "b", "data.max_token_len_per_gpu=40", "data.max_length=40")
    _, single = train(model, rows, tmp_path / "c", "data.use_dynamic_bsz=false", "data.micro_batch_size=1")
    assert losses(small) == pytest.approx(losses(whole), rel=1e-4)
    assert losses(single) == pytest.approx(losses(whole), rel=1e-4)


def test_two_runs_of_one_seed_are_equal_and_other_seeds_differ(model: Path, rows: Path, tmp_path: Path) -> None:
    _, first = train(model, rows, tmp_path / "a")
    _, second = train(model, rows, tmp_path / "b")
    _, other = train(model, rows, tmp_path / "c", "trainer.seed=2")
    assert losses(first) == losses(second)
    assert losses(first) != losses(other)
    same = "model.safetensors"
    assert (tmp_path / "a" / "hf" / same).read_bytes() == (tmp_path / "b" / "hf" / same).read_bytes()


def test_stop_after_repeats_the_start_of_a_recipe(model: Path, rows: Path, tmp_path: Path) -> None:
    _, whole = train(model, rows, tmp_path / "a")
    result, start = train(model, rows, tmp_path / "b", "trainer.stop_after=4")
    assert result.steps == 4
    assert losses(start) == losses(whole)[:4]


@pytest.mark.parametrize("optimiser", ["adamw", "muon"])
def test_resumed_training_equals_uninterrupted(model: Path, rows: Path, tmp_path: Path, optimiser: str) -> None:
    name = f"optim.name={optimiser}"
    _, whole = train(model, rows, tmp_path / "a", "trainer.save_freq=2", name)
    checkpoint = tmp_path / "a" / "global_step_4"
    _, resumed = train(model, rows, tmp_path / "b", f"trainer.resume_path={checkpoint}", name)
    assert losses(resumed) == losses(whole)[4:]
    assert (tmp_path / "a" / "global_step_6" / "state.json").is_file(), "the last step is saved"


def test_command_line(model: Path, rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = settings(
        model, rows, tmp_path, "trainer.total_training_steps=1", "trainer.validate_before_training=true"
    )
    assert main_sft.main(arguments) == 0
    assert capsys.readouterr().out.splitlines()[-1] == str(tmp_path / "hf")
    steps = [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert steps == [0, 1]


def test_mistakes_are_one_clear_message(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main_sft.main(settings(model, tmp_path / "missing.jsonl", tmp_path)) == 2
    assert "missing.jsonl does not exist" in capsys.readouterr().err
    assert main_sft.main(["optim.lrr=1"]) == 2
    assert "optim.lr" in capsys.readouterr().err


def test_check_shows_the_configuration_and_trains_nothing(
    model: Path, rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main_sft.main([*settings(model, rows, tmp_path / "out"), "--check"]) == 0
    assert json.loads(capsys.readouterr().out)["optim"]["lr"] == 0.003
    assert not (tmp_path / "out").exists()


def test_a_file_where_the_run_folder_should_be_is_named(
    model: Path, rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "out").write_text("")
    assert main_sft.main(settings(model, rows, tmp_path / "out")) == 2
    assert (
        f"trainer.default_local_dir={tmp_path / 'out'}: cannot be written (Not a directory)" in capsys.readouterr().err
    )
