"""Pre-aggregations that replace vectors by means: nearest-neighbour mixing and bucketing."""

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from fednorm.aggregators.base import PreAggregator
from fednorm.aggregators.rows import Vectors
from fednorm.core.random_streams import Stream
from fednorm.registry import param


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
