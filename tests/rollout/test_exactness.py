"""What the engine sampled is what the trainer trains on, and both agree about its probability."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from rollout_models import make_folder
from rollout_tasks import OfflineSearchTask
from vllm_models import SHAPE, from_vllm_itself, needs_vllm

from search_r1.config import search_config
from search_r1.datasets.rows import Row
from verl.cluster.local import LocalCluster
from verl.config import RunConfig
from verl.data.samples import assemble
from verl.types import Prompt
from verl.workers.policy import PolicyWorker
from verl.workers.rollout.manager import Rollouts
from verl.workers.rollout.worker import RolloutWorker

TURNS = tuple(f"<search>q{i}</search>" for i in range(24)) + tuple(f"<answer>a{i}</answer>" for i in range(8))
"""Tokens that act, so that a random model searches and answers."""


def run_config(folder: Path, **rollout: Any) -> RunConfig:
    values = {
        "task": "rollout_tasks:OfflineSearchTask",
        "data": {"max_prompt_length": 300, "max_response_length": 12, "max_obs_length": 90, "max_start_length": 40},
        "cluster": {"kind": "local"},
        "trainer": {"n_gpus_per_node": 1},
        "actor_rollout_ref": {
            "model": {"path": str(folder), "dtype": "float32"},
            "actor": {"use_dynamic_bsz": True, "ppo_max_token_len_per_gpu": 1200},
            "rollout": {"name": "hf", "dtype": "float32", "max_num_seqs": 32, "chunk_size": 50} | rollout,
        },
    }
    config = RunConfig.model_validate(values)
    task = search_config({"max_turns": 3, "retriever": {"url": "http://127.0.0.1:1/retrieve"}})
    return config.model_copy(update={"task_config": task})


@pytest.mark.parametrize(
    ("engine", "temperature"),
    [("hf", 1.0), ("hf", 0.6), pytest.param("vllm", 0.6, marks=[needs_vllm, from_vllm_itself])],
)
def test_a_hundred_episodes_train_exactly_what_was_sampled(tmp_path: Path, engine: str, temperature: float) -> None:
    folder = make_folder(tmp_path / "model", seed=3, extra=TURNS, **SHAPE)
    config = run_config(folder, name=engine, temperature=temperature)
    cluster = LocalCluster()
    policy = cluster.spawn("policy", PolicyWorker, 1, config, 1)
    rollout = cluster.spawn("rollout", RolloutWorker, 1, config)
    rollouts = Rollouts(rollout, config)
    rollouts.setup()
    policy.wait(policy.submit("setup"))
    (manifest,) = policy.wait(policy.submit("publish", 0, str(tmp_path / "weights")))
    rollouts.publish(manifest)
    OfflineSearchTask.sampled.clear()

    rows = [Row(f"q{i}", f"Who is {i}?", ("a1",)) for i in range(25)]
    prompts = [Prompt(row.qid, tuple(range(20, 40 + i)), row.to_json()) for i, row in enumerate(rows)]
    trajectories = rollouts.generate(prompts, step=1, n=4, temperature=temperature)
    samples = assemble(trajectories).samples
    (scored,) = policy.wait(policy.submit("log_probs", samples))
    cluster.close()

    assert len(samples) == 100
    kinds = {kind for t in trajectories for kind in t.turns}
    assert {"search", "answer", "length"} <= kinds
    assert sum(t.n_turns > 1 for t in trajectories) > 50
    worst = 0.0
    for (index, logprobs), sample in zip(sorted(scored.rows), samples, strict=True):
        assert samples[index] is sample
        sampled = OfflineSearchTask.sampled[sample.sample_id]
        trained = [token for token, model in zip(sample.token_ids, sample.loss_mask, strict=True) if model]
        assert trained == [token for completion in sampled for token in completion.token_ids]
        gap = torch.tensor(logprobs) - torch.tensor(sample.rollout_logprobs)
        worst = max(worst, float(gap.abs().max()))
    assert worst < 1e-4, worst
