"""Work on blocks of columns: few enough to stay in the cache, on all cores."""

import math
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")

_VALUES = 1 << 18  # in one block: 1 MB of float32
SUMMED = 1 << 20  # in a block that is only added up
_PARTS = 16  # of the columns; a core takes the next when it is done with one


@dataclass(frozen=True)
class Scratch:
    """Memory that a thread uses again for every block: getting it anew takes longer than sums."""

    kept: dict[str, Tensor] = field(default_factory=dict)

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return a tensor on the CPU whose values are those that somebody left there."""
        size = math.prod(shape)
        if name not in self.kept or self.kept[name].numel() < size:
            self.kept[name] = torch.empty(size, dtype=dtype)
        return self.kept[name][:size].view(shape)


def blocks(rows: Tensor, values: int = _VALUES) -> list[slice]:
    """Cut the columns of `[n, d]` into slices of about so many values.

    >>> blocks(torch.zeros(2, 5), values=4)
    [slice(0, 2, None), slice(2, 4, None), slice(4, 5, None)]
    """
    n, d = rows.shape
    width = max(1, values // max(1, n))
    return [slice(start, min(start + width, d)) for start in range(0, d, width)]


def each(work: Callable[[slice, Scratch], T], slices: list[slice]) -> list[T]:
    """Return the results of all blocks in order."""
    own = threading.local()

    def several(part: list[slice]) -> list[T]:
        own.scratch = getattr(own, "scratch", Scratch())
        return [work(block, own.scratch) for block in part]

    size = math.ceil(len(slices) / _PARTS)
    parts = [slices[start : start + size] for start in range(0, len(slices), size)]
    cores = min(len(parts), _cores())
    if cores <= 1:
        return several(slices)
    with _one_thread_each(), ThreadPoolExecutor(cores) as pool:
        return list(chain.from_iterable(pool.map(several, parts)))


def _cores() -> int:
    """Return how many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@contextmanager
def _one_thread_each() -> Iterator[None]:
    """Keep torch from splitting the blocks again: the cores are busy with other blocks."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
