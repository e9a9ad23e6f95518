"""The interface of a normalization strategy.

A strategy says which tensors are shared, which stay with the client, how a layer treats a batch,
and how reported statistics merge. Everything else is written once, in `round.py`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median_low
from typing import Protocol

from torch import nn

from fednorm.core.aggregation import Aggregator
from fednorm.core.layer import Calibration, NormLayer, NormRule, Statistics
from fednorm.core.messages import Broadcast, LayerStats, RunningStats, ServerState
from fednorm.core.moments import Moments
from fednorm.core.types import Clip, Kind, Role, Tensors


@dataclass(frozen=True, slots=True)
class Replacement:
    """One layer that a conversion replaced."""

    path: str
    before: str
    after: str
    note: str = ""  # what the replacement lacks or does otherwise, if anything


@dataclass(frozen=True, slots=True)
class SkippedLayer:
    """A layer with running statistics that a conversion left alone, and why."""

    path: str
    type: str
    reason: str


@dataclass(frozen=True, slots=True)
class Conversion:
    """A converted copy of a model, what was replaced in it, and what was not."""

    model: nn.Module
    replaced: tuple[Replacement, ...]
    skipped: tuple[SkippedLayer, ...] = ()


@dataclass(frozen=True, slots=True)
class MergeInput:
    """What the server hands to a strategy for one layer: who reported, and how to combine."""

    reports: Sequence[LayerStats]
    examples: Sequence[int]  # one for each report, whose moments say what they weigh
    aggregator: Aggregator
    layer: NormLayer

    @property
    def num_batches(self) -> int:
        """The layer's counter after the round: the maximum.

        A robust rule trusts no single client; it takes the median, which liars cannot move out of
        the range of the others.
        """
        counters = [report.num_batches for report in self.reports]
        return max(counters) if self.aggregator.uses_weights else median_low(counters)

    @property
    def calls(self) -> list[list[Moments]]:
        """The clients' moments, by the call of the layer in a step that they belong to.

        Where clients call the layer unequally often, the calls of each are put together.
        """
        if len({len(report.calls) for report in self.reports}) > 1:
            return [[report.join_calls() for report in self.reports]]
        return [list(call) for call in zip(*(r.calls for r in self.reports), strict=True)]


class NormStrategy(Protocol):
    """A frozen dataclass; its fields are its hyper-parameters."""

    @property
    def statistics(self) -> Statistics:
        """Whether clients report running statistics (`average`) or moments (`pool`)."""
        ...

    @property
    def mergeable_batches(self) -> bool:
        """Whether rounds are exact with the batches of all clients in one."""
        ...

    @property
    def exchanges(self) -> bool:
        """Whether clients wait for each other within a round."""
        ...

    @property
    def calibration(self) -> Calibration:
        """When the clients' statistics are measured in a pass without training."""
        ...

    @property
    def measures(self) -> bool:
        """Whether a client begins its round with such a pass, whose statistics it reports."""
        ...

    def measure_rule(self) -> NormRule:
        """Return how layers treat a client's data in a pass before it trains."""
        ...

    def role(self, module: nn.Module, kind: Kind) -> Role:
        """Return what is done with a tensor of this kind, owned by this module."""
        ...

    @property
    def needs_batch_statistics(self) -> bool:
        """Whether a client normalises by its own batches, so that one value has no variance."""
        ...

    def convert(self, model: nn.Module) -> Conversion:
        """Return a converted copy of a model."""
        ...

    def rates(self, model: nn.Module) -> Mapping[nn.Parameter, float]:
        """Return by what the learning rate of parameters is multiplied, where that is not 1."""
        ...

    def clips(self, model: nn.Module) -> Mapping[nn.Parameter, Clip]:
        """Return how gradients of parameters are clipped before each step, where they are."""
        ...

    def rule(self, broadcast: Broadcast) -> NormRule:
        """Return how layers treat batches in this round."""
        ...

    def trains_affine(self, broadcast: Broadcast) -> bool:
        """Return whether γ and β of BatchNorm layers learn in this round."""
        ...

    def reports(self, broadcast: Broadcast) -> bool:
        """Return whether layers report statistics in this round."""
        ...

    def merge(self, previous: RunningStats, merge: MergeInput) -> RunningStats:
        """Return a layer's shared running statistics after a round."""
        ...

    def calibration_rule(self) -> NormRule:
        """Return how layers treat batches while the clients' statistics are surveyed."""
        ...

    def adaptation_rule(self) -> NormRule:
        """Return how layers treat a client's batches while it re-estimates its statistics."""
        ...

    def adopt(self, previous: RunningStats, merge: MergeInput) -> RunningStats:
        """Return a layer's shared running statistics after a survey."""
        ...

    def remember(self, before: ServerState, running: Mapping[str, RunningStats]) -> Tensors:
        """Return the notes that the server keeps for later rounds."""
        ...
