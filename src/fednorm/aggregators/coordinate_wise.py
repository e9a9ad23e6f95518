"""Coordinate-wise rules: mean, median, trimmed mean, and mean around the median."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fednorm.aggregators.base import CoordinateRule, VectorRule
from fednorm.aggregators.rows import Scratch, Vectors, sort_columns, trimmed_column_mean


@dataclass(frozen=True)
class Mean(VectorRule):
    """The mean of all rows with equal weights.

    This is the plain mean after pre-aggregation; alone, `mean` is the weighted mean of FedAvg.
    """

    name: ClassVar[str] = "mean"
    robust: ClassVar[bool] = False

    def coefficients(self, vectors: Vectors) -> Tensor:
        """Give every row the same weight."""
        return torch.full((len(vectors),), 1 / len(vectors), dtype=torch.float64)


@dataclass(frozen=True)
class Median(CoordinateRule):
    """The middle value of each coordinate.

    Yin, Chen, Kannan and Bartlett, "Byzantine-Robust Distributed Learning: Towards Optimal
    Statistical Rates", ICML 2018, arXiv:1803.01498.

    Server: the middle value of each coordinate; for an even number of values, the mean of the two
    middle ones, as in numpy.
    """

    name: ClassVar[str] = "median"

    def reduce(self, rows: Tensor, scratch: Scratch) -> Tensor:
        """Return the median of each column."""
        return trimmed_column_mean(rows, (len(rows) - 1) // 2, scratch)


@dataclass(frozen=True)
class TrimmedMean(CoordinateRule):
    """The mean of each coordinate without its f smallest and f largest values.

    Yin, Chen, Kannan and Bartlett, "Byzantine-Robust Distributed Learning: Towards Optimal
    Statistical Rates", ICML 2018, arXiv:1803.01498.

    Server: in each coordinate, the mean without the f smallest and the f largest values.
    """

    name: ClassVar[str] = "trimmed_mean"

    def reduce(self, rows: Tensor, scratch: Scratch) -> Tensor:
        """Return the trimmed mean of each column."""
        return trimmed_column_mean(rows, self.f, scratch)


@dataclass(frozen=True)
class MeanAroundMedian(CoordinateRule):
    """The mean of the n-f values of each coordinate that are nearest to its median (MeaMed).

    Xie, Koyejo and Gupta, "Generalized Byzantine-tolerant SGD", 2018, arXiv:1802.10116.

    Server: in each coordinate, the mean of the n-f values that are nearest to the median. If
    values on both sides are equally near, the smaller one is used.
    """

    name: ClassVar[str] = "mean_around_median"

    def reduce(self, rows: Tensor, scratch: Scratch) -> Tensor:
        """Return the mean around the median of each column."""
        values = sort_columns(rows, scratch)
        n = len(values)
        near = n - self.f
        median = (values[(n - 1) // 2] + values[n // 2]) / 2
        # The nearest values are adjacent after sorting: skip every small value that is farther from
        # the median than the next large one.
        passed = (median - values[: self.f] > values[near:] - median).sum(0)
        place = torch.arange(n, device=rows.device)[:, None]
        outside = (place < passed) | (place >= passed + near)
        return values.masked_fill_(outside, 0).sum(0) / near
