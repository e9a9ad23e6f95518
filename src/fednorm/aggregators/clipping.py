"""Clipping: shorten vectors that are too long, or too far from a centre."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fednorm.aggregators.base import PreAggregator, Start, VectorRule, check_start, initial_weights
from fednorm.aggregators.rows import Vectors
from fednorm.registry import param


@dataclass(frozen=True)
class NormClipping(PreAggregator):
    """Shortens vectors that are longer than a radius.

    With a radius, static clipping; without, adaptive robust clipping (ARC): Allouah, Guerraoui,
    Gupta, Jellouli, Rizk and Stephan, "Adaptive Gradient Clipping for Robust Federated Learning",
    ICLR 2025, arXiv:2405.14432.

    Server: vectors longer than the radius are shortened to it. ARC's radius is the norm of the
    longest vector after the k = ⌊2f(n-f)/n⌋ longest ones.
    """

    name: ClassVar[str] = "norm_clipping"

    radius: float | None = param(
        None, "the largest norm that is not clipped; None computes it from f, as ARC does"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_radius(self.name, self.radius)

    def mixing(self, vectors: Vectors) -> Tensor:
        """Shorten each vector independently."""
        norms, n = vectors.squared_norms.sqrt(), len(vectors)
        clipped = 2 * self.f * (n - self.f) // n
        radius = norms.sort().values[n - clipped - 1] if self.radius is None else self.radius
        return _shorten(norms, radius).diag()


@dataclass(frozen=True)
class CenteredClipping(VectorRule):
    """The mean of the vectors, each shortened to a radius around the centre.

    Karimireddy, He and Jaggi, "Learning from History for Byzantine Robust Optimization", ICML 2021,
    arXiv:2012.10333.

    Server: vectors farther than `radius` from the centre are shortened to that distance, their mean
    is the next centre.

    Deviation: the first centre is a majority of near vectors; the paper takes the last round's
    result, but a rule here keeps no state (`start='zero'` is the first round of the paper). Without
    a radius it is the median of the distances in each step, so that the rule needs no knowledge of
    the scale.
    """

    name: ClassVar[str] = "centered_clipping"

    radius: float | None = param(
        None, "how far a vector may be from the centre; None is the median of the distances"
    )
    iterations: int = param(3, "number of steps of the centre; at least 1")
    start: Start = param("half", "'half', a majority of near vectors, or 'zero'")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_start(self.name, self.start, self.iterations)
        _check_radius(self.name, self.radius)

    def coefficients(self, vectors: Vectors) -> Tensor:
        """Move the centre by the mean of the shortened differences."""
        weights = initial_weights(vectors, self.start)
        for _ in range(self.iterations):
            distances = vectors.distances_to(weights)
            radius = distances.median() if self.radius is None else self.radius
            kept = _shorten(distances, radius)
            weights = weights * (1 - kept.mean()) + kept / len(kept)
        return weights


def _check_radius(name: str, radius: float | None) -> None:
    if radius is not None and not radius > 0:
        raise ValueError(f"{name} needs a radius above 0, not {radius!r}.")


def _shorten(lengths: Tensor, radius: Tensor | float) -> Tensor:
    """Return the factor that brings each length down to the radius; 1 if it is not longer."""
    return (radius / lengths).nan_to_num(nan=1).clamp_max(1)
