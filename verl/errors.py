"""Errors that cross a module boundary. Each names the thing, its value and the remedy; none is used for control flow.

All are picklable (they travel between processes), so each takes its message as the only positional argument.
"""

from __future__ import annotations


class ChatR1Error(Exception):
    """Base of every error a user can cause or meet; entry points print it, no traceback, and exit with ``status``."""

    status = 2


class ConfigError(ChatR1Error):
    """The configuration is wrong. The message lists every mistake, one per line."""


class DataError(ChatR1Error):
    """A data file is missing or a row of it is malformed. The message names file and line."""


class ModelError(ChatR1Error):
    """A model folder cannot be used (no tokenizer, not safetensors, wrong architecture)."""


class CheckpointError(ChatR1Error):
    """A checkpoint is incomplete, damaged or belongs to another configuration."""


class ResourceError(ChatR1Error):
    """The machine cannot do what was asked: cores, devices, ports, disk space."""


class RetrievalError(ChatR1Error):
    """The retrieval service is unreachable, answers wrongly, or serves another corpus than the data expects."""


class EngineError(ChatR1Error):
    """A rollout engine failed, or holds weights that are only partly written."""


class EngineDeadError(EngineError):
    """A rollout engine can never generate again: a process of it has ended. Its worker is left out from then on."""


class HealthError(ChatR1Error):
    """A run was stopped because a configured limit was crossed (failure rate, NaN)."""


class WatchError(HealthError):
    """A watch whose action is ``stop`` has fired. The message names figure, limit and last good checkpoint."""

    status = 3
