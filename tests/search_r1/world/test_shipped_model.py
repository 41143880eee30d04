"""The model in ``assets/tiny`` is the one its card describes, and its recipe makes it."""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from search_r1.templates import compact
from search_r1.world import build_rows
from search_r1.world.demonstrations import chat
from search_r1.world.tokenizer import train_tokenizer

ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT / "assets" / "tiny"


@pytest.fixture(scope="module")
def loaded():
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    model = transformers.AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32)
    return model.eval(), transformers.AutoTokenizer.from_pretrained(FOLDER)


def test_the_folder_is_small_and_bfloat16(loaded):
    model, tokenizer = loaded
    assert (FOLDER / "model.safetensors").stat().st_size < 3_000_000
    assert json.loads((FOLDER / "config.json").read_text())["dtype"] == "bfloat16"
    assert model.config.vocab_size == len(tokenizer)
    assert 900_000 < model.num_parameters() < 1_000_000


def test_the_tokenizer_is_the_one_the_recipe_trains():
    assert json.loads((FOLDER / "tokenizer.json").read_text()) == json.loads(train_tokenizer(1024, 0).to_str())


def _continued(loaded, text, n_tokens):
    import torch

    model, tokenizer = loaded
    stops = [tokenizer.convert_tokens_to_ids(tag) for tag in ("</search>", "</answer>")]
    ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")
    with torch.no_grad():
        out = model.generate(**ids, max_new_tokens=n_tokens, do_sample=False, eos_token_id=stops)
    return tokenizer.decode(out[0, ids["input_ids"].shape[1] :])


def test_it_searches_the_users_words_but_can_rewrite(loaded):
    rows = [row for row in build_rows("dev") if row["kind"] != "first"][:12]
    rewritten = 0
    for row in rows:
        prompt = chat(compact(row["history"], row["question"]))
        assert _continued(loaded, prompt, 48).endswith(f"<search> {row['question']} </search>")
        rewritten += _continued(loaded, prompt + "<think> It", 48).endswith(f"<search> {row['rewrite']} </search>")
    assert rewritten >= 10


@pytest.fixture(scope="module")
def recipe():
    sys.path.insert(0, str(ROOT / "scripts"))
    import build_tiny_model

    return build_tiny_model


def test_the_card_has_the_hashes_of_the_files_and_of_the_recipe(recipe):
    record = json.loads((FOLDER / recipe.RECORD).read_text())
    for name in recipe.SHIPPED_FILES:
        assert record["files"][name] == hashlib.sha256((FOLDER / name).read_bytes()).hexdigest(), name
    assert record["recipe_sha256"] == recipe.recipe_sha256(record["recipe"]["seed"])


def test_the_first_steps_of_the_recipe_repeat(recipe, tmp_path):
    lines = map(json.loads, (FOLDER / recipe.TRAINING_LOG).read_text().splitlines())
    stage = recipe.RECIPE[0]
    logged = [row["loss"] for row in lines if row["stage"] == stage.name][: recipe.REPEATED_STEPS]
    recipe.write_start(tmp_path / "start", seed=0)
    recipe.train(stage, tmp_path / "start", tmp_path, seed=0, stop_after=recipe.REPEATED_STEPS)
    rows = map(json.loads, (tmp_path / stage.name / "metrics.jsonl").read_text().splitlines())
    assert [row["sft/loss"] for row in rows] == pytest.approx(logged, abs=1e-3)


def _greedy_f1(model, folder):
    """F1 on the dev split, through the evaluation that users run."""
    dev = "data.val_files=${job.cache_dir}/world-${job.world_seed}/dev.jsonl"
    arguments = ["eval", "--config-name", "tiny_ppo", f"model.path={model}", dev, f"job.cache_dir={folder / 'cache'}"]
    command = [
        sys.executable,
        str(ROOT / "scripts" / "job.py"),
        *arguments,
        f"trainer.default_local_dir={folder / 'run'}",
    ]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr[-2000:]
    summary = json.loads(Path(done.stdout.splitlines()[-1]).read_text())
    return (summary["after"] or summary["before"])["f1"]


@pytest.mark.slow
def test_the_recipe_rebuilds_a_model_as_good(recipe, tmp_path):
    recipe.build(tmp_path / "model", tmp_path / "work", seed=0)
    rebuilt, shipped = (
        _greedy_f1(model, tmp_path / name) for model, name in ((tmp_path / "model", "a"), (FOLDER, "b"))
    )
    assert rebuilt == pytest.approx(shipped, abs=0.05)
