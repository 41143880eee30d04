"""Running totals of a vLLM engine, added up at every engine step from what vLLM reports of it."""

from __future__ import annotations

from typing import Any

from vllm.v1.metrics.loggers import PrometheusStatLogger

from verl.workers.rollout.state import EngineStats


class StepCounter(PrometheusStatLogger):
    """vLLM calls ``record`` once per engine step, with the step's own figures.

    It says that it is the Prometheus logger because vLLM would add one of its own otherwise: hundreds of gauges that
    nobody reads, updated at every step. Nothing of that class is used.
    """

    def __init__(self, vllm_config: Any, engine_indexes: list[int] | None = None) -> None:
        self.stats = EngineStats()

    def record(
        self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
    ) -> None:
        """Add one engine step; every row that is decoded gets one token in it."""
        if iteration_stats is None:
            return
        prompts, tokens = iteration_stats.prompt_token_stats, iteration_stats.num_generation_tokens
        self.stats.generated_tokens += tokens
        self.stats.prefilled_tokens += prompts.computed
        self.stats.reused_tokens += prompts.cached_tokens
        self.stats.decode_steps += tokens > 0
        self.stats.decode_rows += tokens

    def log(self) -> None:
        """Nothing: the worker reports."""

    def log_engine_initialized(self) -> None:
        """Nothing: the worker reports."""

    def record_sleep_state(self, sleep: int = 0, level: int = 0) -> None:
        """Nothing: sleeping is no figure."""
