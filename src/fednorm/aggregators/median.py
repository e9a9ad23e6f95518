"""Coordinate-wise median.

Yin, Chen, Kannan and Bartlett, "Byzantine-Robust Distributed Learning: Towards Optimal Statistical
Rates", ICML 2018, arXiv:1803.01498.

Server: the middle value of each coordinate; of an even number of values, the mean of the two middle
ones, as numpy does.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fednorm.aggregators.base import CoordinateRule
from fednorm.aggregators.blocks import Scratch
from fednorm.aggregators.ordered import middle


@dataclass(frozen=True)
class Median(CoordinateRule):
    """The middle value of each coordinate."""

    name: ClassVar[str] = "median"

    def reduce(self, rows: Tensor, scratch: Scratch) -> Tensor:
        """Return the median of each column."""
        return middle(rows, (len(rows) - 1) // 2, scratch)
