"""The clients' vectors as the stages see them: inner products now, the values only at the end."""

from dataclasses import dataclass
from functools import cached_property
from typing import Self

import torch
from torch import Tensor

from fednorm.aggregators.blocks import Scratch, blocks, each

# Rows closer than 3e-7 of their norms are told apart by nothing but rounding.
_ROUNDING = 1e-13
_SMALL = 1e-30
_PIECE = 1024  # values


@dataclass(frozen=True)
class Vectors:
    """Rows `[n, d]`, or, after pre-aggregation, weighted sums of them.

    Inner products are in float64: products of float32 values are exact in it, vectors of 1e30 do
    not overflow, and what rounding is left lies below the rounding of the values themselves.
    """

    rows: Tensor
    before: Self | None = None
    step: Tensor | None = None  # the matrix that made these out of those before

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

        def work(block: slice, scratch: Scratch) -> Tensor:
            wide = _wide(self.rows[:, block], scratch)
            return wide @ wide.T

        return _total(each(work, blocks(self.rows)))

    @cached_property
    def squared_norms(self) -> Tensor:
        """The inner product of each vector with itself, without those of the pairs."""
        if self.step is not None:
            return self.gram.diagonal()

        def exact(block: slice, scratch: Scratch) -> Tensor:
            return _wide(self.rows[:, block], scratch).square_().sum(1)

        squares = _quick_squares(self.rows)
        # Outside of this range squares may be beyond float32.
        if ((squares > _SMALL) & (squares < 1 / _SMALL)).all():
            return squares
        return _total(each(exact, blocks(self.rows)))

    @cached_property
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

    def distances_to(self, coefficients: Tensor) -> Tensor:
        """Return every vector's distance to the sum of all by these weights."""
        if not coefficients.any():
            return self.squared_norms.sqrt()
        inner = self.gram @ coefficients
        squared = self.gram.diagonal() - 2 * inner + coefficients @ inner
        return squared.clamp_min(0).sqrt()


def _quick_squares(rows: Tensor) -> Tensor:
    """Return the squared norms, added up in float64 over pieces that float32 can add up well."""
    count = rows.shape[1] // _PIECE
    pieces = rows[:, : count * _PIECE].reshape(len(rows), count, _PIECE)
    rest = rows[:, None, count * _PIECE :]
    norms = [torch.linalg.vector_norm(part, dim=2) for part in (pieces, rest)]
    return torch.cat(norms, 1).to("cpu", torch.float64).square().sum(1)


def _wide(block: Tensor, scratch: Scratch) -> Tensor:
    return scratch.take("wide", tuple(block.shape), torch.float64).copy_(block)


def _total(parts: list[Tensor]) -> Tensor:
    return sum(parts[1:], parts[0])
