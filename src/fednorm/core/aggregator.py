"""The interface of an aggregator, and the weighted mean that everything starts from."""

from typing import Protocol, TypeGuard, runtime_checkable

import torch
from torch import Tensor


class Aggregator(Protocol):
    """Combines the clients' values of one tensor: `[clients, *shape]` becomes `[*shape]`."""

    def __call__(self, values: Tensor, weights: Tensor) -> Tensor:
        """Aggregate over the first axis; a robust rule ignores the client-reported weights."""
        ...


@runtime_checkable
class RobustAggregator(Aggregator, Protocol):
    """An aggregator that withstands a number of Byzantine clients, and trusts no single one."""

    def check(self, n: int) -> None:
        """Raise ValueError unless so many clients are enough."""
        ...

    def without(self, faulty: int) -> Aggregator:
        """Return the rule for the replies that are left after so many were found faulty."""
        ...


def weighted_mean(values: Tensor, weights: Tensor) -> Tensor:
    """Return the mean over clients, each weighing as much as its weight says.

    >>> weighted_mean(torch.tensor([[1.0], [4.0]]), torch.tensor([2.0, 1.0]))
    tensor([2.])
    """
    if len(values) == 1:
        return values[0]
    share = (weights / weights.sum()).to(values)
    mean: Tensor = torch.tensordot(share, values, dims=1)
    return mean


def is_weighted_mean(aggregate: Aggregator) -> bool:
    """Return whether an aggregator believes what clients say of their own weight.

    Only the weighted mean does; with any other rule, counts and counters are doubted too.
    """
    return aggregate is weighted_mean


def is_robust(aggregate: Aggregator) -> TypeGuard[RobustAggregator]:
    """Return whether an aggregator withstands Byzantine clients."""
    # In this order: to look for the parts of an interface takes longer than a small mean.
    return not is_weighted_mean(aggregate) and isinstance(aggregate, RobustAggregator)
