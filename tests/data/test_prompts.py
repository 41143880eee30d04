"""The order of training prompts: complete epochs, seeded, resumable at any batch."""

from __future__ import annotations

import json

import pytest

from verl.data.prompts import PromptStream
from verl.errors import CheckpointError, DataError
from verl.types import Prompt


def prompts(count: int) -> list[Prompt]:
    return [Prompt(f"p{index}", (index,), {}) for index in range(count)]


def ids(batch: list[Prompt]) -> list[str]:
    return [prompt.prompt_id for prompt in batch]


@pytest.mark.parametrize("shuffle", [True, False])
def test_every_epoch_has_each_prompt_once(shuffle: bool) -> None:
    stream = PromptStream(prompts(10), batch_size=4, seed=3, shuffle=shuffle)
    assert stream.batches_per_epoch == 3
    epochs = []
    for epoch in range(3):
        batches = [ids(stream.next_batch()) for _ in range(3)]
        assert stream.epoch == epoch
        assert [len(batch) for batch in batches] == [4, 4, 2], "the last batch of an epoch is smaller"
        epochs.append([name for batch in batches for name in batch])
    assert all(sorted(epoch) == sorted(ids(prompts(10))) for epoch in epochs)
    assert (epochs[0] != epochs[1]) is shuffle
    assert (epochs[0] == ids(prompts(10))) is not shuffle


def test_order_depends_on_the_seed_alone() -> None:
    first, same, other = (PromptStream(prompts(20), 20, seed) for seed in (1, 1, 2))
    batch = ids(first.next_batch())
    assert ids(same.next_batch()) == batch
    assert ids(other.next_batch()) != batch


@pytest.mark.parametrize("done", range(8))
def test_resuming_at_any_batch_continues_the_same_sequence(done: int) -> None:
    whole = PromptStream(prompts(7), 3, seed=5)
    sequence = [ids(whole.next_batch()) for _ in range(12)]
    stopped = PromptStream(prompts(7), 3, seed=5)
    for _ in range(done):
        stopped.next_batch()
    resumed = PromptStream(prompts(7), 3, seed=5)
    resumed.restore(json.loads(json.dumps(stopped.state())))
    assert [ids(resumed.next_batch()) for _ in range(12 - done)] == sequence[done:]


def test_a_cursor_of_other_data_is_refused() -> None:
    state = PromptStream(prompts(7), 3, seed=5).state()
    with pytest.raises(CheckpointError, match="items was 7 in the checkpoint and is 8 now"):
        PromptStream(prompts(8), 3, seed=5).restore(state)


def test_unusable_prompt_lists_are_refused() -> None:
    with pytest.raises(DataError, match="no usable row"):
        PromptStream([], 3, seed=1)
    with pytest.raises(DataError, match="'p0' occurs twice"):
        PromptStream(prompts(1) * 2, 3, seed=1)
