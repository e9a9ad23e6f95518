"""Work on blocks of columns: few enough to stay in the cache, on all cores."""

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")

_VALUES = 1 << 18  # in one block: 1 MB of float32


def blocks(rows: Tensor, values: int = _VALUES) -> list[slice]:
    """Cut the columns of `[n, d]` into slices of about so many values.

    >>> blocks(torch.zeros(2, 5), values=4)
    [slice(0, 2, None), slice(2, 4, None), slice(4, 5, None)]
    """
    n, d = rows.shape
    width = max(1, values // max(1, n))
    return [slice(start, min(start + width, d)) for start in range(0, d, width)]


def each(work: Callable[[slice], T], slices: Sequence[slice]) -> list[T]:
    """Return the results of all slices in order; several slices are worked on at once."""
    cores = min(len(slices), len(os.sched_getaffinity(0)))
    if cores <= 1:
        return [work(part) for part in slices]
    with _one_thread_each(), ThreadPoolExecutor(cores) as pool:
        return list(pool.map(work, slices))


@contextmanager
def _one_thread_each() -> Iterator[None]:
    """Keep torch from splitting the blocks again: the cores are busy with other blocks."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
