"""The ``hf`` rollout engine: a transformers model with continuous batching, for machines without vLLM.

Requests arrive from many episodes at once. A driver task on the event loop hands the waiting ones to a single worker
thread, which reads their contexts and then decodes all rows together; a finished row leaves the batch at once and its
place is taken by the next request. The event loop stays free for searches meanwhile.

Two modes. Usually a request joins as soon as there is room. With ``deterministic=True`` a batch starts only when every
open session waits for a generation, in the order of the sessions, so that batches are a function of (step, trajectory
index) alone: the shape of a batch changes floating-point sums, and a sampled token could flip.

An episode asks through a session, which keeps the keys and values of what it has read: the next turn reads only what
was appended. What was simplified: no paging, no prefix tree; memory is rows times the longest row.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from verl.errors import EngineError
from verl.types import Completion, Sampling
from verl.workers.models import load_tokenizer
from verl.workers.rollout.batch import Batch, Request
from verl.workers.rollout.slots import load_slot_model
from verl.workers.rollout.state import AWAITING, EngineStats, HeldWeights
from verl.workers.rollout.stopping import StopRule, eos_token_ids, new_token_limit
from verl.workers.weight_sync import WeightManifest, receive, tied_names, weight_spec

logger = logging.getLogger(__name__)

OnToken = Callable[[int], None]
_BURST = 8
"""Decode steps between two looks at the event loop: amortises the thread hand-over of a small model."""


@dataclass
class HfStats(EngineStats):
    """What this engine can tell besides; seconds are wall time of the model thread."""

    decode_s: float = 0.0
    prefill_s: float = 0.0
    cut_mass: float = 0.0
    """Probability that top-p and top-k cut away, summed over the generated tokens."""


class Session:
    """One episode's access to the engine: ``generate`` as the task sees it."""

    def __init__(self, engine: HfEngine, order: int, on_token: OnToken | None) -> None:
        self._engine = engine
        self.order = order
        self.on_token = on_token

    async def generate(self, token_ids: Sequence[int], sampling: Sampling) -> Completion:
        """Continue ``token_ids`` (the whole context); raises EngineError when the engine cannot."""
        return await self._engine._submit(self, token_ids, sampling)

    def close(self) -> None:
        """End the session. In deterministic mode the others stop waiting for it."""
        self._engine._close_session(self)

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class HfEngine:
    """Generates with a Hugging Face causal LM. Implements ``verl.types.Generate`` (one session per call)."""

    def __init__(
        self,
        model_path: str,
        *,
        dtype: str = "float32",
        max_num_seqs: int = 64,
        max_model_len: int | None = None,
        deterministic: bool = False,
        device: str | torch.device = "cpu",
        trust_remote_code: bool = False,
        ignore_eos: bool = False,
        await_weights: bool = False,
        tokenizer: Any = None,
    ) -> None:
        """Load the model and its tokenizer from ``model_path`` (safetensors).

        ``max_num_seqs`` rows are decoded together at most; ``max_model_len`` bounds context plus output (default: the
        model's own limit). ``await_weights`` refuses to generate until weights were written through ``load_weights``.
        Raises ModelError when the folder cannot be used.
        """
        self.device = torch.device(device)
        self.tokenizer = load_tokenizer(model_path, trust_remote_code) if tokenizer is None else tokenizer
        self.model = load_slot_model(model_path, dtype, self.device, max_num_seqs, trust_remote_code)
        self.deterministic = deterministic
        self.max_num_seqs = max_num_seqs
        self.max_model_len = min(max_model_len or self.model.max_length, self.model.max_length)
        sources = (self.tokenizer, self.model.model.config, getattr(self.model.model, "generation_config", None))
        eos = () if ignore_eos else eos_token_ids(*sources)
        self.stats = HfStats()
        self._batch = Batch(self.model, StopRule(self.tokenizer, eos), self.stats)
        self.weights = AWAITING if await_weights else HeldWeights(0)
        self._sessions: set[Session] = set()
        self._pending: list[Request] = []
        self._driver: asyncio.Task[None] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="hf-engine")
        self._orders = itertools.count(2**40)  # calls without a session come after all sessions

    # -- generation ---------------------------------------------------------------------------------------------

    def session(self, order: int, on_token: OnToken | None = None) -> Session:
        """Open an episode's session. ``order`` places it in deterministic batches: unique among the open ones.

        ``on_token`` is called on the model thread with every token as it is sampled (streaming).
        """
        session = Session(self, order, on_token)
        self._sessions.add(session)
        return session

    async def generate(self, token_ids: Sequence[int], sampling: Sampling) -> Completion:
        """Continue one context without keeping anything; raises EngineError when the engine cannot."""
        with self.session(next(self._orders)) as session:
            return await session.generate(token_ids, sampling)

    async def _submit(self, session: Session, token_ids: Sequence[int], sampling: Sampling) -> Completion:
        self.weights.check()
        limit = new_token_limit(token_ids, sampling, self.max_model_len)
        future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self._pending.append(Request(session, list(token_ids), sampling, limit, self.weights.version, future))
        self._wake()
        return await future

    def _close_session(self, session: Session) -> None:
        self._sessions.discard(session)
        if self._pending:
            self._wake()

    def _wake(self) -> None:
        """Make sure that the driver runs; it ends when there is nothing to do, so no task outlives its loop."""
        if self._driver is None or self._driver.done() or self._driver.get_loop().is_closed():
            with contextlib.suppress(RuntimeError):  # a session may be closed after its loop has ended
                self._driver = asyncio.get_running_loop().create_task(self._drive())

    async def _drive(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            # Requests that start together (or follow the deliveries of the last round) join one batch.
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            self._batch.drop_cancelled()
            self._batch.kept.retain(self._sessions)
            admitted = self._admit()
            if not admitted and not self._batch.rows:
                return
            try:
                finished = await loop.run_in_executor(self._thread, self._work, admitted)
            except Exception as error:
                self._fail(admitted, error)
                continue
            for request, completion in finished:
                if not request.future.done():
                    request.future.set_result(completion)

    def _admit(self) -> list[Request]:
        """Take the requests that join the batch now."""
        self._pending = [request for request in self._pending if not request.future.done()]
        if self.deterministic:
            waiting = {request.session for request in self._pending}
            if self._batch.rows or waiting != self._sessions:
                return []
            self._pending.sort(key=lambda request: request.session.order)
        room = self.max_num_seqs - len(self._batch.rows)
        admitted, self._pending = self._pending[:room], self._pending[room:]
        return admitted

    def _work(self, admitted: list[Request]) -> list[tuple[Request, Completion]]:
        """Model thread: read the admitted contexts, then decode until a row finishes or the burst is over."""
        started = time.perf_counter()
        finished = self._batch.add(admitted) if admitted else []
        between = time.perf_counter()
        self.stats.prefill_s += between - started
        for _ in range(_BURST):
            if finished or not self._batch.rows or self._may_admit():
                break
            finished = self._batch.step()
        self.stats.decode_s += time.perf_counter() - between
        return finished

    def _may_admit(self) -> bool:
        return bool(self._pending) and not self.deterministic and len(self._batch.rows) < self.max_num_seqs

    def _fail(self, admitted: Iterable[Request], error: Exception) -> None:
        """Give the error to every request it concerns; the buffer may be half-written, so it is dropped."""
        logger.warning("generation failed: %s", error)
        requests = {id(request): request for request in [*self._batch.clear(), *admitted]}
        for request in requests.values():
            if not request.future.done():
                failure = EngineError(f"generation failed: {type(error).__name__}: {error}")
                failure.__cause__ = error
                request.future.set_exception(failure)

    # -- weights ------------------------------------------------------------------------------------------------

    async def take_over(self, manifest: WeightManifest) -> None:
        """Replace the weights by a publish. Raises EngineError: before the first write when it does not fit."""
        tensors = receive(manifest, weight_spec(self.model.model), tied_names(self.model.model))
        self.load_weights(tensors, manifest.version, manifest.digest)

    @torch.no_grad()
    def load_weights(self, tensors: Iterator[tuple[str, Tensor]], version: int, digest: int | None = None) -> None:
        """Overwrite the weights with (name, tensor) pairs that cover the model's parameters exactly.

        The iterator checks names, shapes and dtypes before it yields for the first time (see ``WeightChannel``). When
        it fails later, the engine is unusable until a full load succeeds. Raises EngineError.
        """
        if self._batch.rows or self._pending:
            raise EngineError("weights cannot be replaced while generations run")
        parameters: Mapping[str, Tensor] = dict(self.model.model.named_parameters())
        written = 0
        try:
            for name, tensor in tensors:
                parameters[name].copy_(tensor)
                written += 1
            if written != len(parameters):
                raise EngineError(f"{written} of {len(parameters)} weights were written")
        except Exception as error:
            if written:
                self.weights = self.weights.spoiled(version, written, error)
            raise
        self.reset_cache()
        self.weights = HeldWeights(version, digest=digest)

    def reset_cache(self) -> None:
        """Forget kept keys and values (they belong to the old weights)."""
        self._batch.clear()

    def totals(self) -> dict[str, float]:
        """Return running totals since the engine was built."""
        return self.stats.as_dict()

    async def sleep(self) -> None:
        """Free what the next publish makes worthless."""
        self.reset_cache()

    async def check_alive(self) -> None:
        """The engine lives in this process: it is."""

    def close(self) -> None:
        """Stop the model thread."""
        self._thread.shutdown(wait=True)
