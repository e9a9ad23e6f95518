"""What robust rules and pre-aggregations have in common.

Every client's values are one row. The rows are read twice at most: once for their inner products,
from which stages find how to weigh whole rows, and once to combine them, block of columns by block
of columns. No stage holds a second copy of the rows.
"""

from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch
from torch import Tensor

from fednorm.aggregators.blocks import Scratch
from fednorm.aggregators.combine import as_rows, materialised, reduced, weighted_sum
from fednorm.aggregators.vectors import Vectors
from fednorm.core.registry import param


class TooFewClientsError(ValueError):
    """A stage has fewer vectors than it needs to withstand its number of Byzantine clients."""

    def __init__(self, stage: str, needed: int, rows: int, f: int) -> None:
        super().__init__(
            f"{stage} with f={f} Byzantine clients needs at least {needed} vectors, but it gets "
            f"{rows}; lower f, choose another rule, or let more clients take part."
        )
        self.stage, self.needed, self.rows, self.f = stage, needed, rows, f

    def __reduce__(self) -> tuple[type, tuple[str, int, int, int]]:
        """Let it come from another process as it is."""
        return type(self), (self.stage, self.needed, self.rows, self.f)


@dataclass(frozen=True)
class Stage:
    """One step of an aggregation; its fields are its settings."""

    name: ClassVar[str]

    f: int = param(0, "how many clients may be Byzantine; fewer than half")

    def __post_init__(self) -> None:
        """Check the number of Byzantine clients."""
        if not isinstance(self.f, int) or isinstance(self.f, bool) or self.f < 0:
            raise ValueError(f"{self.name} needs a whole number f of 0 or more, not {self.f!r}.")

    def minimum(self) -> int:
        """Return the smallest number of vectors with which the stage keeps its promise."""
        return 2 * self.f + 1

    def check(self, n: int) -> None:
        """Raise TooFewClientsError unless n vectors are enough."""
        if n < self.minimum():
            raise TooFewClientsError(self.name, self.minimum(), n, self.f)

    def without(self, faulty: int) -> Self:
        """Return the stage for the vectors that are left after so many were found faulty."""
        return replace(self, f=max(0, self.f - faulty))


@dataclass(frozen=True)
class PreAggregator(Stage):
    """Replaces the vectors by weighted sums of them: `[n, d]` becomes `[m, d]`."""

    def count(self, n: int) -> int:
        """Return how many vectors come out of n."""
        return n

    def mixing(self, vectors: Vectors) -> Tensor:
        """Return the matrix `[m, n]` that makes the new vectors out of the old ones."""
        raise NotImplementedError

    @torch.no_grad()
    def __call__(self, rows: Tensor) -> Tensor:
        """Return the new vectors."""
        self.check(len(rows))
        vectors = Vectors(as_rows(rows))
        return materialised(vectors.mixed(self.mixing(vectors)))


@dataclass(frozen=True)
class Rule(Stage):
    """Makes one vector out of many. What clients say of their own weight is ignored."""

    def combined(self, vectors: Vectors) -> Tensor:
        """Return the one vector."""
        raise NotImplementedError

    def __call__(self, values: Tensor, weights: Tensor) -> Tensor:
        """Aggregate `[clients, *shape]` over the first axis."""
        del weights
        return aggregated(values, (), self)


@dataclass(frozen=True)
class CoordinateRule(Rule):
    """Looks at every coordinate by itself."""

    def reduce(self, rows: Tensor, scratch: Scratch) -> Tensor:
        """Return one value for each column of `[n, width]`."""
        raise NotImplementedError

    def combined(self, vectors: Vectors) -> Tensor:
        """Reduce each column."""
        return reduced(self.reduce, vectors)


@dataclass(frozen=True)
class VectorRule(Rule):
    """Looks at whole vectors; the result is a weighted sum of them."""

    def coefficients(self, vectors: Vectors) -> Tensor:
        """Return each vector's weight in the sum."""
        raise NotImplementedError

    def combined(self, vectors: Vectors) -> Tensor:
        """Sum the vectors by their weights."""
        return weighted_sum(self.coefficients(vectors), vectors)


@torch.no_grad()
def aggregated(values: Tensor, stages: tuple[PreAggregator, ...], rule: Rule) -> Tensor:
    """Return what pre-aggregations and a rule make of `[clients, *shape]`."""
    check_stages(stages, rule, len(values))
    if not values[0].numel():
        return values[0].clone()
    vectors = Vectors(as_rows(values))
    for stage in stages:
        vectors = vectors.mixed(stage.mixing(vectors))
    result = rule.combined(vectors).view(values.shape[1:])
    # An integer stays one: the nearest.
    return (result if values.is_floating_point() else result.round()).to(values.dtype)


def check_stages(stages: tuple[PreAggregator, ...], rule: Rule, n: int) -> None:
    """Raise TooFewClientsError unless n clients are enough for every stage."""
    for stage in stages:
        stage.check(n)
        n = stage.count(n)
    rule.check(n)
