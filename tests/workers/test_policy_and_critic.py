"""Policy and critic workers on one rank: losses against a plain recomputation, learning, exact resume."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from training_cases import make_model, make_samples, run_config
from transformers import AutoModelForCausalLM

from verl.data.samples import fill
from verl.errors import CheckpointError
from verl.types import Sample
from verl.workers.critic import CriticWorker, explained_variance
from verl.workers.policy import PolicyWorker


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


def policy(folder: Path, *overrides: str) -> PolicyWorker:
    worker = PolicyWorker(run_config(folder, *overrides), total_steps=10)
    worker.setup()
    return worker


def critic(folder: Path, *overrides: str) -> CriticWorker:
    worker = CriticWorker(run_config(folder, *overrides), total_steps=10)
    worker.setup()
    return worker


def own_log_probs(folder: Path, samples: list[Sample], temperature: float = 1.0) -> tuple[list[Any], list[Any]]:
    """Log-probs and entropies by plain transformers, sequence by sequence."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    logprobs, entropies = [], []
    with torch.no_grad():
        for sample in samples:
            table = (model(input_ids=torch.tensor([sample.token_ids])).logits[0] / temperature).log_softmax(-1)
            at = [i for i, trained in enumerate(sample.loss_mask) if trained]
            rows = table[[i - 1 for i in at]]
            logprobs.append(rows[range(len(at)), [sample.token_ids[i] for i in at]].numpy())
            entropies.append(-(rows.exp() * rows).sum(-1).numpy())
    return logprobs, entropies


def masked(sample: Sample, column: str) -> np.ndarray[Any, Any]:
    return np.array(getattr(sample, column))[np.array(sample.loss_mask)]


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_log_probs_equal_plain_transformers(folder: Path, temperature: float) -> None:
    samples = make_samples(6)
    worker = policy(folder, f"actor_rollout_ref.rollout.temperature={temperature}")
    result = worker.log_probs(samples)
    filled = fill(samples, "old_logprobs", [result])
    logprobs, entropies = own_log_probs(folder, samples, temperature)
    for sample, wanted in zip(filled, logprobs, strict=True):
        assert masked(sample, "old_logprobs") == pytest.approx(wanted, abs=1e-5)
        assert sum(sample.old_logprobs or ()) == pytest.approx(float(wanted.sum()), abs=1e-4), "0 where masked"
    assert result.metrics["policy/entropy"] == pytest.approx(float(np.concatenate(entropies).mean()), abs=1e-5)
    reference = fill(samples, "ref_logprobs", [worker.reference_log_probs(samples)])
    assert [s.ref_logprobs for s in reference] == [s.old_logprobs for s in filled], "at the start they are one model"


@pytest.mark.parametrize(
    "overrides",
    [
        ("actor_rollout_ref.rollout.log_prob_micro_batch_size=1",),
        ("actor_rollout_ref.actor.use_dynamic_bsz=true", "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=1024"),
    ],
)
def test_scores_and_their_order_do_not_depend_on_micro_batches(folder: Path, overrides: tuple[str, ...]) -> None:
    samples = make_samples(7)
    wanted, got = policy(folder).log_probs(samples), policy(folder, *overrides).log_probs(samples)
    for left, right in zip(fill(samples, "old_logprobs", [wanted]), fill(samples, "old_logprobs", [got]), strict=True):
        assert left.old_logprobs == pytest.approx(right.old_logprobs, abs=1e-6)
    assert got.metrics["policy/entropy"] == pytest.approx(wanted.metrics["policy/entropy"], rel=1e-6)


def test_update_figures_equal_a_plain_recomputation(folder: Path) -> None:
    samples = make_samples(6)
    worker = policy(
        folder,
        "actor_rollout_ref.actor.ppo_mini_batch_size=6",
        "actor_rollout_ref.actor.use_kl_loss=true",
        "actor_rollout_ref.actor.kl_loss_coef=0.3",
        "actor_rollout_ref.actor.entropy_coeff=0.2",
    )
    figures = worker.update(samples)
    logprobs, entropies = (np.concatenate(parts) for parts in own_log_probs(folder, samples))
    old, advantages, reference = (
        np.concatenate([masked(s, name) for s in samples]) for name in ("old_logprobs", "advantages", "ref_logprobs")
    )
    ratio = np.exp(logprobs - old)
    clipped = np.clip(ratio, 0.8, 1.2)
    loss = np.maximum(-advantages * ratio, -advantages * clipped).mean()
    gap = reference - logprobs
    divergence = np.minimum(np.exp(gap) - 1 - gap, 10).mean()
    assert figures["policy/loss"] == pytest.approx(loss, rel=1e-4)
    assert figures["policy/reference_kl"] == pytest.approx(divergence, rel=1e-4)
    assert figures["policy/total_loss"] == pytest.approx(loss - 0.2 * entropies.mean() + 0.3 * divergence, rel=1e-4)
    assert figures["policy/update_kl"] == pytest.approx((old - logprobs).mean(), rel=1e-4)
    assert figures["policy/lr"] == 1e-2


def test_update_makes_good_tokens_likelier(folder: Path) -> None:
    samples = [
        replace(s, advantages=tuple((1.0 if i % 2 else -1.0) * m for m in s.loss_mask))
        for i, s in enumerate(make_samples(8))
    ]
    worker = policy(folder)
    before = fill(samples, "old_logprobs", [worker.log_probs(samples)])
    worker.update(before)
    after = fill(samples, "old_logprobs", [worker.log_probs(samples)])
    moves = [sum(b.old_logprobs or ()) - sum(a.old_logprobs or ()) for a, b in zip(before, after, strict=True)]
    assert all(move > 0 for move in moves[1::2])
    assert all(move < 0 for move in moves[::2])


def test_numbers_on_environment_tokens_reach_no_figure(folder: Path) -> None:
    """Prompt and observation tokens are context, never targets, whatever a column says there."""
    clean = make_samples(4)
    dirty = [
        replace(
            s,
            advantages=tuple(a if m else 50.0 for a, m in zip(s.advantages or (), s.loss_mask, strict=True)),
            old_logprobs=tuple(o if m else 3.0 for o, m in zip(s.old_logprobs or (), s.loss_mask, strict=True)),
        )
        for s in clean
    ]
    figures = [policy(folder).update(samples) for samples in (clean, dirty)]
    assert figures[0]["policy/grad_norm"] == figures[1]["policy/grad_norm"]
    assert figures[0]["policy/loss"] == figures[1]["policy/loss"]


def test_no_advantage_means_no_gradient(folder: Path) -> None:
    worker = policy(folder, "actor_rollout_ref.actor.entropy_coeff=0")
    flat = [replace(s, advantages=(0.0,) * len(s.token_ids)) for s in make_samples(4)]
    assert worker.update(flat)["policy/grad_norm"] == 0.0


def test_sequence_aggregation_weighs_trajectories_equally(folder: Path) -> None:
    samples = make_samples(5)
    worker = policy(folder, "actor_rollout_ref.actor.loss_agg=sequence")
    figures = worker.update(fill(samples, "old_logprobs", [worker.log_probs(samples)]))
    wanted = -np.mean([masked(s, "advantages").mean() for s in samples])
    assert figures["policy/loss"] == pytest.approx(wanted, abs=1e-5)


@pytest.mark.parametrize(
    "overrides",
    [
        ("actor_rollout_ref.actor.policy_loss=gspo", "actor_rollout_ref.actor.loss_agg=sequence"),
        ("actor_rollout_ref.actor.policy_loss=cispo", "actor_rollout_ref.actor.loss_agg=constant"),
        ("actor_rollout_ref.actor.llds_coef=0.5", "algorithm.correction.mode=mask"),
    ],
)
def test_no_loss_depends_on_micro_batches(folder: Path, overrides: tuple[str, ...]) -> None:
    weights = [0.5 + 0.1 * index for index in range(12)]
    samples = [
        replace(s, correction=tuple(w * m for m in s.loss_mask)) for s, w in zip(make_samples(12), weights, strict=True)
    ]
    figures = [
        policy(folder, *overrides, f"actor_rollout_ref.actor.ppo_micro_batch_size={size}").update(samples)
        for size in (1, 5, 12)
    ]
    for name in ("policy/grad_norm", "policy/loss", "policy/total_loss", "policy/clip_fraction"):
        assert [f[name] for f in figures] == pytest.approx([figures[0][name]] * 3, rel=1e-4), name


def test_weights_of_the_correction_reach_the_gradient(folder: Path) -> None:
    overrides = ("algorithm.correction.mode=truncate", "actor_rollout_ref.actor.entropy_coeff=0")
    samples = make_samples(6)
    plain = policy(folder, overrides[1]).update(samples)
    halved = policy(folder, *overrides).update(
        [replace(s, correction=tuple(0.5 * m for m in s.loss_mask)) for s in samples]
    )
    assert halved["policy/loss"] == pytest.approx(0.5 * plain["policy/loss"])
    assert halved["policy/grad_norm"] == pytest.approx(0.5 * plain["policy/grad_norm"], rel=1e-4)


def test_the_entropy_weight_of_a_step_replaces_the_configured_one(folder: Path) -> None:
    samples = make_samples(6)
    flat = [replace(s, advantages=(0.0,) * len(s.token_ids)) for s in samples]
    assert policy(folder).update(flat, 0.0)["policy/grad_norm"] == 0.0
    configured = policy(folder, "actor_rollout_ref.actor.entropy_coeff=0.25").update(flat)
    assert policy(folder).update(flat, 0.25)["policy/grad_norm"] == configured["policy/grad_norm"] > 0


def test_mini_batches_and_epochs_make_that_many_steps_at_one_rate(folder: Path) -> None:
    worker = policy(
        folder,
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "actor_rollout_ref.actor.ppo_epochs=2",
        "actor_rollout_ref.actor.optim.lr_warmup_steps_ratio=0.4",
    )
    assert worker.engine.optimizers is not None
    rates = [worker.update(make_samples(12))["policy/lr"] for _ in range(5)]
    assert rates == pytest.approx([0.0025, 0.005, 0.0075, 0.01, 0.01])
    (adamw,) = worker.engine.optimizers.parts
    steps = {int(state["step"]) for state in adamw.state.values()}
    assert steps == {5 * 2 * 3}


def test_gradient_is_clipped_to_the_configured_norm(folder: Path) -> None:
    worker = policy(folder, "actor_rollout_ref.actor.grad_clip=0.001", "actor_rollout_ref.actor.entropy_coeff=0")
    seen = []
    optimizers = worker.engine.optimizers
    assert optimizers is not None
    original = optimizers.step

    def spy() -> None:
        grads = [p.grad for p in worker.engine.module.parameters() if p.grad is not None]
        seen.append(float(torch.nn.utils.get_total_norm(grads)))
        original()

    optimizers.step = spy  # type: ignore[method-assign]
    assert worker.update(make_samples(4))["policy/grad_norm"] > 0.01
    assert seen == [pytest.approx(0.001, rel=1e-3)]


def broken(samples: list[Sample], index: int) -> list[Sample]:
    """Samples of which one has advantages that are not numbers."""
    nan = tuple(float("nan") if m else 0.0 for m in samples[index].loss_mask)
    return [replace(s, advantages=nan) if n == index else s for n, s in enumerate(samples)]


def test_an_update_whose_gradient_is_not_finite_is_as_if_it_had_not_been(folder: Path) -> None:
    worker, other = policy(folder), policy(folder)
    samples = make_samples(4)
    worker.update(samples)
    assert worker.dropped_prompts() == ()
    figures = worker.update(broken(samples, 0))
    assert set(figures) == {"policy/dropped_updates", "memory/policy"} and figures["policy/dropped_updates"] == 1
    assert worker.dropped_prompts() == tuple(dict.fromkeys(sample.prompt_id for sample in samples))
    after = worker.update(samples)
    assert worker.dropped_prompts() == ()
    other.update(samples)
    other.engine.update += 1  # the schedule counts trainer steps, made or not
    expected = other.update(samples)
    assert {**after, "memory/policy": 0} == {**expected, "memory/policy": 0}
    pairs = zip(worker.named_full_tensors(), other.named_full_tensors(), strict=True)
    assert all(torch.equal(mine, theirs) for (_, mine), (_, theirs) in pairs)


def test_one_mini_batch_of_a_step_is_left_out_and_the_figures_are_those_of_the_other(folder: Path) -> None:
    worker, other = (policy(folder, "actor_rollout_ref.actor.ppo_mini_batch_size=4") for _ in range(2))
    samples = make_samples(8)
    figures = worker.update(broken(samples, 6))
    expected = other.update(samples[:4])
    assert figures.pop("policy/dropped_updates") == 1
    assert {**figures, "memory/policy": 0} == {**expected, "memory/policy": 0}
    assert worker.dropped_prompts() == tuple(dict.fromkeys(sample.prompt_id for sample in samples[4:]))
    pairs = zip(worker.named_full_tensors(), other.named_full_tensors(), strict=True)
    assert all(torch.equal(mine, theirs) for (_, mine), (_, theirs) in pairs)


def test_the_mean_ratio_is_one_before_any_update_and_follows_the_old_log_probs(folder: Path) -> None:
    worker = policy(folder)
    scored = fill(make_samples(4), "old_logprobs", [worker.log_probs(make_samples(4))])
    halved = [
        replace(s, old_logprobs=tuple(o + math.log(2) if m else 0.0
                for o, m in zip(s.old_logprobs or (), s.loss_mask, strict=True)))
        for s in scored
    ]  # fmt: skip
    assert worker.update(halved)["policy/ratio"] == pytest.approx(0.5, rel=1e-4)


def test_resumed_training_is_bit_equal_to_uninterrupted(folder: Path, tmp_path: Path) -> None:
    samples = make_samples(8)
    whole = policy(folder)
    for _ in range(2):
        whole.update(samples)
    whole.save(tmp_path / "policy")
    figures = [whole.update(samples) for _ in range(2)]
    resumed = policy(folder)
    resumed.load(tmp_path / "policy")
    for wanted in figures:
        got = resumed.update(samples)
        assert {k: v for k, v in got.items() if "memory" not in k} == {
            k: v for k, v in wanted.items() if "memory" not in k
        }
    for (name, left), (_, right) in zip(whole.named_full_tensors(), resumed.named_full_tensors(), strict=True):
        assert torch.equal(left, right), name


def test_saving_before_the_first_update_changes_nothing(folder: Path, tmp_path: Path) -> None:
    """As in a critic's warm-up, while the policy waits."""
    samples = make_samples(8)
    plain, saved, loaded = (policy(folder) for _ in range(3))
    saved.save(tmp_path / "policy")
    loaded.load(tmp_path / "policy")
    for worker in (plain, saved, loaded):
        for _ in range(2):
            worker.update(samples)
    for (name, wanted), (_, a), (_, b) in zip(
        *(worker.named_full_tensors() for worker in (plain, saved, loaded)), strict=True
    ):
        assert torch.equal(a, wanted), name
        assert torch.equal(b, wanted), name


def test_a_folder_without_state_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="holds no trainer state"):
        policy(folder).load(tmp_path)


def test_export_has_equal_logits_in_plain_transformers(folder: Path, tmp_path: Path) -> None:
    samples = make_samples(3)
    worker = policy(folder)
    worker.update(make_samples(8))
    worker.export(tmp_path / "hf")
    logprobs, _ = own_log_probs(tmp_path / "hf", samples)
    mine = fill(samples, "old_logprobs", [worker.log_probs(samples)])
    for sample, wanted in zip(mine, logprobs, strict=True):
        assert masked(sample, "old_logprobs") == pytest.approx(wanted, abs=1e-5)
    again = policy(tmp_path / "hf")
    for (name, left), (_, right) in zip(worker.named_full_tensors(), again.named_full_tensors(), strict=True):
        assert torch.equal(left, right), name


def test_untied_head_survives_the_export(tmp_path: Path) -> None:
    worker = policy(make_model(tmp_path / "model", tie_word_embeddings=False))
    worker.update(make_samples(8))
    worker.export(tmp_path / "hf")
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "hf").state_dict()
    tensors = dict(worker.named_full_tensors())
    assert "lm_head.weight" in tensors
    assert exported.keys() == tensors.keys()
    assert all(torch.equal(exported[name], tensor) for name, tensor in tensors.items())


def test_critic_learns_its_returns(folder: Path) -> None:
    samples = [
        replace(s, returns=tuple(0.7 if m else 0.0 for m in s.loss_mask), values=(0.0,) * len(s.token_ids))
        for s in make_samples(8)
    ]
    worker = critic(folder, "critic.cliprange_value=10")
    first = worker.update(samples)
    assert first["critic/loss"] == pytest.approx(0.5 * 0.49, rel=1e-5)
    for _ in range(12):
        last = worker.update(samples)
    assert last["critic/loss"] < 0.05
    values = fill(samples, "values", [worker.values(samples)])
    assert np.mean(np.concatenate([masked(s, "values") for s in values])) == pytest.approx(0.7, abs=0.35)


def test_critic_resumes_exactly(folder: Path, tmp_path: Path) -> None:
    samples = make_samples(6)
    whole = critic(folder)
    whole.update(samples)
    whole.save(tmp_path / "critic")
    resumed = critic(folder)
    resumed.load(tmp_path / "critic")
    assert resumed.values(samples).rows == whole.values(samples).rows
    assert resumed.update(samples)["critic/loss"] == whole.update(samples)["critic/loss"]


def test_explained_variance_by_hand() -> None:
    (sample, *_) = make_samples(1)
    ramp = tuple(float(i) * m for i, m in enumerate(sample.loss_mask))
    perfect = replace(sample, returns=ramp, values=ramp)
    constant = replace(sample, returns=ramp, values=tuple(3.0 * m for m in sample.loss_mask))
    flat = replace(sample, returns=tuple(1.0 * m for m in sample.loss_mask), values=ramp)
    assert explained_variance([perfect]) == 1.0
    assert explained_variance([constant]) == pytest.approx(0.0)
    assert explained_variance([flat]) == 0.0
