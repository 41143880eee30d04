"""The ``vllm`` rollout engine: vLLM's asynchronous engine, in processes of its own; the CPU and the CUDA build alike.

Token ids go in; the sampled ids and their log-probs come out as they are, text is never encoded again. Keys and values
of what has been read stay in vLLM's prefix cache, which the turns of an episode and the samples of a group share.

What differs between the builds is in ``_build_options``: on a CPU the cache has the size that the episodes need instead
of a share of the machine, and prompts are read whole, since the CPU build cannot seed a request whose prompt is read
in parts.
"""

from __future__ import annotations

import gc
import hashlib
import importlib
import itertools
import logging
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import psutil
import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from verl.errors import EngineDeadError, EngineError, ModelError
from verl.types import Completion, Sampling
from verl.workers.device import Device, dtype_of
from verl.workers.models import load_tokenizer
from verl.workers.rollout.state import AWAITING, HeldWeights
from verl.workers.rollout.stopping import eos_token_ids, new_token_limit
from verl.workers.weight_sync import WeightManifest, receive, tied_names, weight_spec

logger = logging.getLogger(__name__)

_EXTENSION = "verl.workers.rollout.vllm_worker.WeightReceiver"
_BLOCK = 32
"""Tokens per block of the prefix cache on a CPU: vLLM's own 128 would share little between short turns."""
_RPC_TIMEOUT_S = 600.0
_ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    # Several processes share the cores; threads pinned to a core wait for each other whenever it is taken.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
"""Set for vLLM's processes unless the user has set them."""


@dataclass(frozen=True)
class VllmSettings:
    """What one engine is built with."""

    model_path: str
    dtype: str
    max_num_seqs: int
    max_model_len: int
    """Context and output together; the model's own limit when that is lower."""
    tensor_parallel_size: int = 1
    memory_share: float = 0.5
    """Of each device's memory. On a CPU an upper bound: of the machine's memory, over its engines."""
    max_num_batched_tokens: int = 8192
    enforce_eager: bool = True
    exact_temperature: bool = True
    """Log-probs are those of the request's temperature. False: of temperature 1, and top-p and top-k cut nothing off
    them (vLLM gives one or the other)."""
    trust_remote_code: bool = False
    may_sleep: bool = False
    ignore_eos: bool = False

    @classmethod
    def from_config(cls, config: Any, device: Device) -> VllmSettings:
        """Read the settings of a run; ``device`` is the worker's."""
        model, rollout = config.actor_rollout_ref.model, config.actor_rollout_ref.rollout
        on_cpu = not device.is_accelerator
        return cls(
            model_path=model.path,
            dtype=rollout.dtype,
            max_num_seqs=rollout.max_num_seqs,
            max_model_len=config.data.max_prompt_length + config.data.max_response_length,
            tensor_parallel_size=rollout.tensor_model_parallel_size,
            memory_share=rollout.gpu_memory_utilization / (config.n_rollout_workers if on_cpu else 1),
            max_num_batched_tokens=rollout.max_num_batched_tokens,
            enforce_eager=rollout.enforce_eager,
            exact_temperature=rollout.top_p == 1.0 and rollout.top_k == -1,
            trust_remote_code=model.trust_remote_code,
            may_sleep=device.is_accelerator and rollout.placement == "colocated",
        )


class VllmSession:
    """One episode's access to the engine. It keeps nothing: the prefix cache knows what the episode has read."""

    def __init__(self, engine: VllmEngine) -> None:
        self._engine = engine

    async def generate(self, token_ids: Sequence[int], sampling: Sampling) -> Completion:
        """Continue ``token_ids`` (the whole context); raises EngineError when the engine cannot."""
        return await self._engine.generate(token_ids, sampling)

    def close(self) -> None:
        """Nothing to free."""


class VllmEngine:
    """Generates with vLLM. Implements ``verl.workers.rollout.engines.Engine``; used from one event loop."""

    def __init__(self, settings: VllmSettings) -> None:
        """Start the engine's processes and load the model; nothing is generated before weights are taken over.

        Raises ModelError when vLLM cannot serve the model with these settings.
        """
        self.settings = settings
        self.max_num_seqs = settings.max_num_seqs
        self.tokenizer = load_tokenizer(settings.model_path, settings.trust_remote_code)
        self._config = AutoConfig.from_pretrained(settings.model_path, trust_remote_code=settings.trust_remote_code)
        limit = getattr(self._config.get_text_config(), "max_position_embeddings", None) or settings.max_model_len
        self.max_model_len = min(settings.max_model_len, limit)
        self._eos = sorted(self._eos_ids())
        self._spec, self._aliases = self._published_form()
        self.weights = AWAITING
        self._asleep = False
        self._running = 0
        self._requests = itertools.count()
        with _environment(settings.enforce_eager):
            self._vllm = importlib.import_module("vllm")
            self._llm, self._counter = self._start()

    # -- generation ---------------------------------------------------------------------------------------------

    def session(self, order: int) -> VllmSession:
        """Open an episode's session; the order plays no part, since nothing waits for it."""
        return VllmSession(self)

    async def generate(self, token_ids: Sequence[int], sampling: Sampling) -> Completion:
        """Continue one context; raises EngineError when the engine cannot."""
        self.weights.check()
        limit = new_token_limit(token_ids, sampling, self.max_model_len)
        version = self.weights.version
        parameters = self._parameters(token_ids, sampling, limit)
        prompt = {"type": "token", "prompt_token_ids": list(token_ids)}
        self._running += 1
        try:
            final = None
            async for output in self._llm.generate(prompt, parameters, str(next(self._requests))):
                final = output
        except Exception as error:
            await self.check_alive()
            cause = error.__cause__ or error
            raise EngineError(f"generation failed: {type(cause).__name__}: {cause}") from error
        finally:
            self._running -= 1
        assert final is not None  # vLLM yields at least the final output, or raises
        return self._completion(final.outputs[0], version)

    def _parameters(self, context: Sequence[int], sampling: Sampling, limit: int) -> Any:
        from vllm.sampling_params import RequestOutputKind, SamplingParams

        return SamplingParams(
            max_tokens=limit,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            stop=list(sampling.stop),
            include_stop_str_in_output=True,
            # One set of ids ends a turn for every engine; vLLM's own idea of EOS is switched off.
            stop_token_ids=self._eos,
            ignore_eos=True,
            seed=None if sampling.seed is None else request_seed(sampling.seed, len(context)),
            logprobs=0,
            skip_special_tokens=False,
            spaces_between_special_tokens=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )

    def _completion(self, output: Any, version: int) -> Completion:
        token_ids = tuple(output.token_ids)
        steps = output.logprobs or ()
        logprobs = tuple(step[token].logprob for token, step in zip(token_ids, steps, strict=True))
        if not all(map(math.isfinite, logprobs)):
            raise EngineError("the model returned logits that are not finite; the weights are probably damaged (NaN)")
        finish = output.finish_reason
        if finish == "stop" and not isinstance(output.stop_reason, str):
            finish = "eos"
        return Completion(token_ids, logprobs, finish, version)

    # -- weights ------------------------------------------------------------------------------------------------

    async def take_over(self, manifest: WeightManifest) -> None:
        """Replace the weights by a publish, in every tensor-parallel rank. Raises EngineError.

        Whatever does not fit is refused before the engine hears of it. Generation is paused meanwhile, and what was
        computed with the old weights is forgotten.
        """
        if self._running:
            raise EngineError("weights cannot be replaced while generations run")
        receive(manifest, self._spec, self._aliases)
        try:
            if self._asleep:
                await self._llm.wake_up()
                self._asleep = False
            await self._llm.pause_generation(mode="abort", clear_cache=True)
            arguments = (manifest.to_record(), self._spec, self._aliases)
            reports = await self._llm.collective_rpc("load_published", _RPC_TIMEOUT_S, arguments)
            await self._llm.reset_prefix_cache()
            await self._llm.resume_generation()
        except Exception as error:
            self.weights = self.weights.spoiled(manifest.version, 0, error)
            await self.check_alive()
            raise EngineError(f"the rollout engine cannot take over weights: {error}") from error
        self._judge(manifest, reports)

    def _judge(self, manifest: WeightManifest, reports: Sequence[Mapping[str, Any]]) -> None:
        """Note what the ranks report; raises EngineError when one of them failed."""
        failed = next((report for report in reports if report["error"] is not None), None)
        if failed is None:
            self.weights = HeldWeights(manifest.version, digest=manifest.digest)
            return
        written = max(report["written"] for report in reports)
        if written:
            self.weights = self.weights.spoiled(manifest.version, written, failed["error"])
        raise EngineError(failed["error"])

    async def sleep(self) -> None:
        """Give the device's memory to training until the next ``take_over`` (colocated accelerators only)."""
        if self.settings.may_sleep and not self._asleep:
            await self._llm.sleep(level=1)
            self._asleep = True

    def reset_cache(self) -> None:
        """Not needed: only deterministic runs ask for it, and this engine does not offer them."""
        raise EngineError("the vllm engine cannot run deterministically; set actor_rollout_ref.rollout.name=hf")

    # -- health -------------------------------------------------------------------------------------------------

    async def check_alive(self) -> None:
        """Raise EngineDeadError when the engine's processes have died: nothing will ever be generated again."""
        if self._llm.errored:
            raise EngineDeadError(
                f"the vLLM engine has died ({self._llm.dead_error}): killed, out of memory or crashed; its last words "
                "are in the log of the rollout worker"
            )

    def totals(self) -> Mapping[str, float]:
        """Return running totals since the engine was built."""
        return self._counter.stats.as_dict()

    def close(self) -> None:
        """End the engine's processes."""
        llm, self._llm = self._llm, None
        if llm is not None:
            llm.shutdown()
            del llm
            gc.collect()  # its finaliser prints an error when the interpreter is on its way out already

    # -- building -----------------------------------------------------------------------------------------------

    def _eos_ids(self) -> set[int]:
        if self.settings.ignore_eos:
            return set()
        try:
            generation: Any = GenerationConfig.from_pretrained(self.settings.model_path)
        except OSError:  # the folder has none
            generation = None
        return eos_token_ids(self.tokenizer, self._config, generation)

    def _published_form(self) -> tuple[dict[str, tuple[tuple[int, ...], str]], dict[str, str]]:
        """Return names, shapes and dtypes of the weights as they are published, and the tied ones."""
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(
                self._config, dtype=dtype_of(self.settings.dtype), trust_remote_code=self.settings.trust_remote_code
            )
        return weight_spec(model), tied_names(model)

    def _start(self) -> tuple[Any, Any]:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.platforms import current_platform
        from vllm.v1.engine.async_llm import AsyncLLM

        from verl.workers.rollout.vllm_counter import StepCounter

        settings = self.settings
        try:
            arguments = AsyncEngineArgs(
                model=settings.model_path,
                dtype=settings.dtype,
                trust_remote_code=settings.trust_remote_code,
                max_model_len=self.max_model_len,
                max_num_seqs=settings.max_num_seqs,
                tensor_parallel_size=settings.tensor_parallel_size,
                enforce_eager=settings.enforce_eager,
                enable_prefix_caching=True,
                enable_sleep_mode=settings.may_sleep,
                logprobs_mode="processed_logprobs" if settings.exact_temperature else "raw_logprobs",
                generation_config="vllm",  # sampling is what the request says, not what a file of the model says
                worker_extension_cls=_EXTENSION,
                **self._build_options(current_platform.is_cpu()),
            )
            llm = AsyncLLM.from_vllm_config(
                arguments.create_engine_config(), stat_loggers=[StepCounter], disable_log_stats=True
            )
        except Exception as error:
            raise ModelError(f"vLLM cannot serve {settings.model_path} ({settings}): {_one_line(error)}") from error
        return llm, next(found for found in llm.logger_manager.stat_loggers if isinstance(found, StepCounter))

    def _build_options(self, on_cpu: bool) -> dict[str, Any]:
        """Return what the two builds need to be told differently."""
        settings = self.settings
        if not on_cpu:
            return {
                "gpu_memory_utilization": settings.memory_share,
                "max_num_batched_tokens": settings.max_num_batched_tokens,
            }
        return {
            "kv_cache_memory_bytes": self._cache_bytes(),
            "block_size": _BLOCK,
            "enable_chunked_prefill": False,
            "max_num_batched_tokens": max(settings.max_num_batched_tokens, self.max_model_len, settings.max_num_seqs),
        }

    def _cache_bytes(self) -> int:
        """Return the bytes that all episodes at their longest need, at most the configured share of the memory."""
        config = self._config.get_text_config()
        heads = int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)
        width = int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
        per_token = 2 * int(config.num_hidden_layers) * heads * width * dtype_of(self.settings.dtype).itemsize
        blocks = self.settings.max_num_seqs * -(-self.max_model_len // _BLOCK) + 1
        share = int(psutil.virtual_memory().total * self.settings.memory_share)
        return min(blocks * _BLOCK * per_token // self.settings.tensor_parallel_size + 2**20, share)


def request_seed(seed: int, context_length: int) -> int:
    """Return the seed of one generation: the turns of an episode may share a seed and must not share their draws."""
    digest = hashlib.blake2b(f"{seed}/{context_length}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


@contextmanager
def _environment(eager: bool) -> Iterator[None]:
    """Set what vLLM's processes inherit, for as long as they are started."""
    # Without this the first log-prob compiles a small kernel with the system's C++ compiler.
    wanted = _ENVIRONMENT | ({"TORCH_COMPILE_DISABLE": "1"} if eager else {})
    added = {name: value for name, value in wanted.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)
