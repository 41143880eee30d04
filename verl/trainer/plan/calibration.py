"""What this machine needs for the recipe's own model: a few seconds of real passes of the real engines.

Each piece is timed alone at two sizes and taken as a straight line between them. The processor's own seconds count, so
that other work on the machine does not; that the pieces of a run share caches and memory bandwidth is not in it either.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from verl.data.batch import MicroBatch, Scored, pack_batch
from verl.trainer.plan.costs import MeasuredEngine, MeasuredTrainer
from verl.trainer.plan.estimate import Costs
from verl.trainer.plan.lengths import Episode
from verl.trainer.plan.memory import policy_updates
from verl.types import Sampling
from verl.workers.critic import CriticWorker
from verl.workers.device import setup_device
from verl.workers.engine import Engine
from verl.workers.policy import PolicyWorker
from verl.workers.rollout.hf import HfEngine

_ENOUGH_S = 0.4
"""A pass that takes this long is long enough to be taken as it is."""
_STOP = "</never written>"
"""Looking for it costs what looking for a task's own tags costs."""
_EPISODE_S = 0.01
"""Processor seconds of an episode outside the engine (encoding, searching, scoring, transport): in runs of tiny_ppo
here the rollout took 0.6 to 0.9 s per 64 episodes more than its engines."""
_STEPS = 8
"""Decode steps that are timed together."""


def calibrate(config: Any, episodes: Sequence[Episode]) -> Costs:
    """Time the models of ``config`` on this machine's processor, on episodes like ``episodes``. Raises ModelError."""
    device = setup_device(config.cluster.threads_per_worker)
    policy = Engine(PolicyWorker(config, 1).spec(), device)
    trained, publish_s, write = _trainer(config, policy, episodes)
    del policy
    critic = trained
    if config.uses_critic:
        critic = _trainer(config, Engine(CriticWorker(config, 1).spec(), device), episodes)[0]
    engine = _rollout_engine(config, episodes)
    policy_costs = MeasuredTrainer(*trained, publish_s=publish_s)
    return Costs(
        engine,
        policy_costs,
        MeasuredTrainer(*critic, publish_s=0.0),
        side_by_side=True,
        write=write,
        episode_s=_EPISODE_S,
    )


def _trainer(
    config: Any, engine: Engine, episodes: Sequence[Episode]
) -> tuple[tuple[float, float, float, float, float], float, float]:
    """Return (pass and token seconds forward, the same with backward, optimizer step), publish seconds, bytes/s."""
    limit = min(policy_updates(config).most_tokens(config), sum(episode.length for episode in episodes))
    one = _batch(episodes[:1], engine)

    def train(batch: MicroBatch) -> None:
        engine.train_mode()
        first, second = engine.forward(batch)
        engine.backward(first.sum() + 0.0 * second.sum(), last=True)

    forward = _line(lambda batch: engine.score(batch), one, episodes, limit, engine)
    backward = _line(train, one, episodes, limit, engine)
    engine.update = 1
    engine.step()  # creates the moments
    train(one)
    step_s = _seconds(engine.step)
    weights = {name: tensor.clone() for name, tensor in engine.named_full_tensors()}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "weights.safetensors"
        written = _wall(lambda: save_file(weights, file))
        read = _wall(lambda: load_file(file))
        size = file.stat().st_size
    return (*forward, *backward, step_s), written + read, size / written


def _batch(episodes: Sequence[Episode], engine: Engine) -> MicroBatch:
    """Pack random tokens in the shape of ``episodes``."""
    draw, vocabulary = random.Random(0), engine.config.get_text_config().vocab_size
    rows = []
    for episode in episodes:
        mask = [False] * episode.prompt
        for turn in episode.turns:
            mask += [True] * turn.generated + [False] * turn.observed
        rows.append(Scored([draw.randrange(vocabulary) for _ in mask], mask, {}))
    return pack_batch(rows)


def _line(
    work: Callable[[MicroBatch], object], one: MicroBatch, episodes: Sequence[Episode], limit: int, engine: Engine
) -> tuple[float, float]:
    """Return (seconds of a pass, seconds per token): of one episode, and of as many as the limit and patience allow."""
    first = _seconds(lambda: work(one))
    if first < _ENOUGH_S:
        first = min(_seconds(lambda: work(one)) for _ in range(3))
    count, large, seconds = 1, one, first
    while seconds < _ENOUGH_S and count < len(episodes) and sum(large.lengths) * 2 <= limit:
        count = min(2 * count, len(episodes))
        large = _batch(episodes[:count], engine)
        work(large)
        seconds = min(_seconds(lambda: work(large)) for _ in range(2))  # noqa: B023 - called at once
    tokens, more = sum(one.lengths), sum(large.lengths)
    if more == tokens:
        return 0.0, first / tokens
    slope = max(seconds - first, 0.0) / (more - tokens)
    return max(0.0, first - slope * tokens), slope


def _seconds(work: Callable[[], object]) -> float:
    """Return the processor's seconds per thread: what the work takes on a machine that does nothing else."""
    start = time.process_time()
    work()
    return (time.process_time() - start) / torch.get_num_threads()


def _wall(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _rollout_engine(config: Any, episodes: Sequence[Episode]) -> MeasuredEngine:
    """Time reading and decoding: few rows, many rows, and many rows of longer contexts."""
    rollout = config.actor_rollout_ref.rollout
    engine = HfEngine(
        config.actor_rollout_ref.model.path, dtype=rollout.dtype, max_num_seqs=rollout.max_num_seqs, ignore_eos=True
    )
    try:
        return _engine_lines(engine, min(rollout.chunk_size, rollout.max_num_seqs, len(episodes)), episodes)
    finally:
        engine.close()


def _engine_lines(engine: HfEngine, rows: int, episodes: Sequence[Episode]) -> MeasuredEngine:
    mean = max(8, round(sum(episode.length for episode in episodes) / len(episodes) / 2))
    small = max(1, rows // 8)
    _generate(engine, 1, mean, 2)  # warm
    read_few, few = _read_and_step(engine, small, mean)
    read_many, many = _read_and_step(engine, rows, mean)
    _, longer = _read_and_step(engine, rows, 2 * mean)
    context_s = max(0.0, (longer - many) / (rows * mean))
    per_row = max(0.0, (many - few) / max(1, rows - small))
    row_s = max(0.0, per_row - context_s * mean)
    token_s = max(1e-9, (read_many - read_few) / max(1, (rows - small) * mean))
    read_s = max(0.0, read_few - token_s * small * mean)
    return MeasuredEngine(read_s, token_s, max(0.0, few - per_row * small), row_s, context_s)


def _read_and_step(engine: HfEngine, rows: int, context: int) -> tuple[float, float]:
    """Return (seconds of reading, seconds of a decode step) for ``rows`` random contexts."""
    short = _generate(engine, rows, context, 1)
    step = max(0.0, _generate(engine, rows, context, 1 + _STEPS) - short) / _STEPS
    return short, step


def _generate(engine: HfEngine, rows: int, context: int, tokens: int) -> float:
    """Return the seconds in which ``rows`` random contexts are read and continued by ``tokens`` tokens."""
    draw = random.Random(rows + context)
    contexts = [[draw.randrange(engine.model.vocabulary) for _ in range(context)] for _ in range(rows)]

    async def run() -> None:
        await asyncio.gather(
            *(engine.generate(ids, Sampling(tokens, stop=(_STOP,), seed=i)) for i, ids in enumerate(contexts))
        )

    return _seconds(lambda: asyncio.run(run()))
