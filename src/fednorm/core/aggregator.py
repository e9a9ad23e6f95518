"""The interface of an aggregator, and the weighted mean that everything starts from."""

from typing import Protocol

import torch
from torch import Tensor


class Aggregator(Protocol):
    """Combines the clients' values of one tensor: `[clients, *shape]` becomes `[*shape]`."""

    def __call__(self, values: Tensor, weights: Tensor) -> Tensor:
        """Aggregate over the first axis; a robust rule ignores the client-reported weights."""
        ...


def weighted_mean(values: Tensor, weights: Tensor) -> Tensor:
    """Return the mean over clients, each weighing as much as its weight says.

    >>> weighted_mean(torch.tensor([[1.0], [4.0]]), torch.tensor([2.0, 1.0]))
    tensor([2.])
    """
    share = (weights / weights.sum()).to(values)
    mean: Tensor = torch.tensordot(share, values, dims=1)
    return mean


def trusts(aggregate: Aggregator) -> bool:
    """Return whether an aggregator believes what clients say of their own weight.

    Only the weighted mean does; with any other rule, counts and counters are doubted too.
    """
    return aggregate is weighted_mean
