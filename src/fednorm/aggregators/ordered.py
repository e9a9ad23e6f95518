"""The mean of the middle values of each column."""

import torch
from torch import Tensor


def middle(rows: Tensor, cut: int) -> Tensor:
    """Return the mean of each column without its `cut` smallest and `cut` largest values.

    >>> middle(torch.tensor([[9.0], [1.0], [3.0], [4.0]]), 1)
    tensor([3.5000])
    """
    if not cut:
        return rows.mean(0)
    return torch.sort(rows, dim=0).values[cut : len(rows) - cut].mean(0)
