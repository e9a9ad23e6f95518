"""Krum and Multi-Krum: the vectors closest to their n-f nearest neighbours."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fednorm.aggregators.base import VectorRule
from fednorm.aggregators.rows import Vectors


@dataclass(frozen=True)
class Krum(VectorRule):
    """The vector closest to its n-f nearest vectors.

    Blanchard, El Mhamdi, Guerraoui and Stainer, "Machine Learning with Adversaries: Byzantine
    Tolerant Gradient Descent", NeurIPS 2017, arXiv:1703.02757.

    Server: a vector's score is the sum of its squared distances to its nearest n-f vectors, itself
    included; the vector with the lowest score is the result, at equal scores that of the lower
    client number. Needs n > 2f + 2.

    Deviation: the paper counts one neighbour fewer; byzfl and later analyses count as here.
    """

    name: ClassVar[str] = "krum"

    def minimum(self) -> int:
        """Return the paper's condition, n > 2f + 2."""
        return 2 * self.f + 3

    def coefficients(self, vectors: Vectors) -> Tensor:
        """Choose one vector."""
        return _average_best(_score(vectors, self.f), 1)


@dataclass(frozen=True)
class MultiKrum(Krum):
    """The mean of the n-f vectors closest to their n-f nearest vectors.

    Blanchard, El Mhamdi, Guerraoui and Stainer, "Machine Learning with Adversaries: Byzantine
    Tolerant Gradient Descent", NeurIPS 2017, arXiv:1703.02757, Section 4.

    Server: the mean of the n-f vectors with the lowest scores; at equal scores those of the lower
    client numbers. Scores and the condition on n are Krum's.
    """

    name: ClassVar[str] = "multi_krum"

    def coefficients(self, vectors: Vectors) -> Tensor:
        """Give the chosen vectors equal weights."""
        return _average_best(_score(vectors, self.f), len(vectors) - self.f)


def _score(vectors: Vectors, f: int) -> Tensor:
    """Return the sum of each vector's squared distances to its nearest n-f."""
    nearest = vectors.squared_distances.sort(dim=1).values
    return nearest[:, : len(vectors) - f].sum(1)


def _average_best(score: Tensor, count: int) -> Tensor:
    """Return the same weight for each of the `count` lowest scores, and 0 for the others."""
    # Stable: argmin may return any of several smallest.
    best = score.argsort(stable=True)[:count]
    return torch.zeros_like(score).index_fill_(0, best, 1 / count)
