"""The vocabulary of the library: tensors by name, client ids, and what a tensor is for."""

from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from typing import TypeAlias

from torch import Tensor

Tensors: TypeAlias = Mapping[str, Tensor]
ClientId: TypeAlias = int
Clip: TypeAlias = Callable[[Tensor, Tensor], Tensor]  # (gradient, parameter) -> gradient


def nbytes(tensors: Iterable[Tensor]) -> int:
    """Return the size of the tensors' values in bytes.

    >>> import torch
    >>> nbytes([torch.zeros(3), torch.zeros(2, dtype=torch.float64)])
    28
    """
    return sum(tensor.nbytes for tensor in tensors)


class Kind(Enum):
    """What a tensor of a model is, decided by the type of the module that owns it."""

    WEIGHT = "weight"
    AFFINE = "affine"
    STATISTIC = "statistic"
    COUNTER = "counter"


class Role(Enum):
    """What a strategy does with a tensor."""

    SHARED = "shared"  # sent, and aggregated by the server
    STATISTIC = "statistic"  # reported as moments, and merged by the strategy
    PERSONAL = "personal"  # never leaves its client
