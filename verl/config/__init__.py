"""Configuration: one typed, frozen schema per program, and the loading that reports every mistake at once."""

from verl.config.base import Section, leaves
from verl.config.describe import describe
from verl.config.loading import flatten, load_config, load_sft_config
from verl.config.schema import RunConfig
from verl.config.sft_schema import SftConfig

__all__ = ["RunConfig", "Section", "SftConfig", "describe", "flatten", "leaves", "load_config", "load_sft_config"]
