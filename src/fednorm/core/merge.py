"""How the statistics of many clients become one."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median_low
from typing import TypeAlias

import torch

from fednorm.core.aggregation import Aggregator
from fednorm.core.layer import NormLayer
from fednorm.core.messages import LayerStats, RunningStats
from fednorm.core.moments import Moments, pool

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
