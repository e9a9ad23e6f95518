"""Norm clipping: long vectors are shortened.

With a radius, static clipping; without, adaptive robust clipping (ARC): Allouah, Guerraoui, Gupta,
Jellouli, Rizk and Stephan, "Adaptive Gradient Clipping for Robust Federated Learning", ICLR 2025,
arXiv:2405.14432.

Server: vectors longer than the radius are shortened to it. ARC's radius is the norm of the longest
vector after the k = ⌊2f(n-f)/n⌋ longest ones.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fednorm.aggregators.base import PreAggregator
from fednorm.aggregators.vectors import Vectors
from fednorm.core.registry import param


@dataclass(frozen=True)
class NormClipping(PreAggregator):
    """Vectors longer than a radius are shortened to it."""

    name: ClassVar[str] = "norm_clipping"

    radius: float | None = param(
        None, "the longest norm that is left as it is; None finds one from f, as ARC does"
    )

    def __post_init__(self) -> None:
        """Check the radius."""
        super().__post_init__()
        if self.radius is not None and not self.radius > 0:
            raise ValueError(f"{self.name} needs a radius above 0, not {self.radius!r}.")

    def mixing(self, vectors: Vectors) -> Tensor:
        """Shorten each vector by itself."""
        norms, n = vectors.squared_norms.sqrt(), len(vectors)
        clipped = 2 * self.f * (n - self.f) // n
        radius = norms.sort().values[n - clipped - 1] if self.radius is None else self.radius
        return (radius / norms).nan_to_num(nan=1).clamp_max(1).diag()
