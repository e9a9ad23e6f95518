"""Geometric median by the smoothed Weiszfeld algorithm: RFA.

Pillutla, Kakade and Harchaoui, "Robust Aggregation for Federated Learning", IEEE Transactions on
Signal Processing 2022, arXiv:1912.13445; after Weiszfeld, 1937.

Server: the point with the least sum of distances to all vectors, found by repeatedly averaging them
with the inverse of their distance to the last point as weights (at least `smoothing`). Every
intermediate point is a weighted sum of the vectors, so only their inner products are needed until
the end.

Deviation: it starts from a majority of near vectors instead of the mean, which a single vector of
1e30 moves so far away that hundreds of steps are needed to return.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fednorm.aggregators.base import Start, VectorRule, check_start, initial_weights
from fednorm.aggregators.rows import Vectors
from fednorm.registry import param

_CONVERGED = 1e-9  # change of the weights in one step


@dataclass(frozen=True)
class GeometricMedian(VectorRule):
    """The point with the least sum of distances to all vectors."""

    name: ClassVar[str] = "geometric_median"

    smoothing: float = param(1e-6, "lower bound of the distances; above 0")
    iterations: int = param(1000, "maximum number of steps; it stops once the weights converge")
    start: Start = param("half", "'half', a majority of near vectors, or 'zero'")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_start(self.name, self.start, self.iterations)
        if not self.smoothing > 0:
            raise ValueError(f"{self.name} needs smoothing above 0, not {self.smoothing!r}.")

    def coefficients(self, vectors: Vectors) -> Tensor:
        """Iterate: weigh each vector by the inverse of its distance to the last point."""
        weights = initial_weights(vectors, self.start)
        for _ in range(self.iterations):
            near = 1 / vectors.distances_to(weights).clamp_min(self.smoothing)
            last, weights = weights, near / near.sum()
            if (weights - last).abs().max() < _CONVERGED:
                break
        return weights
