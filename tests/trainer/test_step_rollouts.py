"""The episodes of a step: what dynamic sampling keeps, what it asks for again, and what it says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from verl.config import RunConfig
from verl.data.prompts import PromptStream
from verl.errors import HealthError
from verl.trainer.step_rollouts import informative, roll_out
from verl.types import Origin, Prompt, Reward, Segment, StopReason, Trajectory


class Played:
    """Rollouts whose rewards are written down: prompt id -> one reward per sample."""

    def __init__(self, rewards: Mapping[str, Sequence[float]]) -> None:
        self._rewards = rewards
        self.asked: list[list[str]] = []

    def generate(self, prompts: Sequence[Prompt], step: int, n: int, **sampling: Any) -> list[Trajectory]:
        self.asked.append([prompt.prompt_id for prompt in prompts])
        return [episode(p.prompt_id, i, self._rewards[p.prompt_id][i]) for p in prompts for i in range(n)]

    def figures(self) -> dict[str, float]:
        return {"rollout/generated_tokens": 10.0, "rollout/batch_rows": float(len(self.asked))}


def episode(prompt: str, index: int, reward: float, stop: StopReason = StopReason.ANSWERED) -> Trajectory:
    segments = (Segment(Origin.PROMPT, (1,)), Segment(Origin.MODEL, (2,) * 4, (-1.0,) * 4, 0))
    return Trajectory(f"{prompt}#{index}", prompt, segments, stop, reward=Reward(reward))


def config(wanted: int, **algorithm: Any) -> RunConfig:
    return RunConfig.model_validate(
        {
            "data": {"train_batch_size": wanted},
            "actor_rollout_ref": {"rollout": {"n_agent": 2}},
            "algorithm": {"filter_groups": {"enable": True, "max_num_gen_batches": 3}, **algorithm},
        }
    )


def stream(names: str, size: int) -> PromptStream:
    return PromptStream([Prompt(name, (1,), {}) for name in names], size, 0, shuffle=False)


LIVE, DEAD = (0.0, 1.0), (1.0, 1.0)


def test_dead_groups_are_replaced_until_the_step_is_full() -> None:
    played = Played({"a": LIVE, "b": DEAD, "c": DEAD, "d": LIVE, "e": LIVE, "f": LIVE})
    rolled = roll_out(stream("abcdef", 2), played, config(2), 1)
    assert played.asked == [["a", "b"], ["c", "d"]]
    assert [t.trajectory_id for t in rolled.trained] == ["a#0", "a#1", "d#0", "d#1"]
    assert len(rolled.generated) == 8
    assert rolled.figures == {
        "rollout/generated_tokens": 20.0,
        "rollout/batch_rows": 1.5,
        "data/generation_batches": 2.0,
        "data/filtered_groups": 2.0,
        "data/surplus_groups": 0.0,
    }


def test_the_step_stops_asking_at_its_limit_and_goes_on_with_what_there_is() -> None:
    played = Played(dict.fromkeys("abcdefgh", DEAD) | {"c": LIVE})
    rolled = roll_out(stream("abcdefgh", 2), played, config(2), 1)
    assert len(played.asked) == 3
    assert {t.prompt_id for t in rolled.trained} == {"c"}


def test_too_many_groups_are_cut_and_counted() -> None:
    played = Played({"a": LIVE, "b": DEAD, "c": LIVE, "d": LIVE})
    rolled = roll_out(stream("abcd", 2), played, config(2), 1)
    assert {t.prompt_id for t in rolled.trained} == {"a", "c"}
    assert rolled.figures["data/surplus_groups"] == 1.0


def test_no_prompt_is_asked_twice_in_a_step() -> None:
    played = Played({"a": DEAD, "b": LIVE})
    rolled = roll_out(stream("ab", 2), played, config(2), 1)
    assert played.asked == [["a", "b"]]
    assert {t.prompt_id for t in rolled.trained} == {"b"}


def test_nothing_to_learn_from_stops_the_run_by_name() -> None:
    with pytest.raises(HealthError, match=r"step 7: the rewards of all 2 prompts are equal .*max_num_gen_batches"):
        roll_out(stream("ab", 2), Played({"a": DEAD, "b": DEAD}), config(2), 7)


def test_failed_episodes_do_not_make_a_group_live() -> None:
    failed = episode("a", 1, 0.0, StopReason.SEARCH_FAILED)
    assert not informative([episode("a", 0, 1.0), failed])
    assert informative([episode("a", 0, 1.0), failed, episode("a", 2, 0.5)])


def test_the_filter_sees_the_tasks_reward_and_training_the_shaped_one() -> None:
    shaping = {"length_coef": 100.0}
    rolled = roll_out(stream("ab", 2), Played({"a": LIVE, "b": DEAD}), config(1, shaping=shaping), 1)
    assert [t.reward.total for t in rolled.trained if t.reward] == pytest.approx([-0.4, 0.6])
    off = config(2, shaping=shaping, filter_groups={"enable": False})
    rolled = roll_out(stream("ab", 2), Played({"a": LIVE, "b": DEAD}), off, 1)
    assert rolled.trained == rolled.generated and len(rolled.trained) == 4
    assert rolled.figures == {"rollout/generated_tokens": 10.0, "rollout/batch_rows": 1.0}
