"""Process the clients' values in blocks of columns on all cores, and sort columns.

A block of columns fits into the cache; each core takes the next block when it is done.
Coordinate-wise rules see the values of each column sorted.
"""

import math
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from itertools import chain
from typing import TypeVar

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
