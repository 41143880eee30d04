"""Texts to vectors: against a float64 reference, for every pooling, prefix and source of configuration."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_encoders import WORDS, reference, sentence_transformer, token_ids, write_encoder

from retrieval_server.backends.encoder import Encoder, load_encoder
from retrieval_server.backends.encodings import FAMILIES, Declared, Encoding, combine, family_of
from retrieval_server.backends.model_folder import fingerprint, local_folder, read_sentence_transformer
from retrieval_server.backends.torch_models import pick_dtype
from retrieval_server.errors import SettingsError

CPU = torch.device("cpu")
TEXTS = ["who is ada tron ?", "the river sand", "rome", "w1 w2 w3 w4 w5 w6 w7 w8 w9 w10 w11 w12", "is it unknownword"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_encoder(tmp_path_factory.mktemp("encoder") / "plain")


def load(folder: Path, encoding: Encoding = FAMILIES["plain"], dtype: str = "float32", batch_size: int = 4) -> Encoder:
    said = read_sentence_transformer(folder)
    return load_encoder(folder, encoding, said.projections, CPU, pick_dtype(dtype, CPU), batch_size)


@pytest.mark.parametrize("pooling", ["mean", "cls", "pooler"])
@pytest.mark.parametrize("normalize", [True, False])
def test_vectors_are_those_of_the_reference(folder: Path, pooling: str, normalize: bool) -> None:
    encoder = load(folder, Encoding(pooling, normalize))  # type: ignore[arg-type]
    expected = np.stack([reference(folder, token_ids(text), pooling, normalize) for text in TEXTS])
    for found in (encoder.encode_queries(TEXTS, 64), encoder.encode_passages(TEXTS, 64)):
        assert found.dtype == np.float32 and found.shape == (len(TEXTS), 32)
        np.testing.assert_allclose(found, expected, atol=1e-5)


def test_prefixes_are_encoded_with_the_text(folder: Path) -> None:
    encoder = load(folder, FAMILIES["e5"])
    query, passage = encoder.encode_queries(["rome"], 64)[0], encoder.encode_passages(["rome"], 64)[0]
    np.testing.assert_allclose(query, reference(folder, token_ids("query: rome")), atol=1e-5)
    np.testing.assert_allclose(passage, reference(folder, token_ids("passage: rome")), atol=1e-5)
    assert np.abs(query - passage).max() > 0.01


def test_a_long_query_keeps_prefix_and_question_a_long_passage_its_beginning(folder: Path) -> None:
    encoder = load(folder, FAMILIES["e5"])
    words = WORDS[44:94]
    text = " ".join(words)
    query, passage = encoder.encode_queries([text], 16)[0], encoder.encode_passages([text], 16)[0]
    # 16 tokens: [CLS], the prefix's two, 12 words, [SEP]
    np.testing.assert_allclose(query, reference(folder, token_ids("query: " + " ".join(words[-12:]))), atol=1e-5)
    np.testing.assert_allclose(passage, reference(folder, token_ids("passage: " + " ".join(words[:12]))), atol=1e-5)


def test_a_length_beyond_the_model_is_cut_to_its_positions(folder: Path) -> None:
    encoder = load(folder)
    assert encoder.max_length == 64
    words = (WORDS[44:] * 3)[:150]
    found = encoder.encode_queries([" ".join(words)], 512)[0]
    np.testing.assert_allclose(found, reference(folder, token_ids(" ".join(words[-62:]))), atol=1e-5)


def test_a_huge_query_is_cut_before_it_is_tokenized(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = load(folder)
    seen: list[int] = []
    whole = Encoder._whole
    monkeypatch.setattr(Encoder, "_whole", lambda self, texts: seen.append(len(texts[0])) or whole(self, texts))
    found = encoder.encode_queries(["rome " * 200_000 + " ".join(WORDS[44:94])], 32)[0]
    assert max(seen) < 10_000
    np.testing.assert_allclose(found, reference(folder, token_ids(" ".join(WORDS[64:94]))), atol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_vector_does_not_depend_on_its_company(folder: Path, dtype: str) -> None:
    rng = np.random.default_rng(0)
    texts = [" ".join(rng.choice(WORDS[:70], rng.integers(1, 40))) for _ in range(60)]
    encoder = load(folder, FAMILIES["e5"], dtype, batch_size=16)
    together = encoder.encode_queries(texts, 48)
    alone = np.concatenate([encoder.encode_queries([text], 48) for text in texts])
    assert np.array_equal(together, alone)
    shuffled = rng.permutation(60)
    assert np.array_equal(encoder.encode_queries([texts[i] for i in shuffled], 48), together[shuffled])
    assert encoder.batch_deviation(48) == 0.0


def test_a_forward_pass_holds_no_more_than_the_budget(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("retrieval_server.backends.torch_models.tokens_per_pass", lambda device: 100)
    encoder = load(folder, batch_size=8)
    shapes: list[tuple[int, int]] = []
    forward = Encoder._forward
    monkeypatch.setattr(
        Encoder, "_forward", lambda self, ids, length: shapes.append((len(ids), length)) or forward(self, ids, length)
    )
    texts = ["w1"] * 20 + [" ".join(WORDS[:30])] * 7
    encoder.encode_passages(texts, 64)
    assert sorted(shapes) == [(1, 32), (3, 32), (3, 32), (4, 8), (8, 8), (8, 8)]
    assert shapes[0][1] == 32  # the longest first


def test_bfloat16_stays_close(folder: Path) -> None:
    exact, rounded = (load(folder, dtype=dtype).encode_queries(TEXTS, 64) for dtype in ("float32", "bfloat16"))
    assert 0 < np.abs(exact - rounded).max() < 0.05


def test_families_and_declarations() -> None:
    assert family_of("e5") == family_of(None, "intfloat/e5-base-v2") == family_of("topiocqa-E5") == "e5"
    assert family_of("mine", "/models/bge-large") == "bge"
    assert family_of("mine", None, "/models/other") == "plain"
    assert FAMILIES["dpr"].normalize is False
    said = Declared("cls", False, None, "doc: ")
    assert combine("e5", [Declared(), said]) == Encoding("cls", False, "query: ", "doc: ")
    assert combine("e5", [Declared(pooling="pooler", query_prefix=""), said]) == Encoding("pooler", False, "", "doc: ")


def test_a_sentence_transformers_folder_is_read(tmp_path: Path) -> None:
    prompts = {"query": "who ", "document": "", "unrelated": "x"}
    folder = write_encoder(tmp_path, sentence_bert_config={"max_seq_length": 24},
                           **sentence_transformer("cls_token", prompts=prompts))  # fmt: skip
    said = read_sentence_transformer(folder)
    assert said.declared == Declared("cls", True, "who ", None)
    assert (said.max_length, said.projections) == (24, ())
    newer = write_encoder(tmp_path, **{"1_Pooling__config": {"pooling_mode": "mean"}})
    assert read_sentence_transformer(newer).declared.pooling == "mean"
    assert read_sentence_transformer(write_encoder(tmp_path / "plain")).declared == Declared()


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (sentence_transformer("max_tokens"), r"asks for pooling \['max'\]; supported: mean, cls, pooler"),
        ({**sentence_transformer(), "1_Pooling__config": {"pooling_mode_cls_token": True, "include_prompt": False}},
         "include_prompt"),
        ({"modules": [{"type": "a.Transformer", "path": ""}, {"type": "a.WordWeights", "path": "1"}]}, "WordWeights"),
        ({"modules": {"not": "a list"}}, "cannot be read as a list of modules"),
        ({**sentence_transformer(), "1_Pooling__config": []}, "holds a JSON list"),
    ],
)  # fmt: skip
def test_a_pipeline_that_is_not_supported_is_refused(tmp_path: Path, files: dict[str, object], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        read_sentence_transformer(write_encoder(tmp_path, **files))


def test_a_linear_layer_after_the_pooling_is_applied(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    files = sentence_transformer()
    files["modules"].insert(2, {"idx": 2, "name": "2", "path": "2_Dense", "type": "sentence_transformers.models.Dense"})
    activation = "torch.nn.modules.activation.Tanh"
    files["2_Dense__config"] = {"in_features": 32, "out_features": 12, "bias": True, "activation_function": activation}
    folder = write_encoder(tmp_path, **files)
    weight, bias = torch.randn(12, 32), torch.randn(12)
    save_file({"linear.weight": weight, "linear.bias": bias}, folder / "2_Dense" / "model.safetensors")
    encoder = load(folder)
    assert encoder.dim == 12
    pooled = reference(folder, token_ids("rome"), normalize=False)
    expected = np.tanh(weight.double().numpy() @ pooled + bias.double().numpy())
    expected /= np.linalg.norm(expected)
    np.testing.assert_allclose(encoder.encode_queries(["rome"], 64)[0], expected, atol=1e-5)


def test_the_fingerprint_is_of_the_content(folder: Path, tmp_path: Path) -> None:
    first = fingerprint(folder)
    copy = shutil.copytree(folder, tmp_path / "copy")
    (copy / "README.md").write_text("about", encoding="utf-8")
    config = json.loads((copy / "config.json").read_text(encoding="utf-8"))
    (copy / "config.json").write_text(json.dumps({**config, "transformers_version": "9"}), encoding="utf-8")
    assert fingerprint(copy) == first
    (copy / "config.json").write_text(json.dumps({**config, "hidden_act": "relu"}), encoding="utf-8")
    assert fingerprint(copy) != first
    shutil.copy(folder / "config.json", copy / "config.json")
    assert fingerprint(copy) == first
    weights = copy / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    assert fingerprint(copy) != first
    assert fingerprint(write_encoder(tmp_path / "other", seed=1)) != first


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: (f / "config.json").unlink(), "config.json cannot be read"),
        (lambda f: (f / "config.json").write_text("{"), "is not JSON"),
        (lambda f: (f / "model.safetensors").unlink(), "no .*safetensors"),
    ],
)
def test_an_incomplete_model_has_no_fingerprint(folder: Path, tmp_path: Path, damage: object, message: str) -> None:
    copy = shutil.copytree(folder, tmp_path / "copy")
    damage(copy)  # type: ignore[operator]
    with pytest.raises(SettingsError, match=message):
        fingerprint(copy)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: (f / "model.safetensors").write_bytes(b"damaged"), "cannot be loaded"),
        (lambda f: (f / "config.json").write_text('{"model_type": "nonsense"}'), "cannot be loaded"),
        (lambda f: _without(f / "model.safetensors", "encoder.layer.1.output.dense.weight"), "lack 1 tensors"),
    ],
)
def test_a_damaged_model_is_refused_in_one_line(folder: Path, tmp_path: Path, damage: object, message: str) -> None:
    copy = shutil.copytree(folder, tmp_path / "copy")
    damage(copy)  # type: ignore[operator]
    logging.getLogger("transformers").setLevel(logging.ERROR)
    with pytest.raises(SettingsError, match=message) as caught:
        load(copy)
    assert "\n" not in str(caught.value)


def _without(path: Path, name: str) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(path)
    del tensors[name]
    save_file(tensors, path, {"format": "pt"})


def test_a_folder_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SettingsError, match="/no/such/model: no such folder"):
        local_folder("/no/such/model")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(SettingsError, match=r"encoder nobody/nothing is neither a folder nor .* download it"):
        local_folder("nobody/nothing")


def test_an_output_that_is_not_finite_is_an_error(folder: Path) -> None:
    encoder = load(folder)
    with torch.no_grad():
        encoder._model.embeddings.word_embeddings.weight[token_ids("rome")[1]] = float("nan")
    with pytest.raises(FloatingPointError, match="not finite"):
        encoder.encode_queries(["rome"], 64)
