"""Nearest-neighbour mixing (NNM).

Allouah, Farhadkhani, Guerraoui, Gupta, Pinot and Stephan, "Fixing by Mixing: A Recipe for Optimal
Byzantine ML under Heterogeneity", AISTATS 2023, arXiv:2302.01772.

Server: every vector becomes the mean of its n-f nearest vectors, itself included. Of vectors that
are equally far the one of the lower client number is taken.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fednorm.aggregators.base import PreAggregator
from fednorm.aggregators.rows import Vectors


@dataclass(frozen=True)
class NNM(PreAggregator):
    """Every vector becomes the mean of its n-f nearest."""

    name: ClassVar[str] = "nnm"

    def mixing(self, vectors: Vectors) -> Tensor:
        """Weigh each row's neighbours alike and the others not at all."""
        near = len(vectors) - self.f
        distances = vectors.squared_distances
        order = torch.argsort(distances, dim=1, stable=True)
        return torch.zeros_like(distances).scatter_(1, order[:, :near], 1 / near)
