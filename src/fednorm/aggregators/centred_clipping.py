"""Centred clipping: the mean of vectors that are drawn to a centre.

Karimireddy, He and Jaggi, "Learning from History for Byzantine Robust Optimization", ICML 2021,
arXiv:2012.10333.

Server: vectors farther than `radius` from the centre are shortened to that distance, their mean is
the next centre.

Deviation: the first centre is a majority of near vectors; the paper takes the last round's result,
but a rule here has no memory (`start='zero'` is the first round of the paper). Without a radius it
is the median of the distances in each step, so that the rule needs no knowledge of the scale.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fednorm.aggregators.base import VectorRule
from fednorm.aggregators.start import Start, check_start, first
from fednorm.aggregators.vectors import Vectors
from fednorm.core.registry import param


@dataclass(frozen=True)
class CentredClipping(VectorRule):
    """The mean of the vectors, each shortened to a radius around the centre."""

    name: ClassVar[str] = "centred_clipping"

    radius: float | None = param(
        None, "how far a vector may be from the centre; None is the median of the distances"
    )
    iterations: int = param(3, "how often the centre moves; at least once")
    start: Start = param("half", "'half', a majority of near vectors, or 'zero'")

    def __post_init__(self) -> None:
        """Check the settings."""
        super().__post_init__()
        check_start(self.name, self.start, self.iterations)
        if self.radius is not None and not self.radius > 0:
            raise ValueError(f"{self.name} needs a radius above 0, not {self.radius!r}.")

    def coefficients(self, vectors: Vectors) -> Tensor:
        """Move the centre by the mean of the shortened differences."""
        weights = first(vectors, self.start)
        for _ in range(self.iterations):
            distances = vectors.distances_to(weights)
            radius = distances.median() if self.radius is None else self.radius
            kept = (radius / distances).nan_to_num(nan=1).clamp_max(1)
            weights = weights * (1 - kept.mean()) + kept / len(kept)
        return weights
