"""The one pass that turns the clients' rows into the result."""

from collections.abc import Callable

import torch
from torch import Tensor

from fednorm.aggregators.blocks import SUMMED, Scratch, blocks, each
from fednorm.aggregators.vectors import Vectors

_LARGEST = 1e140


def materialised(vectors: Vectors) -> Tensor:
    """Return the values of vectors that are sums of rows."""
    rows, mixing = vectors.rows, vectors.mixing
    if mixing is None:
        return rows.clone()
    result = rows.new_empty(len(mixing), rows.shape[1])
    matrix = mixing.to(rows)

    def work(block: slice, scratch: Scratch) -> None:
        result[:, block] = _mixed(matrix, rows[:, block], scratch)

    each(work, blocks(rows))
    return result


def weighted_sum(coefficients: Tensor, vectors: Vectors) -> Tensor:
    """Return the sum of vectors by their weights; rows of weight 0 are not even read.

    >>> vectors = Vectors(torch.tensor([[torch.inf, 1.0], [2.0, 4.0]]))
    >>> weighted_sum(torch.tensor([0.0, 0.5]), vectors)
    tensor([1., 2.])
    """
    rows, mixing = vectors.rows, vectors.mixing
    weights = (coefficients if mixing is None else coefficients @ mixing).to(rows)
    used = weights.nonzero().flatten()
    if len(used) == 1:
        return rows[used[0]] * weights[used]
    if len(used) == len(rows):
        return torch.mv(rows.T, weights)
    result = rows.new_empty(rows.shape[1])

    def work(block: slice, scratch: Scratch) -> None:
        shape = (len(used), rows[:, block].shape[1])
        buffer = _buffer("used", shape, rows, scratch)
        part = torch.index_select(rows[:, block], 0, used, out=buffer)
        torch.mv(part.T, weights[used], out=result[block])

    each(work, blocks(rows, SUMMED))
    return result


def reduced(reduce: Callable[[Tensor, Scratch], Tensor], vectors: Vectors) -> Tensor:
    """Return what `reduce` makes of the columns."""
    rows, mixing = vectors.rows, vectors.mixing
    result = rows.new_empty(rows.shape[1])
    matrix = None if mixing is None else mixing.to(rows)

    def work(block: slice, scratch: Scratch) -> None:
        part = rows[:, block]
        result[block] = reduce(part if matrix is None else _mixed(matrix, part, scratch), scratch)

    each(work, blocks(rows))
    return result


def _mixed(matrix: Tensor, block: Tensor, scratch: Scratch) -> Tensor:
    shape = (len(matrix), block.shape[1])
    return torch.mm(matrix, block, out=_buffer("mixed", shape, block, scratch))


def _buffer(name: str, shape: tuple[int, int], like: Tensor, scratch: Scratch) -> Tensor:
    if like.device.type != "cpu":
        return like.new_empty(shape)
    return scratch.take(name, shape, like.dtype)


def as_rows(values: Tensor) -> Tensor:
    """Return `[clients, *shape]` as `[clients, d]`, in a type in which rules can compute.

    16 bits are too few for sums, and integers have no halves. Where the square of a vector would
    be beyond float64, values are cut to what is not: that far away, farther makes no difference.
    """
    rows = values.reshape(len(values), -1)
    if not rows.is_floating_point():
        return rows.double()
    if rows.dtype.itemsize < torch.float32.itemsize:
        return rows.float()
    if rows.dtype is torch.float64 and any(abs(end) > _LARGEST for end in rows.aminmax()):
        return rows.clamp(-_LARGEST, _LARGEST)
    return rows
