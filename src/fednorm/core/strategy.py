"""The interface of a normalization strategy.

A strategy says which tensors are shared, which stay with the client, how a layer treats a batch,
and how reported statistics merge. Everything else is written once, in `round.py`.

The ways to merge are here as well: how the statistics of many clients become one.
"""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median_low
from typing import ClassVar, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fednorm.core.aggregation import Aggregator
from fednorm.core.layer import Calibration, NormLayer, NormRule, Statistics
from fednorm.core.messages import Broadcast, LayerStats, RunningStats, ServerState
from fednorm.core.moments import Moments, pool
from fednorm.core.types import Clip, Kind, Role, Tensors

Pooling: TypeAlias = Callable[[Sequence[Moments], Aggregator], Moments]


@dataclass(frozen=True, slots=True)
class MergeInput:
    """What the server hands to a strategy for one layer: the reports, and how to combine them."""

    reports: Sequence[LayerStats]
    examples: Sequence[int]  # one for each report, whose moments say what they weigh
    aggregator: Aggregator
    layer: NormLayer

    @property
    def num_batches(self) -> int:
        """The layer's counter after the round: the maximum.

        A robust rule trusts no single client; it takes the median, which Byzantine clients cannot
        move out of the range of the others.
        """
        counters = [report.num_batches for report in self.reports]
        return max(counters) if self.aggregator.uses_weights else median_low(counters)

    @property
    def calls(self) -> list[list[Moments]]:
        """The clients' moments, by the call of the layer in a step that they belong to.

        Where clients call the layer unequally often, each client's calls are merged.
        """
        if len({len(report.calls) for report in self.reports}) > 1:
            return [[report.join_calls() for report in self.reports]]
        return [list(call) for call in zip(*(r.calls for r in self.reports), strict=True)]


def average(merge: MergeInput) -> RunningStats:
    """Average the clients' running statistics, as FedAvg does.

    The variance lacks the spread between clients: the known flaw of this rule, kept on purpose.
    """
    if len(merge.reports) == 1 and merge.aggregator.uses_weights:
        only = merge.reports[0].moments
        return RunningStats(only.mean, only.var, merge.num_batches)
    return average_weighted(merge, merge.examples)


def average_weighted(merge: MergeInput, weights: Sequence[float]) -> RunningStats:
    """Average means and variances over the clients, each with its weight."""
    shares = torch.tensor(weights, dtype=torch.float64)
    means = torch.stack([r.moments.mean for r in merge.reports])
    variances = torch.stack([r.moments.var for r in merge.reports])
    return RunningStats(
        mean=merge.aggregator(means, shares),
        var=merge.aggregator(variances, shares),
        num_batches=merge.num_batches,
    )


def ema_update(previous: RunningStats, merge: MergeInput, pooling: Pooling = pool) -> RunningStats:
    """Pool the clients' moments and let the running statistics follow them once.

    A round of E steps moves them by `1 - (1-β)^E`, as E single steps would. Where a step calls the
    layer several times, they follow each call in turn, as on one machine.
    """
    total = find_rate(previous, merge.num_batches, merge.layer.momentum)
    rates = _call_rates(total, merge.layer.momentum, len(merge.calls))
    mean, var = previous.mean, previous.var
    for rate, moments in zip(rates, merge.calls, strict=True):
        pooled = pooling(moments, merge.aggregator)
        mean = torch.lerp(mean, pooled.mean, rate)
        var = torch.lerp(var, pooled.unbiased_var, rate)
    return RunningStats(mean, var, merge.num_batches)


def find_rate(previous: RunningStats, batches: int, momentum: float | None) -> float:
    """Return the share of the running statistics that a round ending at counter `batches` replaces.

    >>> find_rate(RunningStats(torch.zeros(1), torch.ones(1), 4), 6, momentum=0.1)
    0.18999999999999995
    >>> find_rate(RunningStats(torch.zeros(1), torch.ones(1), 4), 6, momentum=None)
    0.3333333333333333
    """
    steps = batches - previous.num_batches
    return steps / batches if momentum is None else 1 - (1 - momentum) ** steps


def _call_rates(total: float, momentum: float | None, calls: int) -> list[float]:
    """Return the rate of each call in turn, such that in the end each has its weight.

    The batches of a round come in turns: first call of step 1, second call of step 1, …, first call
    of step 2, …; a batch that is followed by t others weighs β(1-β)^t.
    """
    keep = 1.0 if momentum is None else 1.0 - momentum
    shares = [keep ** (calls - 1 - call) for call in range(calls)]
    rates, left = [], 1.0
    for share in reversed(shares):
        weight = total * share / sum(shares)
        rates.append(weight / left if left > 0 else 0.0)
        left -= weight
    return rates[::-1]


def pool_statistics(merge: MergeInput) -> RunningStats:
    """Pool the clients' moments, and drop the previous statistics."""
    pooled = pool([r.moments for r in merge.reports], merge.aggregator)
    return RunningStats(pooled.mean, pooled.unbiased_var, merge.num_batches)


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

    def describe(self) -> list[str]:
        """Return short sentences that say what was replaced, what that lost, and what was skipped.

        >>> two = (Replacement(p, "BatchNorm2d", "Removed", "γ and β are dropped") for p in "ab")
        >>> Conversion(nn.Identity(), tuple(two)).describe()
        ['2 layers BatchNorm2d → Removed', '2 layers: γ and β are dropped']
        """
        kinds = Counter(f"{one.before} → {one.after}" for one in self.replaced)
        notes = Counter(one.note for one in self.replaced if one.note)
        return [
            *(f"{_count_layers(count)} {kind}" for kind, count in kinds.items()),
            *(f"{_count_layers(count)}: {note}" for note, count in notes.items()),
            *(f"skipped {one.path!r} ({one.type}): {one.reason}" for one in self.skipped),
        ]


def _count_layers(count: int) -> str:
    return f"{count} layer{'' if count == 1 else 's'}"


def _refuse(_layer: NormLayer, _x: Tensor) -> Tensor:
    raise NotImplementedError(
        "the strategy converts to layers that follow a rule, but returns none; override its rule()."
    )


# Of strategies whose models have no layer that follows one.
NO_RULE = NormRule("shared", tracks=False, reports="nothing", normalize=_refuse)

SHARED: Mapping[Kind, Role] = {
    Kind.AFFINE: Role.SHARED,
    Kind.STATISTIC: Role.STATISTIC,
    Kind.COUNTER: Role.STATISTIC,
}


class Strategy(ABC):
    """A normalization strategy; by default everything is shared and the server remembers nothing.

    A method is a frozen dataclass that derives from this; its fields are its hyper-parameters.
    """

    # Whether clients report running statistics ("average") or moments ("pool").
    statistics: Statistics = "average"
    # What is done with the tensors of normalization layers.
    roles: ClassVar[Mapping[Kind, Role]] = SHARED
    # Whether a client normalises by its own batches, so that a batch of one value has no variance.
    needs_batch_statistics: ClassVar[bool] = False
    # Whether clients wait for each other within a round.
    exchanges: ClassVar[bool] = False
    # When the clients' statistics are measured in a pass without training.
    calibration: ClassVar[Calibration] = "never"
    # Whether a client begins its round with such a pass, whose statistics it reports.
    measures: ClassVar[bool] = False
    # Whether sums over the clients' moments are all that `merge` needs.
    merges_sums: ClassVar[bool] = True
    # Rounds of learning-rate warm-up, unless the algorithm sets its own.
    warmup: ClassVar[int] = 0
    # What to try if training with fixed statistics diverges, as a sentence; empty if unknown.
    remedy: ClassVar[str] = ""

    @property
    def mergeable_batches(self) -> bool:
        """Whether a one-step round is exact on the union of the clients' batches.

        It is where each sample is treated by itself, with the same constants for all clients. A
        strategy that normalises by batches says True if its rule keeps clients apart and its
        `merge` needs no client's report by itself.
        """
        return not self.needs_batch_statistics

    @abstractmethod
    def convert(self, model: nn.Module) -> Conversion:
        """Return a converted copy of a model."""

    def role(self, module: nn.Module, kind: Kind) -> Role:
        """Return what is done with a tensor of this kind, owned by this module."""
        return self.roles[kind] if isinstance(module, _BatchNorm | NormLayer) else Role.SHARED

    def rates(self, model: nn.Module) -> Mapping[nn.Parameter, float]:  # noqa: ARG002 (for those that change it)
        """Return by what the learning rate of parameters is multiplied, where that is not 1."""
        return {}

    def clips(self, model: nn.Module) -> Mapping[nn.Parameter, Clip]:  # noqa: ARG002 (as above)
        """Return how gradients of parameters are clipped before each step, where they are."""
        return {}

    def rule(self, broadcast: Broadcast) -> NormRule:  # noqa: ARG002 (as above)
        """Return how layers treat batches in this round."""
        return NO_RULE

    def trains_affine(self, broadcast: Broadcast) -> bool:  # noqa: ARG002 (as above)
        """Return whether γ and β of BatchNorm layers learn in this round."""
        return True

    def reports(self, broadcast: Broadcast) -> bool:
        """Return whether layers report statistics in this round."""
        rule = self.measure_rule() if self.measures else self.rule(broadcast)
        return rule.reports != "nothing"

    def merge(self, previous: RunningStats, merge: MergeInput) -> RunningStats:
        """Return a layer's shared running statistics after a round."""
        return ema_update(previous, merge) if self.statistics == "pool" else average(merge)

    def measure_rule(self) -> NormRule:
        """Return how layers treat a client's data in a pass before it trains."""
        return NO_RULE

    def calibration_rule(self) -> NormRule:
        """Return how layers treat batches in a calibration pass."""
        return NO_RULE

    def adaptation_rule(self) -> NormRule:
        """Return how layers treat a client's batches while it re-estimates its statistics."""
        return NO_RULE

    def adopt(self, previous: RunningStats, merge: MergeInput) -> RunningStats:  # noqa: ARG002 (as above)
        """Return a layer's shared running statistics after a calibration pass."""
        return pool_statistics(merge)

    def remember(
        self,
        before: ServerState,  # noqa: ARG002 (as above)
        running: Mapping[str, RunningStats],  # noqa: ARG002 (as above)
    ) -> Tensors:
        """Return the strategy state that the server keeps for later rounds."""
        return {}
