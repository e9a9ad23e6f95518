"""Where iterative rules start."""

from typing import Literal

import torch
from torch import Tensor

from fednorm.aggregators.vectors import Vectors

Start = Literal["half", "zero"]


def check_start(name: str, start: str, iterations: int) -> None:
    """Raise ValueError unless an iterative rule knows where to start and how long to go on."""
    if start not in ("half", "zero"):
        raise ValueError(f"{name} starts at 'half' or 'zero', not {start!r}.")
    if not isinstance(iterations, int) or iterations < 1:
        raise ValueError(f"{name} needs iterations of 1 or more, not {iterations!r}.")


def first(vectors: Vectors, start: Start) -> Tensor:
    """Return the weights of the vectors in the starting point.

    `zero` is the origin: no change at all, where the vectors are updates. `half` is the mean of
    that majority of the vectors that is nearest around one of them: where the origin means
    nothing, as for statistics.

    >>> first(Vectors(torch.tensor([[1.0], [9.0], [2.0]])), "half")
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
