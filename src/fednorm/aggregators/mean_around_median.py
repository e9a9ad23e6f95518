"""Mean around the median (MeaMed).

Xie, Koyejo and Gupta, "Generalized Byzantine-tolerant SGD", 2018, arXiv:1802.10116.

Server: in each coordinate, the mean of the n-f values that are nearest to the median. Of values
that are equally near on either side the smaller one is taken.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fednorm.aggregators.base import CoordinateRule
from fednorm.aggregators.blocks import Scratch
from fednorm.aggregators.ordered import ordered


@dataclass(frozen=True)
class MeanAroundMedian(CoordinateRule):
    """The mean of the n-f values of each coordinate that are nearest to its median."""

    name: ClassVar[str] = "mean_around_median"

    def reduce(self, rows: Tensor, scratch: Scratch) -> Tensor:
        """Return the mean around the median of each column."""
        values = ordered(rows, scratch)
        n = len(values)
        near = n - self.f
        median = (values[(n - 1) // 2] + values[n // 2]) / 2
        # The nearest values stand side by side; each smaller one that is farther away than the
        # larger one beyond the others is passed over.
        passed = (median - values[: self.f] > values[near:] - median).sum(0)
        place = torch.arange(n, device=rows.device)[:, None]
        outside = (place < passed) | (place >= passed + near)
        return values.masked_fill_(outside, 0).sum(0) / near
