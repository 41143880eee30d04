"""The order in which prompts are trained on: seeded, resumable, nothing lost or repeated inside an epoch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Generic, TypeVar

import numpy as np

from verl.errors import CheckpointError, DataError
from verl.types import Prompt

Item = TypeVar("Item")


class Stream(Generic[Item]):
    """Endless batches of items, epoch after epoch.

    Every epoch visits each item exactly once, in an order that depends on (seed, epoch) alone. The last batch of an
    epoch is smaller when ``batch_size`` does not divide the number of items: filling it up from the next epoch could
    put one item into a batch twice, and dropping it would lose data.
    """

    def __init__(self, items: Sequence[Item], batch_size: int, seed: int, shuffle: bool) -> None:
        if not items:
            raise DataError("there is nothing to train on: the training files have no usable row")
        if batch_size < 1:
            raise ValueError(f"batch size must be positive, got {batch_size}")
        self.items = items
        self.batch_size = batch_size
        self.seed = seed
        self.shuffle = shuffle
        self.epoch = 0
        self._position = 0
        self._order = self._epoch_order()

    @property
    def batches_per_epoch(self) -> int:
        """Number of batches of one epoch, the smaller last one included."""
        return -(-len(self.items) // self.batch_size)

    def next_batch(self) -> list[Item]:
        """Return the next batch and move on; starts the next epoch when this one is used up."""
        if self._position >= len(self.items):
            self.epoch += 1
            self._position = 0
            self._order = self._epoch_order()
        chosen = self._order[self._position : self._position + self.batch_size]
        self._position += len(chosen)
        return [self.items[index] for index in chosen]

    def state(self) -> dict[str, Any]:
        """Return the cursor as JSON values: what ``restore`` needs to go on with the next batch."""
        return {
            "epoch": self.epoch,
            "position": self._position,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "items": len(self.items),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue where ``state`` was taken; raises CheckpointError when it belongs to other data or another seed."""
        mine = self.state()
        for key in ("seed", "shuffle", "items"):
            if state[key] != mine[key]:
                raise CheckpointError(f"data cursor: {key} was {state[key]} in the checkpoint and is {mine[key]} now")
        self.epoch = int(state["epoch"])
        self._position = int(state["position"])
        self._order = self._epoch_order()

    def _epoch_order(self) -> list[int]:
        if not self.shuffle:
            return list(range(len(self.items)))
        order: list[int] = np.random.default_rng([self.seed, self.epoch]).permutation(len(self.items)).tolist()
        return order


class PromptStream(Stream[Prompt]):
    """The stream of training prompts. Prompt ids must be unique, since groups are keyed by them."""

    def __init__(self, prompts: Sequence[Prompt], batch_size: int, seed: int, shuffle: bool = True) -> None:
        super().__init__(prompts, batch_size, seed, shuffle)
        seen: set[str] = set()
        for prompt in prompts:
            if prompt.prompt_id in seen:
                raise DataError(f"prompt id {prompt.prompt_id!r} occurs twice; groups need unique ids")
            seen.add(prompt.prompt_id)
