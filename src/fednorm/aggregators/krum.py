"""Krum: the one vector that has the nearest company.

Blanchard, El Mhamdi, Guerraoui and Stainer, "Machine Learning with Adversaries: Byzantine Tolerant
Gradient Descent", NeurIPS 2017, arXiv:1703.02757.

Server: a vector's score is the sum of its squared distances to its nearest n-f vectors, itself
included; the vector of the lowest score is the result, of equal ones that of the lower client
number. Needs n > 2f + 2.

Deviation: the paper counts one neighbour less; this is how byzfl and the analyses since do it.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fednorm.aggregators.base import VectorRule
from fednorm.aggregators.vectors import Vectors


def scores(vectors: Vectors, f: int) -> Tensor:
    """Return the sum of each vector's squared distances to its nearest n-f."""
    nearest = vectors.squared_distances.sort(dim=1).values
    return nearest[:, : len(vectors) - f].sum(1)


@dataclass(frozen=True)
class Krum(VectorRule):
    """The vector that is nearest to its n-f nearest vectors."""

    name: ClassVar[str] = "krum"

    def minimum(self) -> int:
        """Return the paper's condition, n > 2f + 2."""
        return 2 * self.f + 3

    def coefficients(self, vectors: Vectors) -> Tensor:
        """Choose one vector."""
        score = scores(vectors, self.f)
        # Stable: argmin may return any of several smallest.
        best = score.argsort(stable=True)[:1]
        return torch.zeros_like(score).index_fill_(0, best, 1)
