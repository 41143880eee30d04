"""What one rank or one engine needs for a piece of work, in seconds: from data sheets, or from a calibration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from verl.trainer.plan.architecture import Architecture
from verl.trainer.plan.devices import Efficiency, Fleet


class EngineCosts(Protocol):
    """A rollout engine."""

    def prefill(self, tokens: float, rows: int) -> float:
        """Read ``tokens`` new tokens of ``rows`` sequences."""
        ...

    def decode(self, rows: int, context: float) -> float:
        """Append one token to each of ``rows`` sequences that have ``context`` tokens together."""
        ...


class TrainCosts(Protocol):
    """One training rank."""

    def forward(self, tokens: float, scored: float, pairs: float, passes: float) -> float:
        """Score without gradients, in ``passes`` micro-batches."""
        ...

    def train(self, tokens: float, scored: float, pairs: float, passes: float) -> float:
        """Forward and backward."""
        ...

    def optimizer(self) -> float:
        """Make one optimizer step."""
        ...

    def publish(self) -> float:
        """Bring the weights to the engines."""
        ...


@dataclass(frozen=True)
class RooflineEngine:
    """The larger of arithmetic and memory time (Williams et al. 2009), over ``parallel`` devices that share a model."""

    model: Architecture
    fleet: Fleet
    by: Efficiency
    parallel: int = 1
    weight_bytes: int = 2

    def prefill(self, tokens: float, rows: int) -> float:
        """See EngineCosts; attention is left out: it is small beside the products below 10,000 tokens."""
        return self.model.flops(tokens, rows, 0.0) / self._flops + self.by.step_s

    def decode(self, rows: int, context: float) -> float:
        """See EngineCosts: weights and the keys and values of all contexts are read once a step."""
        model = self.model
        weights = (model.body_parameters + model.head_parameters) * self.weight_bytes
        read = weights + context * model.cache_elements * self.weight_bytes
        bandwidth = self.fleet.device.bandwidth * self.by.bandwidth * self.parallel
        return max(read / bandwidth, model.flops(rows, rows, context) / self._flops) + self.by.step_s

    @property
    def _flops(self) -> float:
        return self.fleet.device.flops * self.by.compute * self.parallel


@dataclass(frozen=True)
class RooflineTrainer:
    """Arithmetic, and the exchange of shards (FSDP: gathered in forward and backward, gradients scattered)."""

    model: Architecture
    fleet: Fleet
    by: Efficiency
    checkpointing: bool
    low_bytes: int
    """Bytes per element of the compute type."""
    offloaded: float = 0.0
    """Bytes of this rank that travel to the host and back around a phase."""

    def forward(self, tokens: float, scored: float, pairs: float, passes: float) -> float:
        """See TrainCosts."""
        return self.model.flops(tokens, scored, pairs) / self._flops + passes * self._gather_s

    def train(self, tokens: float, scored: float, pairs: float, passes: float) -> float:
        """See TrainCosts: backward is twice forward; checkpointing repeats the body, and the head always is."""
        body = self.model.flops(tokens, 0, pairs) * (4 if self.checkpointing else 3)
        exchange = (3 if self.checkpointing else 2) * self._gather_s + self._scatter_s
        return (body + self.model.flops(0, scored, 0) * 4) / self._flops + passes * exchange

    def optimizer(self) -> float:
        """See TrainCosts: weights, gradients and two moments in float32 are read, weights and moments written."""
        moved = self.model.parameters * 4 * 7 / self.fleet.size
        transfers = 2 * self.offloaded / (self.fleet.device.host * self.by.bandwidth)
        return moved / (self.fleet.device.bandwidth * self.by.bandwidth) + transfers

    def publish(self) -> float:
        """See TrainCosts: gathered whole, copied to host memory by one rank and read back by every engine."""
        size = self.model.parameters * 4
        return 2 * size / (self.fleet.device.host * self.by.bandwidth)

    @property
    def _flops(self) -> float:
        return self.fleet.device.flops * self.by.compute

    @property
    def _gather_s(self) -> float:
        share = (self.fleet.size - 1) / self.fleet.size
        return share * self.model.parameters * self.low_bytes / (self.fleet.link * self.by.bandwidth)

    @property
    def _scatter_s(self) -> float:
        share = (self.fleet.size - 1) / self.fleet.size
        return share * self.model.parameters * 4 / (self.fleet.link * self.by.bandwidth)


@dataclass(frozen=True)
class MeasuredEngine:
    """Straight lines through what was timed."""

    read_s: float
    """Of one reading of contexts, whatever their length."""
    token_s: float
    """Per token that is read."""
    step_s: float
    """Of one decode step, whatever its rows."""
    row_s: float
    """Per row of a step."""
    context_s: float
    """Per token of context of a row, and step."""

    def prefill(self, tokens: float, rows: int) -> float:
        """See EngineCosts."""
        return self.read_s + self.token_s * tokens

    def decode(self, rows: int, context: float) -> float:
        """See EngineCosts."""
        return self.step_s + self.row_s * rows + self.context_s * context


@dataclass(frozen=True)
class MeasuredTrainer:
    """Straight lines through what was timed on one rank; several ranks of one machine share out tokens alone."""

    forward_pass_s: float
    forward_token_s: float
    train_pass_s: float
    train_token_s: float
    optimizer_s: float
    publish_s: float

    def forward(self, tokens: float, scored: float, pairs: float, passes: float) -> float:
        """See TrainCosts."""
        return self.forward_pass_s * passes + self.forward_token_s * tokens

    def train(self, tokens: float, scored: float, pairs: float, passes: float) -> float:
        """See TrainCosts."""
        return self.train_pass_s * passes + self.train_token_s * tokens

    def optimizer(self) -> float:
        """See TrainCosts."""
        return self.optimizer_s

    def publish(self) -> float:
        """See TrainCosts."""
        return self.publish_s
