"""The packed forward pass against transformers' own, and log-probs from chunks against whole logits in float64."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from training_cases import make_model, make_samples, tiny_config
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    Gemma2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    Qwen3Config,
)

from verl.data.batch import pack_batch, scored
from verl.errors import ModelError
from verl.workers.attention import PACKED, Packing
from verl.workers.device import setup_device
from verl.workers.engine import Engine, EngineSpec
from verl.workers.logits import token_statistics
from verl.workers.models import PackedModel, check_packed_model, load_causal_lm, load_tokenizer

SMALL: dict[str, Any] = {
    "vocab_size": 260,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.1,
}
ARCHITECTURES: dict[str, PreTrainedConfig] = {
    "qwen2": tiny_config(initializer_range=0.1),
    "qwen3": Qwen3Config(**SMALL, head_dim=8),
    "llama": LlamaConfig(**SMALL),
    "gpt_neox": GPTNeoXConfig(**{k: v for k, v in SMALL.items() if k != "num_key_value_heads"}),
    "mistral_with_a_window_of_8": MistralConfig(**SMALL, sliding_window=8),
}


def build(config: PreTrainedConfig, attention: str = PACKED) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=torch.float32)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_packed_log_probs_equal_the_models_own(name: str) -> None:
    """Each sequence alone through the architecture's eager attention is the oracle."""
    samples = make_samples(5)
    batch = pack_batch([scored(sample) for sample in samples])
    model = build(ARCHITECTURES[name])
    check_packed_model(model)
    packing = Packing.of(batch.lengths, torch.device("cpu"))
    with torch.no_grad():
        got, _ = PackedModel(model, value_head=False)(
            batch.token_ids, batch.position_ids, packing, batch.predictors, batch.targets, 1.0
        )
        plain = build(ARCHITECTURES[name], "eager")
        wanted = []
        for sample in samples:
            logprobs = plain(input_ids=torch.tensor([sample.token_ids])).logits[0].log_softmax(-1)
            wanted += [logprobs[i - 1, sample.token_ids[i]] for i, m in enumerate(sample.loss_mask) if m]
    assert torch.allclose(got, torch.stack(wanted), atol=2e-5)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (Gemma2Config(**SMALL, head_dim=8), "softcap"),
        (CohereConfig(**SMALL, logit_scale=0.5), "differ by"),
    ],
)
def test_architectures_that_packing_cannot_reproduce_are_refused(config: PreTrainedConfig, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        check_packed_model(build(config))


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("chunk", [1, 3 * 11, 10**6])
def test_token_statistics_and_their_gradients(temperature: float, softcap: float | None, chunk: int) -> None:
    torch.manual_seed(1)
    hidden, weight, bias = torch.randn(7, 5), torch.randn(11, 5), torch.randn(11)
    targets = torch.randint(0, 11, (7,))
    up_logprob, up_entropy = torch.randn(7), torch.randn(7)
    inputs = [tensor.clone().requires_grad_() for tensor in (hidden, weight, bias)]
    logprobs, entropies = token_statistics(
        inputs[0], inputs[1], targets, temperature, inputs[2], softcap, chunk_elements=chunk
    )
    ((logprobs * up_logprob).sum() + (entropies * up_entropy).sum()).backward()

    doubles = [tensor.double().requires_grad_() for tensor in (hidden, weight, bias)]
    logits = doubles[0] @ doubles[1].T + doubles[2]
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    table = (logits / temperature).log_softmax(-1)
    own_logprobs, own_entropies = table[torch.arange(7), targets], -(table.exp() * table).sum(-1)
    ((own_logprobs * up_logprob).sum() + (own_entropies * up_entropy).sum()).backward()

    assert torch.allclose(logprobs.double(), own_logprobs, atol=1e-5)
    assert torch.allclose(entropies.double(), own_entropies, atol=1e-5)
    for mine, oracle in zip(inputs, doubles, strict=True):
        assert mine.grad is not None and oracle.grad is not None
        assert torch.allclose(mine.grad.double(), oracle.grad, atol=2e-5)


def test_log_prob_gradient_alone() -> None:
    """The path without an entropy term."""
    torch.manual_seed(1)
    hidden, weight, targets = torch.randn(4, 5, requires_grad=True), torch.randn(9, 5), torch.tensor([1, 2, 3, 8])
    token_statistics(hidden, weight, targets)[0].sum().backward()
    copy = hidden.detach().clone().requires_grad_()
    (copy @ weight.T).log_softmax(-1)[torch.arange(4), targets].sum().backward()
    assert hidden.grad is not None and copy.grad is not None
    assert torch.allclose(hidden.grad, copy.grad, atol=1e-6)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradient_checkpointing_changes_memory_not_gradients(folder: Path, checkpointing: bool) -> None:
    batch = pack_batch([scored(sample) for sample in make_samples(3)])
    norms = []
    for flag in (False, checkpointing):
        engine = Engine(
            EngineSpec(model_path=str(folder), seed=0, optim=_optim(), gradient_checkpointing=flag), setup_device()
        )
        engine.train_mode()
        engine.backward(engine.forward(batch)[0].sum(), last=True)
        norms.append(torch.cat([p.grad.flatten() for p in engine.module.parameters() if p.grad is not None]))
    assert torch.allclose(norms[0], norms[1], atol=1e-5)


def test_value_is_read_where_the_token_is_predicted(folder: Path) -> None:
    """Changing the token itself, or any later one, cannot change the value before it."""
    engine = Engine(EngineSpec(model_path=str(folder), seed=0, value_head=True), setup_device())
    assert engine.module.value_head is not None
    torch.nn.init.normal_(engine.module.value_head.weight)
    ids, mask = [5, 6, 7, 8], (False, False, True, True)
    first = _values(engine, ids, mask)
    assert _values(engine, [5, 6, 99, 8], mask)[0] == first[0]
    assert _values(engine, [5, 6, 99, 8], mask)[1] != first[1]
    assert _values(engine, [5, 77, 7, 8], mask)[0] != first[0]


def _values(engine: Engine, ids: list[int], mask: tuple[bool, ...]) -> list[float]:
    from verl.data.batch import Scored

    values: list[float] = engine.score(pack_batch([Scored(ids, mask, {})]))[0].tolist()
    return values


def test_a_new_critic_says_zero(folder: Path) -> None:
    engine = Engine(EngineSpec(model_path=str(folder), seed=0, value_head=True), setup_device())
    values, _ = engine.score(pack_batch([scored(sample) for sample in make_samples(2)]))
    assert values.abs().max() == 0.0


def test_bfloat16_compute_stays_close_and_keeps_float32_weights(folder: Path) -> None:
    batch = pack_batch([scored(sample) for sample in make_samples(3)])
    full = Engine(EngineSpec(model_path=str(folder), seed=0), setup_device())
    half = Engine(EngineSpec(model_path=str(folder), seed=0, dtype="bfloat16", optim=_optim()), setup_device())
    assert torch.allclose(half.score(batch)[0], full.score(batch)[0], atol=0.15)
    half.train_mode()
    half.backward(half.forward(batch)[0].sum(), last=True)
    assert {p.dtype for p in half.module.parameters()} == {torch.float32}
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in half.module.parameters())


def _optim() -> Any:
    from verl.workers.optim import OptimSpec

    return OptimSpec(lr=1e-3, total_steps=10)


def test_model_folders_that_cannot_be_used_are_named(tmp_path: Path, folder: Path) -> None:
    options: dict[str, Any] = {"attention": PACKED, "trust_remote_code": False, "seed": 0}
    with pytest.raises(ModelError, match="does not exist"):
        load_causal_lm(str(tmp_path / "nothing"), **options)
    with pytest.raises(ModelError, match=r"no config\.json"):
        load_causal_lm(str(tmp_path), **options)
    pickled = make_model(tmp_path / "pickled", weights=False)
    (pickled / "pytorch_model.bin").write_bytes(b"pickle")
    with pytest.raises(ModelError, match=r"pytorch_model\.bin only.*safetensors"):
        load_causal_lm(str(pickled), **options)
    empty = make_model(tmp_path / "empty", weights=False)
    with pytest.raises(ModelError, match="empty holds no weights"):
        load_causal_lm(str(empty), attention=PACKED, trust_remote_code=False)
    cut = make_model(tmp_path / "cut", weights=False)
    (cut / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:-64])
    with pytest.raises(ModelError, match=r"cannot load a causal LM from .*cut: .* cut short .*copy them again"):
        load_causal_lm(str(cut), **options)
    deeper = make_model(tmp_path / "deeper", weights=False, num_hidden_layers=3)
    (deeper / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    with pytest.raises(ModelError, match="weights of its architecture are missing"):
        load_causal_lm(str(deeper), **options)
    (deeper / "tokenizer.json").unlink()
    (deeper / "tokenizer_config.json").unlink()
    with pytest.raises(ModelError, match="no usable tokenizer"):
        load_tokenizer(str(deeper))


def test_a_config_that_does_not_fit_the_weights_is_named_with_both_shapes(
    tmp_path: Path, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    wider = make_model(tmp_path / "wider", weights=False, vocab_size=999)
    (wider / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    with pytest.raises(ModelError, match=r"wider: .*embed_tokens.* is \[\d+, \d+\] in the files and \[999, \d+\]"):
        load_causal_lm(str(wider), attention=PACKED, trust_remote_code=False)
    assert "MISMATCH" not in capfd.readouterr().err
    config = json.loads((wider / "config.json").read_text())
    (wider / "config.json").write_text(json.dumps(config | {"hidden_size": "wide"}))
    for load in (partial(load_causal_lm, attention=PACKED, trust_remote_code=False), load_tokenizer):
        with pytest.raises(ModelError, match=r"wider.*hidden_size"):
            load(str(wider))
    (wider / "config.json").write_text(json.dumps(config))
    (wider / "tokenizer.json").write_text('{"version"')
    with pytest.raises(ModelError, match="wider has no usable tokenizer"):
        load_tokenizer(str(wider))


def test_a_folder_without_weights_is_initialised_from_the_seed(tmp_path: Path) -> None:
    folder = make_model(tmp_path, weights=False)
    first, same, other = (
        load_causal_lm(str(folder), attention=PACKED, trust_remote_code=False, seed=seed).state_dict()
        for seed in (1, 1, 2)
    )
    name = "model.layers.0.self_attn.q_proj.weight"
    assert torch.equal(first[name], same[name])
    assert not torch.equal(first[name], other[name])
