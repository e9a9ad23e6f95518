"""Mergeable moments: the one small algebra under every method.

A batch of values is summarised per channel by its count, mean and biased variance. Merging the
summaries of all clients (Chan, Golub and LeVeque, 1979) gives what one machine that holds all the
data would have computed: the law of total variance.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Self

import torch
from torch import Tensor

from fednorm.core.aggregation import Aggregator, weighted_mean

_SHORT = (torch.bfloat16, torch.float16)  # too coarse for statistics


@dataclass(frozen=True, slots=True)
class Moments:
    """Count, mean and biased variance of the values that each channel has seen.

    >>> Moments.of(torch.tensor([[1.0], [3.0]])).merge(Moments.of(torch.tensor([[5.0]]))).mean
    tensor([3.])
    """

    count: float
    mean: Tensor
    var: Tensor
    # In a pool, if that is not the count: values may represent a larger population.
    weight: float | None = field(default=None, repr=False)

    @property
    def mass(self) -> float:
        """What these moments weigh in a pool."""
        return self.count if self.weight is None else self.weight

    @classmethod
    def of(cls, values: Tensor) -> Self:
        """Summarise a batch `[N, C, ...]` per channel.

        >>> Moments.of(torch.tensor([[1.0], [3.0]]))
        Moments(count=2.0, mean=tensor([2.]), var=tensor([1.]))
        """
        values = exact_values(values)
        if values.numel() == 0:
            return cls.empty(values.new_zeros(values.shape[1]))
        return cls(values.numel() / values.shape[1], *_mean_and_var(values))

    @classmethod
    def empty(cls, like: Tensor) -> Self:
        """Return the identity of merging: the summary of no value at all."""
        return cls(0.0, torch.zeros_like(like), torch.zeros_like(like))

    @property
    def unbiased_var(self) -> Tensor:
        """Variance with the factor n/(n-1), as torch keeps it in `running_var`."""
        return self.var * (self.count / (self.count - 1)) if self.count > 1 else self.var

    def scale(self, weight: float) -> Self:
        """Return the same distribution, weighing `weight` times as much."""
        mass = None if self.weight is None else self.weight * weight
        return type(self)(self.count * weight, self.mean, self.var, mass)

    def merge(self, other: Self) -> Self:
        """Summarise the union of two sets of values from their summaries."""
        count = self.count + other.count
        if not count:
            return self
        share = other.count / count
        delta = other.mean - self.mean
        mean = self.mean + delta * share
        within = torch.lerp(self.var, other.var, share)
        weight = None if self.weight is other.weight is None else self.mass + other.mass
        return type(self)(count, mean, within + delta**2 * (share * (1 - share)), weight)


def exact_values(values: Tensor) -> Tensor:
    """Return values in a number format that is precise enough for statistics."""
    return values.float() if values.dtype in _SHORT else values


def _mean_and_var(values: Tensor) -> tuple[Tensor, Tensor]:
    if values.device.type == "cpu":
        # BatchNorm's own kernel: there the general one takes ten times as long.
        mean, var = torch.batch_norm_update_stats(values, None, None, 0.0)
        return mean, var
    var, mean = torch.var_mean(values, [0, *range(2, values.dim())], correction=0)
    return mean, var


def pool(moments: Sequence[Moments], aggregate: Aggregator = weighted_mean) -> Moments:
    """Merge the clients' moments by the law of total variance.

    The variance of the whole is the variance within clients plus the variance between their
    means. With the weighted mean this is exact, and moments have the weight that they report; their
    counts are added, because an unbiased variance needs the number of values. With a robust rule A
    it is `A(var) + A((mean - A(mean))²)`, and every client has the median of the counts.

    >>> pool([Moments.of(torch.tensor([[0.0], [2.0]])), Moments.of(torch.tensor([[4.0], [6.0]]))])
    Moments(count=4.0, mean=tensor([3.]), var=tensor([5.]))
    """
    present = [m for m in moments if m.count > 0]
    if not present or (len(present) == 1 and aggregate.uses_weights):
        return (present or list(moments))[0]
    means = torch.stack([m.mean for m in present])
    counts = [m.count for m in present]
    weights = torch.tensor([m.mass for m in present], dtype=torch.float64)
    mean = aggregate(means, weights)
    within = aggregate(torch.stack([m.var for m in present]), weights)
    between = aggregate((means - mean) ** 2, weights)
    total = sum(counts) if aggregate.uses_weights else median(counts) * len(counts)
    return Moments(total, mean, within + between)
