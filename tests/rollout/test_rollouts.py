"""Worker and manager on the local cluster: order, seeds, failures and their causes, the limit, determinism."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from verl.cluster.local import LocalCluster
from verl.config import RunConfig
from verl.errors import EngineError, HealthError
from verl.types import Prompt, StopReason, Trajectory
from verl.workers.rollout.manager import Rollouts
from verl.workers.rollout.worker import RolloutWorker
from verl.workers.weight_sync import WeightChannel

Make = Callable[..., "Running"]


class Running:
    """Workers that are set up and hold the model's weights as version 0."""

    def __init__(self, folder: Path, weights: Path, **rollout: Any) -> None:
        settings = {"name": "hf", "dtype": "float32", "max_num_seqs": 8, "chunk_size": 4, "max_failure_rate": 0.5}
        values = {
            "task": "rollout_tasks:TwoTurns",
            "data": {"max_prompt_length": 200, "max_response_length": 56},
            "cluster": {"kind": "local"},
            "actor_rollout_ref": {"model": {"path": str(folder)}, "rollout": settings | rollout},
        }
        self.config = RunConfig.model_validate(values)
        self.cluster = LocalCluster()
        self.group = self.cluster.spawn("rollout", RolloutWorker, 1, self.config)
        self.rollouts = Rollouts(self.group, self.config)
        self.rollouts.setup()
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.manifest = WeightChannel(weights).publish(model.named_parameters(), version=0)

    def publish(self) -> None:
        self.rollouts.publish(self.manifest)

    def generate(self, prompts: list[Prompt], step: int = 1, n: int = 1, **kwargs: Any) -> list[Trajectory]:
        return self.rollouts.generate(prompts, step, n, **({"temperature": 1.0} | kwargs))


@pytest.fixture
def make(model_folder: Path, tmp_path: Path) -> Iterator[Make]:
    made: list[Running] = []

    def build(**rollout: Any) -> Running:
        made.append(Running(model_folder, tmp_path / f"weights{len(made)}", **rollout))
        made[-1].publish()
        return made[-1]

    yield build
    for running in made:
        running.cluster.close()


def prompts(n: int, **rows: dict[int, str]) -> list[Prompt]:
    what = rows.get("do", {})
    return [Prompt(f"p{i}", tuple(range(10, 15 + i)), {"do": what[i]} if i in what else {}) for i in range(n)]


def test_trajectories_come_in_prompt_and_sample_order_with_a_seed_each(make: Make) -> None:
    running = make()
    found = running.generate(prompts(5), n=3)
    assert [t.trajectory_id for t in found] == [f"p{i}#{k}" for i in range(5) for k in range(3)]
    assert len({t.token_ids for t in found}) == 15
    again = running.generate(prompts(5), n=3)
    assert [t.token_ids for t in again] == [t.token_ids for t in found]
    assert [t.token_ids for t in running.generate(prompts(5), n=3, step=2)] != [t.token_ids for t in found]


def test_a_sample_does_not_depend_on_chunks_or_on_how_many_run_at_once(make: Make) -> None:
    expected = [t.token_ids for t in make().generate(prompts(6), n=2)]
    assert [t.token_ids for t in make(chunk_size=12, max_num_seqs=2).generate(prompts(6), n=2)] == expected
    assert [t.token_ids for t in make(chunk_size=1).generate(prompts(6), n=2)] == expected


@pytest.mark.parametrize("max_num_seqs", [8, 3])
def test_deterministic_rollouts_repeat_bit_for_bit_even_after_other_work(make: Make, max_num_seqs: int) -> None:
    options = {"deterministic": True, "chunk_size": 6, "max_num_seqs": max_num_seqs}
    running = make(**options)
    first = running.generate(prompts(5), n=3)
    running.generate(prompts(9), step=4)
    second, elsewhere = running.generate(prompts(5), n=3), make(**options).generate(prompts(5), n=3)
    assert [t.logprobs for t in second] == [t.logprobs for t in first]
    assert [t.logprobs for t in elsewhere] == [t.logprobs for t in first]


def test_figures_of_the_engines_cover_the_last_generate_only(make: Make) -> None:
    running = make()
    for _ in range(2):
        found = running.generate(prompts(4))
        figures = running.rollouts.figures()
        assert figures["rollout/generated_tokens"] == sum(sum(t.loss_mask) for t in found)
        assert 0 < figures["rollout/reused_context"] < 1
        assert figures["rollout/cut_mass"] == 0
        assert figures["service/requests"] == len(found)
    running.generate(prompts(4), top_k=2)
    assert 0 < running.rollouts.figures()["rollout/cut_mass"] < 1


def test_figures_of_time_and_of_what_was_thrown_away(make: Make) -> None:
    running = make(max_failure_rate=0.5)
    found = running.generate(prompts(8))
    figures = running.rollouts.figures()
    assert figures["rollout/discarded_tokens"] == 0 == figures["rollout/lost_workers"]
    seconds = sorted(t.seconds for t in found)
    expected = {"p50": seconds[3], "p95": seconds[7], "max": seconds[7]}
    assert {name: figures[f"rollout/episode_s/{name}"] for name in expected} == expected
    rates = figures["rollout/model_tokens_per_s"] / figures["rollout/episodes_per_s"]
    assert rates == pytest.approx(sum(sum(t.loss_mask) for t in found) / 8)
    assert 0 < figures["rollout/engine_busy"] <= 1
    assert figures["rollout/engine_busy"] <= figures["rollout/in_flight"] <= 8
    assert figures["rollout/search_wait_s"] == 0
    # An episode whose first turn is sampled and whose task then fails: what was sampled is thrown away, and shows.
    running.generate(prompts(8, do={3: "no service after a turn"}))
    assert running.rollouts.figures()["rollout/discarded_tokens"] == 6


def test_a_worker_that_missed_a_publish_is_noticed_by_version_and_by_checksum(make: Make, tmp_path: Path) -> None:
    running = make()
    tensors = {entry.name: torch.zeros(entry.shape) for entry in running.manifest.entries}
    channel = WeightChannel(tmp_path / "next", checksums=True)
    next_version, same_version = (channel.publish(iter(tensors.items()), version) for version in (1, 0))
    load, running.group._worker.load_weights = running.group._worker.load_weights, lambda manifest: None
    running.rollouts.publish(next_version)
    with pytest.raises(EngineError, match=r"worker 0 holds weights version 0 .*, published was version 1"):
        running.generate(prompts(1))
    running.rollouts.publish(same_version)
    with pytest.raises(EngineError, match=r"version 0 \(checksum None\), published was version 0 \(checksum \d+\)"):
        running.generate(prompts(1))
    running.group._worker.load_weights = load
    running.rollouts.publish(same_version)
    assert len(running.generate(prompts(1))) == 1


def test_failures_become_stop_reasons_and_keep_the_prompt(make: Make) -> None:
    running = make(episode_timeout_s=0.3)
    import verl.workers.rollout.worker as module

    module._GRACE_S, grace = 0.0, module._GRACE_S
    try:
        found = running.generate(prompts(8, do={1: "too long", 4: "no service", 6: "hang"}))
    finally:
        module._GRACE_S = grace
    failed = {i: t.stop for i, t in enumerate(found) if t.stop.failed}
    assert failed == {1: StopReason.ENGINE_FAILED, 4: StopReason.SEARCH_FAILED, 6: StopReason.ABORTED}
    assert found[6].token_ids == tuple(range(10, 21))
    assert (found[6].row, found[6].reward.total) == ({"do": "hang"}, 0.0)


def test_too_many_failures_stop_the_run_and_name_the_most_common_cause(make: Make) -> None:
    running = make(max_failure_rate=0.25)
    work = prompts(8, do={0: "no service", 1: "no service", 2: "too long"})
    with pytest.raises(HealthError) as caught:
        running.generate(work)
    message = str(caught.value)
    assert "3 of 8 episodes failed (2 search_failed, 1 engine_failed)" in message
    assert "connection refused by port 8002" in message
    assert "max_failure_rate=0.25" in message


def test_episodes_without_a_reward_are_kept_and_stop_the_run_above_the_same_limit(make: Make) -> None:
    running = make(max_failure_rate=0.25)
    found = running.generate(prompts(8, do={1: "unjudged", 4: "unjudged"}))
    assert [i for i, t in enumerate(found) if t.reward.failure] == [1, 4]
    with pytest.raises(HealthError, match=r"3 of 8 episodes have no reward; .*judge is silent.*max_failure_rate=0\.25"):
        running.generate(prompts(8, do=dict.fromkeys((0, 3, 7), "unjudged")))


def test_a_fault_of_the_program_is_raised_as_itself_and_leaves_the_worker_usable(make: Make) -> None:
    running = make(deterministic=True)
    with pytest.raises(KeyError, match="a fault of the program"):
        running.generate(prompts(4, do={2: "bug"}))
    assert len(running.generate(prompts(4))) == 4


def test_nothing_is_generated_before_the_first_publish(model_folder: Path, tmp_path: Path) -> None:
    running = Running(model_folder, tmp_path / "weights", max_failure_rate=0.5)
    with pytest.raises(HealthError, match="no weights were published yet"):
        running.generate(prompts(2))
    running.publish()
    assert {segment.policy_version for segment in running.generate(prompts(1))[0].segments[1:2]} == {0}
    running.cluster.close()


def test_weights_of_another_model_are_refused(make: Make, tmp_path: Path) -> None:
    running = make()
    manifest = WeightChannel(tmp_path / "other").publish(iter({"x": torch.zeros(2)}.items()), version=4)
    with pytest.raises(EngineError, match="version 4 do not fit"):
        running.group.wait(running.group.submit("load_weights", manifest))
    assert running.generate(prompts(1))[0].segments[1].policy_version == 0
