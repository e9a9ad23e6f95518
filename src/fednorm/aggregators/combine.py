"""The one pass that turns the clients' rows into the result."""

from collections.abc import Callable

import torch
from torch import Tensor

from fednorm.aggregators.blocks import blocks, each
from fednorm.aggregators.vectors import Vectors


def materialised(vectors: Vectors) -> Tensor:
    """Return the values of vectors that are sums of rows."""
    rows, mixing = vectors.rows, vectors.mixing
    if mixing is None:
        return rows.clone()
    result = rows.new_empty(len(mixing), rows.shape[1])

    def work(block: slice) -> None:
        result[:, block] = _mixed(mixing, rows[:, block])

    each(work, blocks(rows))
    return result


def weighted_sum(coefficients: Tensor, vectors: Vectors) -> Tensor:
    """Return the sum of vectors by their weights; rows of weight 0 are not even read.

    >>> vectors = Vectors(torch.tensor([[torch.inf, 1.0], [2.0, 4.0]]))
    >>> weighted_sum(torch.tensor([0.0, 0.5]), vectors)
    tensor([1., 2.])
    """
    rows, mixing = vectors.rows, vectors.mixing
    weights = coefficients if mixing is None else coefficients @ mixing
    used = weights.nonzero().flatten().tolist()
    result = rows.new_zeros(rows.shape[1])

    def work(block: slice) -> None:
        for row in used:
            result[block].add_(rows[row, block], alpha=float(weights[row]))

    each(work, blocks(rows))
    return result


def reduced(reduce: Callable[[Tensor], Tensor], vectors: Vectors) -> Tensor:
    """Return what `reduce` makes of the columns."""
    rows, mixing = vectors.rows, vectors.mixing
    result = rows.new_empty(rows.shape[1])

    def work(block: slice) -> None:
        part = rows[:, block]
        result[block] = reduce(part if mixing is None else _mixed(mixing, part))

    each(work, blocks(rows))
    return result


def _mixed(mixing: Tensor, block: Tensor) -> Tensor:
    return mixing.to(block) @ block


def precision(dtype: torch.dtype) -> torch.dtype:
    """Return the type to compute in: 16 bits are too few for sums, and integers have no halves."""
    if not dtype.is_floating_point:
        return torch.float64
    return dtype if dtype.itemsize >= torch.float32.itemsize else torch.float32
