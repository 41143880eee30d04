"""The cross-encoder: against plain transformers pair by pair, truncation, saved layouts, and what it refuses."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_cross_encoder import random_model, save, tokenizer
from transformers import AutoTokenizer, BertForMaskedLM, RobertaConfig, RobertaForSequenceClassification

from retrieval_server.backends.cross_encoder import CrossEncoder, PairEncoder, load_cross_encoder
from retrieval_server.errors import SettingsError
from retrieval_server.specs import RerankSpec

PAIRS = [
    ("lake fish", '(Title: "lake") boat river town'),
    ("a b c", "x"),
    ("lake fish", "x"),
    ("festival", " ".join("abcdefghij")),
    ("", "town"),
    ("unknownword", "boat"),
]


def load(folder: Path | str, **options: Any) -> CrossEncoder:
    return load_cross_encoder(RerankSpec(model_path=str(folder), **{"dtype": "float32", "max_length": 64, **options}))[
        0
    ]


def reference(folder: Path | str, query: str, passage: str) -> list[float]:
    """The logits of one pair as plain transformers computes them, without a batch."""
    model = random_model().from_pretrained(folder).eval()
    inputs = AutoTokenizer.from_pretrained(folder)(query, passage, return_tensors="pt")
    with torch.no_grad():
        return [float(logit) for logit in model(**inputs).logits[0]]


@pytest.mark.parametrize("batch_size", [1, 4, 32])
def test_logits_are_those_of_plain_transformers_whatever_the_batch(tmp_path: Path, batch_size: int) -> None:
    folder = save(tmp_path, random_model())
    expected = [reference(folder, *pair)[0] for pair in PAIRS]
    assert max(expected) - min(expected) > 0.1  # a model that told nothing apart would prove nothing
    assert load(folder, batch_size=batch_size).logits(PAIRS) == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 2e-6), ("bfloat16", 5e-3)])
def test_a_pair_has_the_same_logit_alone_and_in_any_company(tmp_path: Path, dtype: str, tolerance: float) -> None:
    model = load(save(tmp_path, random_model()), dtype=dtype, device="cpu")
    pairs = [(query, passage) for query, _ in PAIRS for _, passage in PAIRS] * 2
    alone = [model.logits([pair])[0] for pair in pairs]
    assert model.logits(pairs) == pytest.approx(alone, abs=tolerance)


def test_two_logits_become_their_difference(tmp_path: Path) -> None:
    folder = save(tmp_path, random_model(n_labels=2))
    expected = [yes - no for no, yes in (reference(folder, *pair) for pair in PAIRS)]
    assert load(folder).logits(PAIRS) == pytest.approx(expected, abs=1e-5)


def test_a_model_with_known_weights_gives_the_known_score(tmp_path: Path) -> None:
    """Attention and feed-forward are zeroed, so the logit depends on the first token alone: always [CLS]."""
    model = random_model()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.zero_()
            if name == "bert.pooler.dense.bias":
                weight.fill_(0.5)
            if name == "classifier.weight":
                weight.fill_(0.25)
            if name == "classifier.bias":
                weight.fill_(-1.0)
    [logit] = load(save(tmp_path, model)).logits([("lake", "boat")])
    assert logit == pytest.approx(16 * 0.25 * math.tanh(0.5) - 1, abs=1e-6)


def encoder(max_length: int) -> PairEncoder:
    return PairEncoder(tokenizer(), max_length)


def words(pair: Any) -> list[str]:
    return tokenizer().convert_ids_to_tokens(pair.ids)  # type: ignore[no-any-return]


def test_tokens_and_segments_are_those_of_the_tokenizer() -> None:
    plain = tokenizer()
    for pair, encoded in zip(PAIRS, encoder(64).encode(PAIRS), strict=True):
        expected = plain(*pair)
        assert (encoded.ids, encoded.segments) == (expected["input_ids"], expected["token_type_ids"])


@pytest.mark.parametrize(
    ("query", "passage", "kept"),
    [  # ten tokens of room for the two texts
        ("a b c d e f", "u v w x", "[CLS] a b c d e f [SEP] u v w x [SEP]"),
        ("a b c d e f g", "u v w x", "[CLS] b c d e f g [SEP] u v w x [SEP]"),
        ("a b c d e f g h", "p q r s t u v w", "[CLS] d e f g h [SEP] p q r s t [SEP]"),
        ("a b", "m n o p q r s t u v", "[CLS] a b [SEP] m n o p q r s t [SEP]"),
        ("a b c d e f g h i j k l m", "", "[CLS] d e f g h i j k l m [SEP] [SEP]"),
    ],
)
def test_a_long_query_loses_its_beginning_and_a_long_passage_its_end(query: str, passage: str, kept: str) -> None:
    [encoded] = encoder(13).encode([(query, passage)])
    assert words(encoded) == kept.split()
    assert len(encoded.segments) == len(encoded.ids) <= 13


def test_a_query_of_100_kb_is_scored_by_its_end(tmp_path: Path) -> None:
    model = load(save(tmp_path, random_model()))
    long = "a b c " * 20_000 + "lake fish"
    short = " ".join(long.split()[-30:])
    passage = " ".join("abcdefghijklmnopqrstuvwxyz" * 2)
    assert model.logits([(long, passage)]) == pytest.approx(model.logits([(short, passage)]), abs=1e-6)


def test_max_length_is_cut_to_the_positions_of_the_model(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    model = load(save(tmp_path, random_model()), max_length=512)
    assert len(model.logits([("a " * 500, "b " * 500)])) == 1  # 64 positions: more would be an index error
    assert "max_length 512 is more than the cross-encoder has: 64 is used" in caplog.text


def test_roberta_counts_positions_after_its_padding_and_has_no_segments(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = RobertaConfig(
        vocab_size=64, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
        max_position_embeddings=34, pad_token_id=1, num_labels=1, type_vocab_size=1,
    )  # fmt: skip
    save(tmp_path, RobertaForSequenceClassification(config))
    settings = tmp_path / "tokenizer_config.json"
    without_segments = {**json.loads(settings.read_text()), "model_input_names": ["input_ids", "attention_mask"]}
    settings.write_text(json.dumps(without_segments))
    assert len(load(tmp_path, max_length=512).logits([("a " * 50, "b " * 50), ("a", "b")])) == 2


SIGMOID, IDENTITY = "torch.nn.modules.activation.Sigmoid", "torch.nn.modules.linear.Identity"


@pytest.mark.parametrize(
    ("file", "entry", "expected"),
    [
        ("config.json", {}, 1 / (1 + math.exp(-2))),
        ("config.json", {"sentence_transformers": {"activation_fn": IDENTITY}}, 2.0),
        ("config.json", {"sbert_ce_default_activation_function": IDENTITY}, 2.0),
        ("config_sentence_transformers.json", {"activation_fn": IDENTITY, "prompts": {}}, 2.0),
        ("config_sentence_transformers.json", {"activation_fn": SIGMOID}, 1 / (1 + math.exp(-2))),
    ],
)
def test_the_saved_activation_makes_the_score(
    tmp_path: Path, file: str, entry: dict[str, Any], expected: float
) -> None:
    save(tmp_path, random_model())
    path = tmp_path / file
    content = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**content, **entry}))
    _, activation = load_cross_encoder(RerankSpec(model_path=str(tmp_path), dtype="float32"))
    assert activation(2.0) == pytest.approx(expected)
    assert 0 <= activation(-1000.0) + 1000 <= 1001  # no overflow far away


def test_a_transformer_in_a_folder_of_its_own_is_found(tmp_path: Path) -> None:
    save(tmp_path / "0_Transformer", random_model())
    (tmp_path / "modules.json").write_text(json.dumps([{"idx": 0, "path": "0_Transformer", "type": "x.Transformer"}]))
    assert len(load(tmp_path).logits(PAIRS)) == len(PAIRS)


def refusal(folder: Path | str, **options: Any) -> str:
    with pytest.raises(SettingsError) as error:
        load(folder, **options)
    return str(error.value)


def test_what_is_no_cross_encoder_is_refused(tmp_path: Path) -> None:
    save(tmp_path / "mlm", BertForMaskedLM(random_model().config))
    assert "no trained weights for" in refusal(tmp_path / "mlm")
    save(tmp_path / "three", random_model(n_labels=3))
    assert "has 3 labels" in refusal(tmp_path / "three")
    good = tmp_path / "good"
    save(good, random_model())
    (good / "modules.json").write_text(
        json.dumps([{"path": "", "type": "a.Transformer"}, {"path": "1", "type": "b.X"}])
    )
    assert "is made of Transformer, X" in refusal(good)
    (good / "modules.json").write_text("{")
    assert "modules.json cannot be read" in refusal(good)
    (good / "modules.json").unlink()
    (good / "config_sentence_transformers.json").write_text(json.dumps({"activation_fn": "torch.nn.Tanh"}))
    assert "activation torch.nn.Tanh" in refusal(good)
    (good / "config_sentence_transformers.json").write_text(json.dumps({"default_prompt_name": "query"}))
    assert "expects the prompt 'query'" in refusal(good)


def test_what_cannot_be_loaded_or_computed_is_refused_in_one_line(tmp_path: Path) -> None:
    message = refusal(tmp_path / "absent")
    assert str(tmp_path / "absent") in message
    assert "\n" not in message
    folder = save(tmp_path / "good", random_model())
    assert "float16 on a CPU" in refusal(folder, dtype="float16", device="cpu")
    assert "device 'warp:9' is unknown" in refusal(folder, device="warp:9")
    if not torch.cuda.is_available():
        assert "device 'cuda' is not on this machine" in refusal(folder, device="cuda")
    model = random_model()
    torch.nn.init.constant_(model.classifier.weight, math.nan)
    with pytest.raises(RuntimeError, match="not a number"):
        load(save(tmp_path / "nan", model)).logits(PAIRS)


def test_bfloat16_keeps_the_last_layer_in_float32(tmp_path: Path) -> None:
    folder = save(tmp_path, random_model())
    exact = load(folder).logits(PAIRS)
    rounded = load(folder, dtype="bfloat16", device="cpu").logits(PAIRS)
    assert rounded == pytest.approx(exact, abs=0.3)
    assert rounded != exact
    as_bfloat16 = [float(torch.tensor(logit).bfloat16()) for logit in rounded]
    assert rounded != as_bfloat16
