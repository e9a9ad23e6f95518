"""Rules and pre-aggregations of whole vectors.

Rules are Krum, the geometric median and centered clipping. Pre-aggregations shorten vectors (norm
clipping) or replace them by means (nearest-neighbour mixing and bucketing).
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from fednorm.aggregators.base import PreAggregator, Start, VectorRule, check_start, initial_weights
from fednorm.aggregators.rows import Vectors
from fednorm.core.random_streams import Stream
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


_CONVERGED = 1e-9  # change of the weights in one step


@dataclass(frozen=True)
class GeometricMedian(VectorRule):
    """The point with the least sum of distances to all vectors: RFA.

    Pillutla, Kakade and Harchaoui, "Robust Aggregation for Federated Learning", IEEE Transactions
    on Signal Processing 2022, arXiv:1912.13445; after Weiszfeld, 1937.

    Server: the point is found by Weiszfeld's smoothed algorithm, which repeatedly averages the
    vectors with the inverse of their distance to the last point as weights (at least `smoothing`).
    Every intermediate point is a weighted sum of the vectors, so only their inner products are
    needed until the end.

    Deviation: it starts from a majority of near vectors instead of the mean, which a single vector
    of 1e30 moves so far away that hundreds of steps are needed to return.
    """

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


@dataclass(frozen=True)
class NNM(PreAggregator):
    """Replaces every vector by the mean of its n-f nearest: nearest-neighbour mixing (NNM).

    Allouah, Farhadkhani, Guerraoui, Gupta, Pinot and Stephan, "Fixing by Mixing: A Recipe for
    Optimal Byzantine ML under Heterogeneity", AISTATS 2023, arXiv:2302.01772.

    Server: replaces every vector by the mean of its n-f nearest vectors, itself included. At equal
    distances the lower client number comes first.
    """

    name: ClassVar[str] = "nnm"

    def mixing(self, vectors: Vectors) -> Tensor:
        """Give each row's n-f nearest rows equal weights, and the others 0."""
        near = len(vectors) - self.f
        distances = vectors.squared_distances
        order = torch.argsort(distances, dim=1, stable=True)
        return torch.zeros_like(distances).scatter_(1, order[:, :near], 1 / near)


@dataclass(frozen=True)
class Bucketing(PreAggregator):
    """Random groups of vectors become their means.

    Karimireddy, He and Jaggi, "Byzantine-Robust Learning on Heterogeneous Datasets via Bucketing",
    ICLR 2022, arXiv:2006.09365.

    Server: shuffles the vectors and replaces every `size` of them by their mean; the last bucket
    holds the rest. Each Byzantine client can corrupt a bucket, so f of the buckets may be
    Byzantine.

    Deviation: the shuffle depends on `seed` and the number of vectors alone, so that a run can be
    repeated; it is the same in every round.
    """

    name: ClassVar[str] = "bucketing"
    ordered: ClassVar[bool] = True  # buckets are drawn by place

    size: int = param(2, "number of vectors in a bucket")
    seed: int = param(0, "seed of the shuffle")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.size, int) or self.size < 1:
            raise ValueError(f"{self.name} needs a size of 1 or more, not {self.size!r}.")

    def count(self, n: int) -> int:
        """Return the number of buckets."""
        return math.ceil(n / self.size)

    def mixing(self, vectors: Vectors) -> Tensor:
        """Give the vectors of a bucket equal weights."""
        n = len(vectors)
        bucket = torch.empty(n, dtype=torch.int64)
        shuffled = np.random.default_rng([self.seed, Stream.BUCKETING, n]).permutation(n)
        bucket[torch.from_numpy(shuffled)] = torch.arange(n) // self.size
        member = torch.arange(self.count(n))[:, None] == bucket
        return member / member.sum(1, keepdim=True, dtype=torch.float64)
