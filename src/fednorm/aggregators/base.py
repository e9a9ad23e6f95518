"""Rules, pre-aggregations, and pipelines of them: what "nnm > trimmed_mean" names.

Every client's values are one row. The rows are read at most twice: once for their inner products,
from which stages compute the weights of whole rows, and once to combine them, block of columns by
block of columns. No stage holds a second copy of the rows.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, Self, TypeAlias

import torch
from torch import Tensor

from fednorm.aggregators.rows import Scratch, Vectors, as_rows, reduce_columns, sum_vectors
from fednorm.core.aggregation import Aggregator
from fednorm.errors import TooFewClientsError
from fednorm.registry import param

Start: TypeAlias = Literal["half", "zero"]


@dataclass(frozen=True)
class Stage(ABC):
    """One step of an aggregation; its fields are its settings."""

    name: ClassVar[str]  # in messages; that of the class if it gives none
    # Claims that the contract checks.
    robust: ClassVar[bool] = True  # f Byzantine clients cannot move the result far
    ordered: ClassVar[bool] = False  # the result depends on which client is which

    f: int = param(0, "how many clients may be Byzantine; fewer than half")

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "name" not in vars(cls):
            cls.name = cls.__name__

    def __post_init__(self) -> None:
        if not isinstance(self.f, int) or isinstance(self.f, bool) or self.f < 0:
            raise ValueError(f"{self.name} needs a whole number f of 0 or more, not {self.f!r}.")

    def minimum(self) -> int:
        """Return the smallest number of vectors for which the stage is robust."""
        return 2 * self.f + 1

    def check(self, n: int) -> None:
        """Raise TooFewClientsError unless `n` vectors are enough."""
        if n < self.minimum():
            raise TooFewClientsError(self.name, self.minimum(), n, self.f)

    def without(self, faulty: int) -> Self:
        """Return the stage for the vectors left after `faulty` of them were rejected."""
        return replace(self, f=max(0, self.f - faulty))


@dataclass(frozen=True)
class PreAggregator(Stage):
    """Replaces the vectors by weighted sums of them: `[n, d]` becomes `[m, d]`."""

    def count(self, n: int) -> int:
        """Return the number of vectors that `n` vectors become."""
        return n

    @abstractmethod
    def mixing(self, vectors: Vectors) -> Tensor:
        """Return the matrix `[m, n]` whose product with the old vectors gives the new ones."""

    @torch.no_grad()
    def __call__(self, rows: Tensor) -> Tensor:
        """Return the new vectors."""
        self.check(len(rows))
        vectors = Vectors(as_rows(rows))
        return self.mixing(vectors).to(vectors.rows) @ vectors.rows


@dataclass(frozen=True)
class Rule(Stage, Aggregator):
    """Reduces many vectors to one; ignores the weights that clients report."""

    @abstractmethod
    def combine(self, vectors: Vectors) -> Tensor:
        """Reduce the vectors to one."""

    def __call__(self, values: Tensor, weights: Tensor) -> Tensor:
        """Aggregate `[clients, *shape]` over the first axis."""
        return Pipeline((), self)(values, weights)


@dataclass(frozen=True)
class CoordinateRule(Rule):
    """A rule that reduces every coordinate independently."""

    @abstractmethod
    def reduce(self, rows: Tensor, scratch: Scratch) -> Tensor:
        """Return one value for each column of `[n, width]`."""

    def combine(self, vectors: Vectors) -> Tensor:
        """Reduce each column."""
        return reduce_columns(self.reduce, vectors)


@dataclass(frozen=True)
class VectorRule(Rule):
    """A rule that returns a weighted sum of whole vectors."""

    @abstractmethod
    def coefficients(self, vectors: Vectors) -> Tensor:
        """Return each vector's weight in the sum."""

    def combine(self, vectors: Vectors) -> Tensor:
        """Sum the vectors by their weights."""
        return sum_vectors(self.coefficients(vectors), vectors)


@dataclass(frozen=True)
class Pipeline(Aggregator):
    """Any number of pre-aggregations, then one rule."""

    stages: tuple[PreAggregator, ...]
    rule: Rule

    def check(self, n: int) -> None:
        """Raise TooFewClientsError unless n clients are enough for every stage."""
        for stage in self.stages:
            stage.check(n)
            n = stage.count(n)
        self.rule.check(n)

    def without(self, faulty: int) -> "Pipeline":
        """Return the pipeline for the vectors left after `faulty` of them were rejected."""
        stages = tuple(stage.without(faulty) for stage in self.stages)
        return Pipeline(stages, self.rule.without(faulty))

    @torch.no_grad()
    def __call__(self, values: Tensor, weights: Tensor) -> Tensor:
        """Aggregate `[clients, *shape]` over the first axis; the weights are ignored."""
        del weights
        self.check(len(values))
        if not values[0].numel():
            return values[0].clone()
        vectors = Vectors(as_rows(values))
        for stage in self.stages:
            vectors = vectors.mix(stage.mixing(vectors))
        result = self.rule.combine(vectors).view(values.shape[1:])
        # The result of integers is rounded to the nearest one.
        return (result if values.is_floating_point() else result.round()).to(values.dtype)


def check_start(name: str, start: str, iterations: int) -> None:
    """Raise ValueError unless the start and the iterations of an iterative rule are valid."""
    if start not in ("half", "zero"):
        raise ValueError(f"{name} starts at 'half' or 'zero', not {start!r}.")
    if not isinstance(iterations, int) or iterations < 1:
        raise ValueError(f"{name} needs iterations of 1 or more, not {iterations!r}.")


def initial_weights(vectors: Vectors, start: Start) -> Tensor:
    """Return the weights of the vectors in the starting point of an iterative rule.

    `zero` is the origin: no change at all if the vectors are updates. `half` is the mean of the
    tightest majority around one of the vectors, for values without a meaningful origin, such as
    statistics.

    >>> initial_weights(Vectors(torch.tensor([[1.0], [9.0], [2.0]])), "half")
    tensor([0.5000, 0.0000, 0.5000], dtype=torch.float64)
    """
    weights = torch.zeros(len(vectors), dtype=torch.float64)
    if start == "zero":
        return weights
    majority = len(vectors) // 2 + 1
    distances, order = vectors.squared_distances.sort(dim=1, stable=True)
    radius = distances[:, :majority].sum(1)
    inmost = int(radius.argsort(stable=True)[0])
    return weights.index_fill_(0, order[inmost, :majority], 1 / majority)
