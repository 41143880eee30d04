"""The model in ``assets/tiny`` is the one its card describes."""

import json
from pathlib import Path

import pytest

from search_r1.prompts import compact
from search_r1.world import build_rows
from search_r1.world.demonstrations import chat
from search_r1.world.tokenizer import train_tokenizer

FOLDER = Path(__file__).resolve().parents[3] / "assets" / "tiny"


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
