"""The ways in which the statistics of many clients become one."""

import torch

from fednorm.core.aggregator import trusts
from fednorm.core.messages import Running
from fednorm.core.moments import pool
from fednorm.core.strategy import Merge


def average(merge: Merge) -> Running:
    """Average the clients' running statistics, as FedAvg does.

    The variance lacks the spread between clients: the known flaw of this rule, kept on purpose.
    """
    if len(merge.reports) == 1 and trusts(merge.aggregate):
        only = merge.reports[0].moments
        return Running(only.mean, only.var, merge.batches)
    weights = torch.tensor(merge.examples, dtype=torch.float64)
    means = torch.stack([r.moments.mean for r in merge.reports])
    variances = torch.stack([r.moments.var for r in merge.reports])
    return Running(
        mean=merge.aggregate(means, weights),
        var=merge.aggregate(variances, weights),
        batches=merge.batches,
    )


def follow(previous: Running, merge: Merge) -> Running:
    """Pool the clients' moments and let the running statistics follow them once.

    A round of E steps moves them by `1 - (1-β)^E`, as E single steps would.
    """
    after = merge.batches
    pooled = pool([r.moments for r in merge.reports], merge.aggregate)
    rate = find_rate(previous, after, merge.layer.momentum)
    return Running(
        mean=torch.lerp(previous.mean, pooled.mean, rate),
        var=torch.lerp(previous.var, pooled.unbiased_var, rate),
        batches=after,
    )


def find_rate(previous: Running, batches: int, momentum: float | None) -> float:
    """Return how much of the running statistics a round replaces that ends at a counter.

    >>> find_rate(Running(torch.zeros(1), torch.ones(1), batches=4), 6, momentum=0.1)
    0.18999999999999995
    >>> find_rate(Running(torch.zeros(1), torch.ones(1), batches=4), 6, momentum=None)
    0.3333333333333333
    """
    steps = batches - previous.batches
    return steps / batches if momentum is None else 1 - (1 - momentum) ** steps


def replaced(merge: Merge) -> Running:
    """Pool the clients' moments and forget what was before."""
    pooled = pool([r.moments for r in merge.reports], merge.aggregate)
    return Running(pooled.mean, pooled.unbiased_var, merge.batches)
