"""The clients' vectors as the stages see them: inner products now, the values only at the end."""

from dataclasses import dataclass
from functools import cached_property
from typing import Self

import torch
from torch import Tensor

from fednorm.aggregators.blocks import blocks, each

# Rows closer than 3e-7 of their norms are told apart by nothing but rounding.
_ROUNDING = 1e-13
_LARGEST = 1e140  # the square of a vector of these is finite in float64


@dataclass(frozen=True)
class Vectors:
    """Rows `[n, d]`, or, after pre-aggregation, the sums `mixing @ rows` of them.

    Inner products are in float64: products of float32 values are exact in it, vectors of 1e30 do
    not overflow, and what rounding is left lies below the rounding of the values themselves.
    """

    rows: Tensor
    before: Self | None = None
    step: Tensor | None = None  # what made these out of those before

    def mixed(self, step: Tensor) -> "Vectors":
        """Return the sums of these vectors that the matrix `[m, n]` says."""
        return Vectors(self.rows, self, step)

    def __len__(self) -> int:
        return len(self.rows if self.step is None else self.step)

    @cached_property
    def mixing(self) -> Tensor | None:
        """The matrix that makes these vectors out of the rows; None where they are the rows."""
        if self.before is None or self.before.mixing is None or self.step is None:
            return self.step
        return self.step @ self.before.mixing

    @cached_property
    def gram(self) -> Tensor:
        """The inner products of all pairs, on the CPU.

        >>> Vectors(torch.tensor([[3.0, 4.0], [1.0, 0.0]])).gram
        tensor([[25.,  3.],
                [ 3.,  1.]], dtype=torch.float64)
        """
        if self.before is not None and self.step is not None:
            return self.step @ self.before.gram @ self.step.T
        total = torch.zeros(len(self.rows), len(self.rows), dtype=torch.float64)
        for part in each(lambda block: _products(self.rows[:, block]), blocks(self.rows)):
            total += part
        return total

    @property
    def squared_distances(self) -> Tensor:
        """The squared distance of every pair; equal vectors are at exactly 0.

        >>> Vectors(torch.tensor([[3.0, 4.0], [0.0, 0.0]])).squared_distances
        tensor([[ 0., 25.],
                [25.,  0.]], dtype=torch.float64)
        """
        norms = self.gram.diagonal()
        sums = norms[:, None] + norms
        squared = sums - 2 * self.gram
        return torch.where(squared <= _ROUNDING * sums, 0, squared)


def _products(block: Tensor) -> Tensor:
    wide = block.to("cpu", torch.float64)
    if block.dtype is torch.float64:
        wide = wide.clamp(-_LARGEST, _LARGEST)
    # numpy sees that both factors are the same and computes half of the products.
    array = wide.numpy()
    return torch.from_numpy(array @ array.T)
