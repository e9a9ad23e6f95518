"""Coordinate-wise trimmed mean.

Yin, Chen, Kannan and Bartlett, "Byzantine-Robust Distributed Learning: Towards Optimal Statistical
Rates", ICML 2018, arXiv:1803.01498.

Server: in each coordinate, the mean without the f smallest and the f largest values.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fednorm.aggregators.base import CoordinateRule
from fednorm.aggregators.blocks import Scratch
from fednorm.aggregators.ordered import middle


@dataclass(frozen=True)
class TrimmedMean(CoordinateRule):
    """The mean of each coordinate without its f smallest and f largest values."""

    name: ClassVar[str] = "trimmed_mean"

    def reduce(self, rows: Tensor, scratch: Scratch) -> Tensor:
        """Return the trimmed mean of each column."""
        return middle(rows, self.f, scratch)
