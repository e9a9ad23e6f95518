"""Multi-Krum: the mean of the n-f vectors that Krum finds best.

Blanchard, El Mhamdi, Guerraoui and Stainer, "Machine Learning with Adversaries: Byzantine Tolerant
Gradient Descent", NeurIPS 2017, arXiv:1703.02757, Section 4.

Server: the mean of the n-f vectors of the lowest scores; of equal ones those of the lower client
numbers. Scores and their condition are Krum's.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fednorm.aggregators.base import VectorRule
from fednorm.aggregators.krum import scores
from fednorm.aggregators.vectors import Vectors


@dataclass(frozen=True)
class MultiKrum(VectorRule):
    """The mean of the n-f vectors that are nearest to their nearest n-f."""

    name: ClassVar[str] = "multi_krum"

    def minimum(self) -> int:
        """Return the paper's condition, n > 2f + 2."""
        return 2 * self.f + 3

    def coefficients(self, vectors: Vectors) -> Tensor:
        """Weigh the chosen vectors alike."""
        score = scores(vectors, self.f)
        best = score.argsort(stable=True)[: len(score) - self.f]
        return torch.zeros_like(score).index_fill_(0, best, 1 / len(best))
