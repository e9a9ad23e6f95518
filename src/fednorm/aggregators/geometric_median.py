"""Geometric median by the smoothed Weiszfeld algorithm: RFA.

Pillutla, Kakade and Harchaoui, "Robust Aggregation for Federated Learning", IEEE Transactions on
Signal Processing 2022, arXiv:1912.13445; after Weiszfeld, 1937.

Server: the point with the least sum of distances to all vectors, found by averaging them again and
again, each weighing the inverse of its distance to the last point (of `smoothing` where that is
nearer). Every point on the way is a weighted sum of the vectors, so only their inner products are
needed until the end.

Deviation: the start is a majority of near vectors instead of the mean, which one vector of 1e30
would send so far away that hundreds of steps would be needed to come back.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fednorm.aggregators.base import Start, VectorRule, check_start, initial_weights
from fednorm.aggregators.rows import Vectors
from fednorm.registry import param

_SETTLED = 1e-9  # change of the weights in one step


@dataclass(frozen=True)
class GeometricMedian(VectorRule):
    """The point with the least sum of distances to all vectors."""

    name: ClassVar[str] = "geometric_median"

    smoothing: float = param(1e-6, "distances below this count as this; above 0")
    iterations: int = param(100, "steps at most; it ends when the weights have settled")
    start: Start = param("half", "'half', a majority of near vectors, or 'zero'")

    def __post_init__(self) -> None:
        """Check the settings."""
        super().__post_init__()
        check_start(self.name, self.start, self.iterations)
        if not self.smoothing > 0:
            raise ValueError(f"{self.name} needs smoothing above 0, not {self.smoothing!r}.")

    def coefficients(self, vectors: Vectors) -> Tensor:
        """Weigh each vector by the inverse of its distance to the last point, again and again."""
        weights = initial_weights(vectors, self.start)
        for _ in range(self.iterations):
            near = 1 / vectors.distances_to(weights).clamp_min(self.smoothing)
            last, weights = weights, near / near.sum()
            if (weights - last).abs().max() < _SETTLED:
                break
        return weights
