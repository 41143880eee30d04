"""Sharded training on gloo ranks is the same training: gradients, updates, figures, checkpoints, weights out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from training_cases import make_model, make_samples, run_config

from verl.data.batch import pack_batch, scored
from verl.data.samples import fill
from verl.types import Sample
from verl.workers.critic import CriticWorker
from verl.workers.passes import Limit, UpdatePlan, _mini_batch
from verl.workers.policy import PolicyWorker

#: Every term of the loss, weighed so that a dummy micro-batch that counted would show.
ALL_TERMS = (
    "actor_rollout_ref.actor.use_kl_loss=true",
    "actor_rollout_ref.actor.kl_loss_type=mse",
    "actor_rollout_ref.actor.kl_loss_coef=0.5",
    "actor_rollout_ref.actor.entropy_coeff=0.1",
)
#: Ways to cut the same mini-batch: by sequences, by tokens (many bins), all in one.
LIMITS = (Limit(False, 0, 1), Limit(False, 0, 6), Limit(True, 40, 0), Limit(True, 100_000, 0))
N_SAMPLES = 11
"""Odd, so that ranks get different numbers of sequences and micro-batches."""


def policy(folder: Path, *overrides: str) -> PolicyWorker:
    worker = PolicyWorker(run_config(folder, *ALL_TERMS, *overrides), total_steps=10)
    worker.setup()
    return worker


def full(worker: PolicyWorker | CriticWorker) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in worker.engine.named_full_tensors()}


def gradients(worker: PolicyWorker, samples: list[Sample], limit: Limit) -> dict[str, torch.Tensor]:
    """Accumulate one mini-batch and return the whole gradient of every parameter, without a step."""
    columns = ("old_logprobs", "advantages", "ref_logprobs")
    worker.engine.train_mode()
    _mini_batch(worker.engine, samples, UpdatePlan(len(samples), 1, limit, columns), worker._terms)
    found = {}
    for name, parameter in worker.engine.module.named_parameters():
        grad = parameter.grad
        assert grad is not None, name
        found[name] = (grad.full_tensor() if hasattr(grad, "full_tensor") else grad).clone()
    assert worker.engine.optimizers is not None
    worker.engine.optimizers.zero_grad()
    return found


def train_and_save(model: Path, out: Path) -> dict[str, Any]:
    """Everything that one group of ranks shows; every rank returns its own view."""
    samples = make_samples(N_SAMPLES)
    worker = policy(model)
    shown: dict[str, Any] = {"gradients": [gradients(worker, samples, limit) for limit in LIMITS]}
    shown["log_probs"] = worker.log_probs(samples)
    shown["figures"] = [worker.update(samples) for _ in range(3)]
    shown["weights"] = full(worker)
    shown["low_precision"] = low_precision(model, samples)
    shown["manifest"] = worker.publish(3, str(out / "channel"))
    worker.save(out / "policy")
    worker.export(out / "hf")
    shown["fourth"] = worker.update(samples)
    critic = CriticWorker(run_config(model), total_steps=10)
    critic.setup()
    shown["critic_figures"] = [critic.update(samples) for _ in range(3)]
    shown["values"] = critic.values(samples)
    return shown


def low_precision(model: Path, samples: list[Sample]) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return the weights of a bfloat16 worker before and after it scored samples."""
    worker = policy(model, "actor_rollout_ref.model.dtype=bfloat16")
    before = full(worker)
    worker.log_probs(samples)
    return before, full(worker)


def load_and_continue(model: Path, saved: Path) -> dict[str, Any]:
    worker = policy(model)
    worker.load(saved / "policy")
    return {"weights": full(worker), "fourth": worker.update(make_samples(N_SAMPLES))}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def one(model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    out = tmp_path_factory.mktemp("one")
    return train_and_save(model, out), out


@pytest.fixture(scope="module")
def two(model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, Any]], Path]:
    out = tmp_path_factory.mktemp("two")
    return run_ranks(2, train_and_save, out / "ranks", model, out), out


def relative(got: torch.Tensor, wanted: torch.Tensor) -> float:
    got, wanted = got.detach(), wanted.detach()
    return float((got - wanted).norm() / wanted.norm().clamp(min=1e-12))


def assert_same_weights(got: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], bound: float) -> None:
    assert got.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert relative(got[name], tensor) < bound, name


def test_gradients_do_not_depend_on_ranks_micro_batching_or_packing(one: Any, two: Any) -> None:
    reference = one[0]["gradients"][0]
    for view in (one[0], *two[0]):
        for limit, found in zip(LIMITS, view["gradients"], strict=True):
            assert found.keys() == reference.keys()
            for name, gradient in reference.items():
                assert relative(found[name], gradient) < 1e-5, (limit, name)


def test_weights_agree_after_three_updates(one: Any, two: Any) -> None:
    for view in two[0]:
        assert_same_weights(view["weights"], one[0]["weights"], 1e-5)


def test_figures_are_reduced_over_all_ranks(one: Any, two: Any) -> None:
    for view in two[0]:
        for key in ("figures", "critic_figures"):
            for mine, wanted in zip(view[key], one[0][key], strict=True):
                assert mine.keys() == wanted.keys()
                for name, value in wanted.items():
                    if not name.startswith("memory/"):
                        assert mine[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name


def test_scoring_covers_every_sample_once_in_its_place(one: Any, two: Any) -> None:
    samples = make_samples(N_SAMPLES)
    for key in ("log_probs", "values"):
        alone = fill(samples, "old_logprobs", [one[0][key]])
        together = fill(samples, "old_logprobs", [view[key] for view in two[0]])
        for left, right in zip(alone, together, strict=True):
            assert left.old_logprobs == pytest.approx(right.old_logprobs, abs=2e-4 if key == "values" else 1e-5)
    entropies = {view["log_probs"].metrics["policy/entropy"] for view in two[0]}
    assert len(entropies) == 1
    assert entropies.pop() == pytest.approx(one[0]["log_probs"].metrics["policy/entropy"], rel=1e-6)


def test_checkpoint_of_two_ranks_continues_on_one(model: Path, one: Any, two: Any) -> None:
    restored = load_and_continue(model, two[1])
    assert_same_weights(restored["weights"], two[0][0]["weights"], 1e-7)
    for name in ("policy/loss", "policy/grad_norm", "policy/lr"):
        assert restored["fourth"][name] == pytest.approx(two[0][0]["fourth"][name], rel=1e-4)


def test_checkpoint_of_one_rank_continues_on_three(model: Path, one: Any, tmp_path: Path) -> None:
    for view in run_ranks(3, load_and_continue, tmp_path, model, one[1]):
        assert_same_weights(view["weights"], one[0]["weights"], 1e-7)
        assert view["fourth"]["policy/loss"] == pytest.approx(one[0]["fourth"]["policy/loss"], rel=1e-4)


def test_weights_read_after_a_scoring_pass_are_the_float32_masters(two: Any) -> None:
    for view in two[0]:
        before, after = view["low_precision"]
        assert before.keys() == after.keys()
        for name, tensor in before.items():
            assert tensor.dtype is torch.float32
            assert torch.equal(after[name], tensor), name


def test_published_weights_are_those_of_the_group(two: Any) -> None:
    from safetensors import safe_open

    manifest = two[0][0]["manifest"]
    assert [entry.name for entry in manifest.entries] == list(two[0][0]["weights"])
    assert manifest.version == 3
    assert not two[0][1]["manifest"].entries, "only rank 0 writes"
    for entry in manifest.entries:
        with safe_open(manifest.files[entry.file], framework="pt") as file:
            assert torch.equal(file.get_tensor(entry.name), two[0][0]["weights"][entry.name])


def test_export_of_two_ranks_loads_in_plain_transformers(two: Any) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = two[1] / "hf"
    plain = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.decode(tokenizer.encode("né <|im_end|>")) == "né <|im_end|>"
    state = dict(plain.named_parameters())
    assert_same_weights(state, two[0][0]["weights"], 1e-12)
    sample = make_samples(1)[0]
    batch = pack_batch([scored(sample)])
    with torch.no_grad():
        logits = plain(input_ids=batch.token_ids[None]).logits[0].log_softmax(-1)
    assert torch.isfinite(logits[batch.predictors, batch.targets]).all()
