"""Nearest-neighbour mixing (NNM).

Allouah, Farhadkhani, Guerraoui, Gupta, Pinot and Stephan, "Fixing by Mixing: A Recipe for Optimal
Byzantine ML under Heterogeneity", AISTATS 2023, arXiv:2302.01772.

Server: replaces every vector by the mean of its n-f nearest vectors, itself included. At equal
distances the lower client number comes first.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fednorm.aggregators.base import PreAggregator
from fednorm.aggregators.rows import Vectors


@dataclass(frozen=True)
class NNM(PreAggregator):
    """Replaces every vector by the mean of its n-f nearest."""

    name: ClassVar[str] = "nnm"

    def mixing(self, vectors: Vectors) -> Tensor:
        """Give each row's n-f nearest rows equal weights, and the others 0."""
        near = len(vectors) - self.f
        distances = vectors.squared_distances
        order = torch.argsort(distances, dim=1, stable=True)
        return torch.zeros_like(distances).scatter_(1, order[:, :near], 1 / near)
