"""The plain mean of what pre-aggregation leaves; alone, `mean` is the weighted mean of FedAvg."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fednorm.aggregators.base import VectorRule
from fednorm.aggregators.vectors import Vectors


@dataclass(frozen=True)
class Mean(VectorRule):
    """The mean of all rows, each weighing the same."""

    name: ClassVar[str] = "mean"

    def coefficients(self, vectors: Vectors) -> Tensor:
        """Give every row the same weight."""
        return torch.full((len(vectors),), 1 / len(vectors), dtype=torch.float64)
