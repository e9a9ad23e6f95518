"""Rows of the clients' values: one vector per client, and weighted sums of them.

Rules and pre-aggregations first see inner products, norms and distances. The values themselves are
read once more at the end, to be summed or reduced column by column.

Columns are processed in blocks, on all cores. A block fits into the cache; each core takes the next
one when it is done. Coordinate-wise rules see the values of each column sorted.
"""

import math
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache, cached_property
from itertools import chain
from typing import Self, TypeVar

import numpy as np
import torch
from torch import Tensor

from fednorm.system import count_cores, limit_threads

T = TypeVar("T")

_VALUES = 1 << 18  # in one block: 1 MB of float32
SUMMED = 1 << 20  # in a block that is only added up
_PARTS = 16  # of the columns; a core takes the next one when it is done
_FEW = 16  # rows, up to which comparing whole rows is faster than sorting columns


# Blocks


@dataclass(frozen=True)
class Scratch:
    """Memory that a thread reuses for every block: allocating takes longer than the sums."""

    kept: dict[str, Tensor] = field(default_factory=dict)

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return an uninitialised tensor on the CPU."""
        size = math.prod(shape)
        if name not in self.kept or self.kept[name].numel() < size:
            self.kept[name] = torch.empty(size, dtype=dtype)
        return self.kept[name][:size].view(shape)


def split_columns(rows: Tensor, values: int = _VALUES) -> list[slice]:
    """Split the columns of `[n, d]` into slices of about `values` values.

    >>> split_columns(torch.zeros(2, 5), values=4)
    [slice(0, 2, None), slice(2, 4, None), slice(4, 5, None)]
    """
    n, d = rows.shape
    width = max(1, values // max(1, n))
    return [slice(start, min(start + width, d)) for start in range(0, d, width)]


def map_blocks(work: Callable[[slice, Scratch], T], slices: list[slice]) -> list[T]:
    """Call `work` on every block on all cores; return the results in order."""
    own = threading.local()

    def work_on(part: list[slice]) -> list[T]:
        own.scratch = getattr(own, "scratch", Scratch())
        return [work(block, own.scratch) for block in part]

    size = math.ceil(len(slices) / _PARTS)
    parts = [slices[start : start + size] for start in range(0, len(slices), size)]
    cores = min(len(parts), count_cores())
    if cores <= 1:
        return work_on(slices)
    # The cores are busy with other blocks: torch must not split one again.
    with limit_threads(1), ThreadPoolExecutor(cores) as pool:
        return list(chain.from_iterable(pool.map(work_on, parts)))


# Order


def sort_columns(rows: Tensor, scratch: Scratch, cut: int = 0) -> Tensor:
    """Sort every column of `[n, width]`, ascending, and drop `cut` rows at each end.

    The result is in scratch memory, valid until the next block.

    >>> sort_columns(torch.tensor([[9.0, 1.0], [3.0, 2.0]]), Scratch())
    tensor([[3., 1.],
            [9., 2.]])
    """
    sort = _sort_by_network if len(rows) <= _FEW else _sort_by_numpy
    return sort(rows, scratch, slice(cut, len(rows) - cut)).to(rows.device)


def trimmed_column_mean(rows: Tensor, cut: int, scratch: Scratch) -> Tensor:
    """Return the mean of each column without its `cut` smallest and `cut` largest values.

    >>> trimmed_column_mean(torch.tensor([[9.0], [1.0], [3.0], [4.0]]), 1, Scratch())
    tensor([3.5000])
    """
    kept = sort_columns(rows, scratch, cut)
    # A product with a vector: ten times as fast as torch's mean where columns are contiguous.
    mean = kept.T @ kept.new_full((len(kept),), 1 / len(kept))
    # Rounding must not carry it beyond the values: the mean of equal values is exactly that value.
    return mean.clamp_(kept[0], kept[-1])


def _sort_by_numpy(rows: Tensor, scratch: Scratch, kept: slice) -> Tensor:
    # numpy sorts short contiguous rows with vector instructions; torch takes ten times as long.
    columns = scratch.take("columns", (rows.shape[1], len(rows)), rows.dtype)
    array = columns.numpy()
    array[:] = rows.cpu().numpy().T
    array.sort(axis=1)
    return columns[:, kept].T


def _sort_by_network(rows: Tensor, scratch: Scratch, kept: slice) -> Tensor:
    n, width = rows.shape
    memory = scratch.take("rows", (n + 1, width), rows.dtype)
    memory[:n].copy_(rows)
    lines = [*memory.numpy()]
    *places, spare = range(n + 1)  # the position of each line in memory, and a free one
    for low, high in sorting_network(n):
        smaller, larger = lines[places[low]], lines[places[high]]
        np.minimum(smaller, larger, out=lines[spare])
        np.maximum(smaller, larger, out=larger)
        places[low], spare = spare, places[low]
    chosen = torch.tensor(places[kept])
    out = scratch.take("ordered", (len(chosen), width), rows.dtype)
    return torch.index_select(memory, 0, chosen, out=out)


@cache
def sorting_network(n: int) -> tuple[tuple[int, int], ...]:
    """Return the pairs to compare and exchange, in order, to sort `n` values.

    Batcher's merge exchange, Knuth, The Art of Computer Programming 3, 5.2.2, algorithm M.

    >>> sorting_network(3)
    ((0, 2), (0, 1), (1, 2))
    """
    pairs: list[tuple[int, int]] = []
    half = 1 << max(0, (n - 1).bit_length() - 1)
    run = half if n > 1 else 0
    while run:
        apart, bit, reach = run, 0, half
        while True:
            pairs += [(i, i + apart) for i in range(n - apart) if i & run == bit]
            if reach == run:
                break
            apart, bit, reach = reach - run, run, reach // 2
        run //= 2
    return tuple(pairs)


# Rows closer than 3e-7 of their norms differ by rounding alone.
_ROUNDING = 1e-13
_SMALL = 1e-30
_PIECE = 1024  # values
_LARGEST = 1e140  # its square is not beyond float64


def as_rows(values: Tensor) -> Tensor:
    """Return `[clients, *shape]` as `[clients, d]`, in a type that rules can compute in.

    16 bits are too few for sums, and integers have no fractions. If squares would overflow float64,
    values are clamped: beyond that, a larger value makes no difference.
    """
    rows = values.reshape(len(values), -1)
    if not rows.is_floating_point():
        return rows.double()
    if rows.dtype.itemsize < torch.float32.itemsize:
        return rows.float()
    if rows.dtype is torch.float64 and any(abs(end) > _LARGEST for end in rows.aminmax()):
        return rows.clamp(-_LARGEST, _LARGEST)
    return rows


@dataclass(frozen=True)
class Vectors:
    """Rows `[n, d]`, or, after pre-aggregation, weighted sums of them.

    Inner products are in float64: products of float32 values are exact, vectors of 1e30 do not
    overflow, and the remaining rounding error is below that of the values themselves.
    """

    rows: Tensor
    before: Self | None = None
    step: Tensor | None = None  # the matrix that made these vectors from `before`

    def mix(self, step: Tensor) -> "Vectors":
        """Return the weighted sums of these vectors; each row of `step` `[m, n]` holds weights."""
        return Vectors(self.rows, self, step)

    def __len__(self) -> int:
        return len(self.rows if self.step is None else self.step)

    @cached_property
    def mixing(self) -> Tensor | None:
        """The matrix that makes these vectors from the rows; None if they are the rows."""
        if self.before is None or self.before.mixing is None or self.step is None:
            return self.step
        return self.step @ self.before.mixing

    @cached_property
    def gram(self) -> Tensor:
        """The inner products of all pairs, on the CPU.

        >>> Vectors(torch.tensor([[3.0, 4.0], [1.0, 0.0]])).gram
        tensor([[25.,  3.],
                [ 3.,  1.]], dtype=torch.float64)
        """
        if self.before is not None and self.step is not None:
            return self.step @ self.before.gram @ self.step.T
        return _add_blocks(self.rows, lambda wide: wide @ wide.T)

    @cached_property
    def squared_norms(self) -> Tensor:
        """The inner product of each vector with itself, without computing all pairs."""
        if self.step is not None:
            return self.gram.diagonal()
        squares = _add_squares(self.rows)
        # Outside this range squares may overflow or underflow float32.
        if ((squares > _SMALL) & (squares < 1 / _SMALL)).all():
            return squares
        return _add_blocks(self.rows, lambda wide: wide.square_().sum(1))

    @cached_property
    def squared_distances(self) -> Tensor:
        """The squared distance of every pair; exactly 0 for equal vectors.

        >>> Vectors(torch.tensor([[3.0, 4.0], [0.0, 0.0]])).squared_distances
        tensor([[ 0., 25.],
                [25.,  0.]], dtype=torch.float64)
        """
        norms = self.gram.diagonal()
        sums = norms[:, None] + norms
        squared = sums - 2 * self.gram
        return torch.where(squared <= _ROUNDING * sums, 0, squared)

    def distances_to(self, coefficients: Tensor) -> Tensor:
        """Return each vector's distance to the sum of all, weighted by `coefficients`."""
        if not coefficients.any():
            return self.squared_norms.sqrt()
        inner = self.gram @ coefficients
        squared = self.gram.diagonal() - 2 * inner + coefficients @ inner
        return squared.clamp_min(0).sqrt()


def _add_squares(rows: Tensor) -> Tensor:
    """Return the squared norms: float32 within pieces, float64 over pieces."""
    count = rows.shape[1] // _PIECE
    pieces = rows[:, : count * _PIECE].reshape(len(rows), count, _PIECE)
    rest = rows[:, None, count * _PIECE :]
    norms = [torch.linalg.vector_norm(part, dim=2) for part in (pieces, rest)]
    return torch.cat(norms, 1).to("cpu", torch.float64).square().sum(1)


def _add_blocks(rows: Tensor, measure: Callable[[Tensor], Tensor]) -> Tensor:
    """Return the sum of what `measure` returns for every block of columns in float64."""

    def work(block: slice, scratch: Scratch) -> Tensor:
        part = rows[:, block]
        return measure(scratch.take("wide", tuple(part.shape), torch.float64).copy_(part))

    first, *more = map_blocks(work, split_columns(rows))
    return sum(more, first)


def sum_vectors(coefficients: Tensor, vectors: Vectors) -> Tensor:
    """Return the weighted sum of the vectors, without reading rows of weight 0.

    >>> vectors = Vectors(torch.tensor([[torch.inf, 1.0], [2.0, 4.0]]))
    >>> sum_vectors(torch.tensor([0.0, 0.5]), vectors)
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
        buffer = _take_buffer("used", shape, rows, scratch)
        part = torch.index_select(rows[:, block], 0, used, out=buffer)
        torch.mv(part.T, weights[used], out=result[block])

    map_blocks(work, split_columns(rows, SUMMED))
    return result


def reduce_columns(reduce: Callable[[Tensor, Scratch], Tensor], vectors: Vectors) -> Tensor:
    """Apply `reduce`, block by block, to the columns of the vectors."""
    rows, mixing = vectors.rows, vectors.mixing
    result = rows.new_empty(rows.shape[1])
    matrix = None if mixing is None else mixing.to(rows)

    def work(block: slice, scratch: Scratch) -> None:
        part = rows[:, block]
        result[block] = reduce(part if matrix is None else _mix(matrix, part, scratch), scratch)

    map_blocks(work, split_columns(rows))
    return result


def _mix(matrix: Tensor, block: Tensor, scratch: Scratch) -> Tensor:
    shape = (len(matrix), block.shape[1])
    return torch.mm(matrix, block, out=_take_buffer("mixed", shape, block, scratch))


def _take_buffer(name: str, shape: tuple[int, int], like: Tensor, scratch: Scratch) -> Tensor:
    if like.device.type != "cpu":
        return like.new_empty(shape)
    return scratch.take(name, shape, like.dtype)
