"""The planner against numbers worked out by hand, and against a slow simulation that walks step by step."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import pytest

from verl.config import load_config
from verl.errors import ConfigError, DataError, ModelError
from verl.trainer.main_ppo import main as train
from verl.trainer.plan.__main__ import main
from verl.trainer.plan.architecture import PUBLISHED, Architecture, from_config, read_architecture
from verl.trainer.plan.costs import MeasuredEngine, MeasuredTrainer, RooflineEngine, RooflineTrainer
from verl.trainer.plan.devices import NODE_LINK, Device, Efficiency, Fleet, parse_fleet
from verl.trainer.plan.estimate import Costs, notes, run_time, step_time
from verl.trainer.plan.lengths import Assumption, Episode, Turn, assumed_episodes, recorded_episodes, resample
from verl.trainer.plan.memory import MicroBatches, activation_bytes, checkpoint_bytes, disk_bytes, host_bytes, phases
from verl.trainer.plan.simulation import Search, simulate

SMALL = Architecture(layers=2, hidden=4, query=4, key=2, feed_forward=8, vocabulary=10, tied=True)
INSTANT = Search(math.inf, 0.0)
UNIT = MeasuredEngine(read_s=0.0, token_s=0.0, step_s=1.0, row_s=0.0, context_s=0.0)
"""A decode step takes a second; nothing else takes any time."""


# ---------------------------------------------------------------------------------------------------------------
# Sizes


def test_parameters_by_hand() -> None:
    # a layer: q and o 4x4 each, k and v 4x2 each, three 4x8, two norms of 4; one more norm; the embedding once
    assert SMALL.body_parameters == 2 * (32 + 16 + 96 + 8) + 4
    assert SMALL.parameters == 308 + 40
    assert SMALL.cache_elements == 2 * 2 * 2
    assert SMALL.flops(tokens=3, scored=1, pairs=6) == 2 * 308 * 3 + 2 * 40 + 4 * 2 * 4 * 6
    assert SMALL.saved_elements() == 16 + 8 + 4 + 32


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("Qwen2.5-0.5B", 494_032_768),
        ("Qwen2.5-1.5B", 1_543_714_304),
        ("Qwen2.5-3B", 3_085_938_688),
        ("Qwen2.5-7B", 7_615_616_512),
        ("Llama-3.2-3B", 3_212_749_824),
        ("Llama-3.1-8B", 8_030_261_248),
    ],
)
def test_sizes_of_published_models_give_their_published_parameter_counts(name: str, parameters: int) -> None:
    assert PUBLISHED[name].parameters == parameters


def test_the_shipped_model_has_as_many_parameters_as_its_files() -> None:
    from verl.config.describe import count_parameters

    path = load_config("tiny_ppo").actor_rollout_ref.model.path
    assert read_architecture(path).parameters == count_parameters(Path(path))


def test_an_unknown_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"actor_rollout_ref\.model\.path = some/thing.*name a folder"):
        read_architecture("some/thing")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError, match="num_attention_heads"):
        read_architecture(str(tmp_path))


def test_head_size_may_differ_from_hidden_over_heads() -> None:
    found = from_config(
        {
            "num_hidden_layers": 1, "hidden_size": 8, "num_attention_heads": 2, "num_key_value_heads": 1,
            "head_dim": 16, "intermediate_size": 4, "vocab_size": 5, "tie_word_embeddings": False,
            "model_type": "qwen3",
        }
    )  # fmt: skip
    assert (found.query, found.key, found.tied, found.attention_bias) == (32, 16, False, False)


def test_fleets() -> None:
    fleet = parse_fleet("2x8xh100")
    assert (fleet.nodes, fleet.per_node, fleet.size, fleet.device.name) == (2, 8, 16, "H100")
    assert fleet.link == NODE_LINK and parse_fleet("4xA100-40G").link == 300e9
    for text in ("H100", "4xH1000", "0xH100", "x4xH100"):
        with pytest.raises(ConfigError, match="write 4xH100"):
            parse_fleet(text)


# ---------------------------------------------------------------------------------------------------------------
# Memory


def recipe(*overrides: str, name: str = "chatr1_3b_topiocqa"):  # type: ignore[no-untyped-def]
    return load_config(name, overrides)


def test_memory_of_a_phase_by_hand() -> None:
    config = recipe(
        "trainer.n_gpus_per_node=2", "data.max_prompt_length=90", "data.max_response_length=10",
        "data.max_start_length=50", "data.max_obs_length=20", "max_turns=1",
        "actor_rollout_ref.actor.ppo_micro_batch_size=8", "critic.ppo_micro_batch_size=4",
        "actor_rollout_ref.actor.fsdp_config.param_offload=false",
    )  # fmt: skip
    rollout, score, update = phases(config, SMALL, 80e9)
    share = 348 / 2
    # offloaded: the critic, the reference, and both optimizers; the policy's weights stay
    assert rollout.parts["idle weights"] == 4 * share and rollout.parts["idle optimizer"] == 0
    assert rollout.parts["engine weights"] == 348 * 2
    assert rollout.parts["KV cache"] == 32 * 100 * 8 * 2  # chunk_size rows of the longest episode, bfloat16
    assert score.parts["weights"] == 0.0  # they were never away
    assert update.parts["weights"] == 4 * share * 2 and update.parts["optimizer"] == 8 * share * 2
    # checkpointing: the input of both layers, and one whole layer; policy 4, critic 2 sequences of 100 tokens a rank
    policy, critic = 400 * (2 * 4 + 60) * 2, 200 * (2 * 4 + 60) * 2
    assert update.parts["activations"] == policy + critic
    assert update.parts["gathered"] == 2 * 2 * (
        2 * 154 + 40
    )  # two layers of 154 (its part of the last norm) and the root
    assert update.parts["logits"] == 3 * 4 * 400 * 10
    assert host_bytes(config, SMALL) == 2 * share * (0 + 8 + 4 + 4 + 8)  # 2 ranks: actor moments, reference, critic


def test_without_checkpointing_every_layer_keeps_everything() -> None:
    assert activation_bytes(SMALL, tokens=7, dtype_bytes=2, checkpointing=False) == 2 * 7 * 60 * 2
    assert activation_bytes(SMALL, tokens=7, dtype_bytes=2, checkpointing=True) == 2 * 7 * 4 * 2 + 7 * 60 * 2


def test_disk() -> None:
    config = recipe("trainer.save_freq=10", "trainer.keep_checkpoints=2", "trainer.export_every=1")
    assert checkpoint_bytes(config, SMALL, export=True) == 348 * 28  # twice 12, and the export
    assert disk_bytes(config, SMALL) == 4 * 348 * 28  # two kept, the best, the one being written
    assert disk_bytes(recipe("trainer.save_freq=-1"), SMALL) == 348 * 28


def test_micro_batches_of_a_rank() -> None:
    config = recipe("trainer.n_gpus_per_node=4")
    by_sequences = MicroBatches(False, 0, 64)
    assert by_sequences.count(config, trajectories=256, tokens=1e6) == 4  # 64 a rank, 16 at a time
    assert by_sequences.most_tokens(config) == 16 * 4000
    by_tokens = MicroBatches(True, 16384, 1)
    assert by_tokens.count(config, trajectories=256, tokens=40_000) == 3
    assert by_tokens.most_tokens(config) == 16384


# ---------------------------------------------------------------------------------------------------------------
# Costs

PLAIN = Efficiency(compute=0.5, bandwidth=0.5, step_s=0.0)
FLEET = Fleet(1, 2, Device("toy", flops=1000.0, bandwidth=100.0, memory=1e6, link=10.0, host=20.0))


def test_a_decode_step_reads_the_weights_or_computes() -> None:
    engine = RooflineEngine(SMALL, FLEET, PLAIN)
    # 348 weights and 10 tokens of 8 cached elements, 2 bytes each, at 50 bytes/s; 2*348 + 4*2*4*10 at 500 flops/s
    assert engine.decode(1, 10) == max((348 * 2 + 10 * 8 * 2) / 50, (2 * 348 + 320) / 500)
    assert engine.decode(100, 100) == (2 * 348 * 100 + 32 * 100) / 500
    assert engine.prefill(10, 2) == (2 * 308 * 10 + 2 * 40 * 2) / 500


def test_training_pays_arithmetic_and_exchange() -> None:
    trainer = RooflineTrainer(SMALL, FLEET, PLAIN, checkpointing=True, low_bytes=2)
    body, head = 2 * 308 * 10 + 32 * 55, 2 * 40 * 3
    gather, scatter = 0.5 * 348 * 2 / 5, 0.5 * 348 * 4 / 5
    assert trainer.forward(10, 3, 55, passes=2) == pytest.approx((body + head) / 500 + 2 * gather)
    assert trainer.train(10, 3, 55, passes=1) == pytest.approx((4 * body + 4 * head) / 500 + 3 * gather + scatter)
    assert trainer.optimizer() == pytest.approx(348 * 28 / 2 / 50)
    assert trainer.publish() == pytest.approx(2 * 348 * 4 / 10)


# ---------------------------------------------------------------------------------------------------------------
# The simulated rollout


def test_one_episode_by_hand() -> None:
    episode = Episode(5, (Turn(3, 4, True), Turn(2, 0, False)))
    engine = MeasuredEngine(read_s=10.0, token_s=1.0, step_s=100.0, row_s=0.0, context_s=0.0)
    found = simulate([episode], 1, 8, 8, engine, Search(rate=0.5, latency_s=7.0))
    # read 15, decode 300, search 2 + 7, read 14, decode 200
    assert found.seconds == 15 + 300 + 9 + 14 + 200
    assert found.search_s == 9 and found.steps == 5 and found.row_steps == 5


def test_rows_are_decoded_together_and_slots_are_refilled() -> None:
    episodes = [Episode(1, (Turn(size, 0, False),)) for size in (2, 5, 4)]
    assert simulate(episodes, 1, 3, 3, UNIT, INSTANT).ends == (2.0, 4.0, 5.0)
    # two slots: the third begins when the first has ended
    assert simulate(episodes, 1, 2, 3, UNIT, INSTANT).ends == (2.0, 5.0, 6.0)
    # chunks of one are done one after the other
    assert simulate(episodes, 1, 3, 1, UNIT, INSTANT).seconds == 11.0
    assert simulate(episodes, 3, 3, 1, UNIT, INSTANT).seconds == 5.0


def test_an_answer_joins_at_the_end_of_the_step_under_way() -> None:
    episodes = [Episode(1, (Turn(1, 1, True), Turn(2, 0, False))), Episode(1, (Turn(9, 0, False),))]
    found = simulate(episodes, 1, 8, 8, UNIT, Search(math.inf, 2.5))
    # asks at 1, is answered at 3.5, joins at 4 and ends at 6
    assert found.ends == (6.0, 9.0)


def test_the_service_answers_one_query_after_the_other() -> None:
    episodes = [Episode(1, (Turn(1, 1, True), Turn(1, 0, False)))] * 3
    found = simulate(episodes, 1, 8, 8, UNIT, Search(rate=0.1, latency_s=0.0))
    assert found.ends == (12.0, 22.0, 32.0) and found.search_s == 10 + 20 + 30


def walked(episodes: list[Episode], slots: int, latency: int) -> list[int]:
    """An oracle: one engine, a second a step, reading is free, walked second by second."""
    waiting = [[episode, 0, episode.turns[0].generated] for episode in episodes]
    running: list[list] = []
    searching: list[tuple[int, list]] = []
    ends, now = [], 0
    while waiting or running or searching:
        waiting += [row for when, row in searching if when <= now]
        searching = [(when, row) for when, row in searching if when > now]
        while waiting and len(running) < slots:
            running.append(waiting.pop(0))
        now += 1
        for row in list(running):
            row[2] -= 1
            if row[2] == 0:
                running.remove(row)
                episode, turn = row[0], row[1]
                if turn + 1 == len(episode.turns):
                    ends.append(now)
                else:
                    row[1], row[2] = turn + 1, episode.turns[turn + 1].generated
                    searching.append((now + (latency if episode.turns[turn].searched else 0), row))
    return sorted(ends)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("slots", [100, 4])
def test_the_simulation_equals_a_walk_second_by_second(seed: int, slots: int) -> None:
    draw = random.Random(seed)
    episodes = []
    for _ in range(12):
        sizes = [draw.randint(1, 9) for _ in range(draw.randint(1, 4))]
        turns = [Turn(size, 1, draw.random() < 0.7) for size in sizes[:-1]]
        episodes.append(Episode(draw.randint(1, 9), (*turns, Turn(sizes[-1], 0, False))))
    latency = draw.randint(1, 6)
    found = simulate(episodes, 1, slots, 100, UNIT, Search(math.inf, float(latency)))
    total = sum(episode.model_tokens for episode in episodes)
    assert found.row_steps == total
    if slots == 100:  # with few slots who comes first decides, and ties differ
        assert list(found.ends) == walked(episodes, slots, latency)
    else:
        assert found.seconds >= max(total / slots, walked(episodes, 100, latency)[-1])


# ---------------------------------------------------------------------------------------------------------------
# Lengths


def test_recorded_lengths(tmp_path: Path) -> None:
    segments = [("prompt", 7), ("model", 3), ("env", 5), ("model", 2), ("env", 1), ("model", 4)]
    row = {
        "segments": [{"origin": origin, "token_ids": [0] * size} for origin, size in segments],
        "searches": [{"turn": 0}],
    }
    (tmp_path / "rollouts").mkdir()
    (tmp_path / "rollouts" / "step_1.jsonl").write_text(json.dumps(row) + "\n")
    (found,) = recorded_episodes(tmp_path)
    assert found == Episode(7, (Turn(3, 5, True), Turn(2, 1, False), Turn(4, 0, False)))
    assert (found.length, found.model_tokens, found.searches, found.pairs) == (22, 9, 1, 22 * 23 / 2)
    with pytest.raises(DataError, match="there are no episodes"):
        recorded_episodes(tmp_path / "none")


def test_assumed_lengths_stay_within_the_limits() -> None:
    config = recipe()
    found = assumed_episodes(config.data, config.task_config.generations, 300, 1, Assumption())
    assert len(found) == 300 and found == assumed_episodes(config.data, 3, 300, 1, Assumption())
    for episode in found:
        assert 1 <= episode.prompt <= 2048 and 1 <= len(episode.turns) <= 3 and episode.length <= 4000
        assert all(1 <= turn.generated <= 500 for turn in episode.turns) and not episode.turns[-1].searched
    assert 900 < sum(episode.prompt for episode in found) / 300 < 1150  # uniform up to 2048


def test_recorded_lengths_keep_their_distribution() -> None:
    episodes = [Episode(size, (Turn(1, 0, False),)) for size in range(1, 101)]
    found = resample(episodes, 10, seed=3)
    assert sorted(episode.prompt for episode in found) == [6, 16, 26, 36, 46, 56, 66, 76, 86, 96]
    assert resample(episodes[:3], 9, seed=3) != sorted(resample(episodes[:3], 9, seed=3), key=lambda e: e.prompt)


def test_every_piece_is_timed_on_the_recipes_own_model() -> None:
    from verl.trainer.plan.calibration import calibrate

    episodes = [Episode(20, (Turn(5, 9, True), Turn(4, 0, False)))] * 8
    costs = calibrate(toy_config("actor_rollout_ref.rollout.chunk_size=8"), episodes)
    step = step_time(toy_config(), episodes[:4], costs, INSTANT)
    assert 0 < step.rollout < 30 and 0 < step.score < 30 and 0 < step.update < 60 and 0 < step.publish < 30
    assert costs.policy.train(1000, 100, 0, 1) > costs.policy.forward(1000, 100, 0, 1)
    assert costs.engine.decode(64, 6400) > costs.engine.decode(1, 100)


# ---------------------------------------------------------------------------------------------------------------
# A step and a run


def toy_costs(side_by_side: bool) -> Costs:
    policy = MeasuredTrainer(1.0, 0.01, 2.0, 0.1, 5.0, 0.5)
    critic = MeasuredTrainer(0.0, 0.02, 0.0, 0.3, 0.0, 0.0)
    return Costs(UNIT, policy, critic, side_by_side, write=100.0)


def toy_config(*more: str):  # type: ignore[no-untyped-def]
    return load_config(
        "tiny_ppo",
        [
            "data.train_batch_size=4", "actor_rollout_ref.actor.ppo_mini_batch_size=2", "algorithm.kl_ctrl.kl_coef=0.1",
            "actor_rollout_ref.rollout.n_workers=1", "trainer.total_training_steps=10", "trainer.save_freq=5", *more,
        ],
    )  # fmt: skip


def test_a_step_by_hand() -> None:
    episodes = [Episode(45, (Turn(5, 0, False),))] * 4  # 200 tokens
    step = step_time(toy_config(), episodes, toy_costs(side_by_side=False), INSTANT)
    assert step.rollout == 5.0 and step.search == 0.0 and step.rows == 4.0
    assert step.score == pytest.approx(2 * (1 + 2) + 4)  # policy and reference, then the critic
    # two mini-batches of one micro-batch each
    assert step.update == pytest.approx((2 * 2 + 200 * 0.1 + 2 * 5) + 200 * 0.3)
    assert step.publish == 0.5 and step.step == pytest.approx(5 + 10 + 94 + 0.5)
    beside = step_time(toy_config(), episodes, toy_costs(side_by_side=True), INSTANT)
    assert (beside.score, beside.update) == (pytest.approx(6), pytest.approx(60))


def test_a_run_by_hand(tmp_path: Path) -> None:
    rows = tmp_path / "val.jsonl"
    rows.write_text("{}\n" * 8)
    episodes = [Episode(45, (Turn(5, 0, False),))] * 4
    config = toy_config(f"data.val_files={rows}", "trainer.test_freq=4")
    step = step_time(config, episodes, toy_costs(side_by_side=True), INSTANT)
    run = run_time(config, step, episodes, toy_costs(side_by_side=True), saved_bytes=1000.0)
    # evaluations before, at 4, at 8 and at the end: twice the episodes of a step each; checkpoints at 5 and 10
    assert (run.steps, run.evaluations) == (10, 4)
    assert run.training == pytest.approx(10 * step.step) and run.evaluating == 4 * 2 * 5.0 and run.saving == 20.0
    unknown = toy_config("trainer.total_training_steps=null", "data.train_files=no/such.jsonl")
    assert run_time(unknown, step, episodes, toy_costs(side_by_side=True), 1.0).total is None


def test_what_would_dominate_is_said() -> None:
    config = toy_config()
    episodes = [Episode(9, (Turn(5, 9, True), Turn(5, 0, False)))] * 19 + [Episode(9, (Turn(96, 0, False),))]
    slow = step_time(config, episodes, toy_costs(side_by_side=True), Search(0.01, 0.0))
    told = " ".join(notes(config, SMALL, slow, 99e9, 80e9))
    assert "memory does not fit: 92 of 75 GiB" in told and "the retrieval service costs" in told
    quick = step_time(config, episodes, toy_costs(side_by_side=True), INSTANT)
    (tail,) = notes(config, SMALL, quick, 1e9, 80e9)
    assert "the longest tenth of the episodes takes" in tail


# ---------------------------------------------------------------------------------------------------------------
# The program


def test_the_program_plans_several_recipes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chatr1_3b_topiocqa", "search_r1_grpo", "--gpus", "2x4xH100", "trainer.total_training_steps=7"]) == 0
    told = capsys.readouterr().out
    assert "# chatr1_3b_topiocqa" in told and "# search_r1_grpo" in told
    assert told.count("ranks, engines            8, 8") == 2 and told.count("7 steps") == 2
    assert "nothing measured" in told


def test_a_mistake_is_one_message(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tiny_ppo", "--gpus", "4xZ9"]) == 2
    assert "ConfigError: --gpus 4xZ9: write 4xH100" in capsys.readouterr().err


def test_check_shows_memory_and_names_the_planner(capsys: pytest.CaptureFixture[str]) -> None:
    assert train(["--check", "--config-name", "chatr1_3b_topiocqa"]) == 0
    told = capsys.readouterr().out
    assert "# memory per rank, update" in told and "python -m verl.trainer.plan" in told
    assert train(["--check", "--config-name", "tiny_ppo", "actor_rollout_ref.model.path=some/model"]) == 0
    assert "# memory: unknown (actor_rollout_ref.model.path = some/model" in capsys.readouterr().out
