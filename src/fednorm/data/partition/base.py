"""What a partition is, and the dealing of samples that several partitions share."""

from collections.abc import Sequence
from typing import Any, ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

Indices = NDArray[np.int64]


class Partition(Protocol):
    """A rule that divides samples among clients: a frozen dataclass with its settings as fields."""

    argument: ClassVar[str | None] = None  # the field that the text after "=" sets

    def split(
        self,
        labels: Indices,
        clients: int,
        rng: np.random.Generator,
        groups: NDArray[Any] | None,
    ) -> list[Indices]:
        """Return each client's sample numbers, sorted; every sample has exactly one client."""
        ...

    def transform(self, x: Tensor, client: int, clients: int, seed: int) -> Tensor:
        """Return how a client sees samples; unless the partition says otherwise, as they are."""
        del client, clients, seed
        return x


def even_sizes(total: int, parts: int) -> Indices:
    """Return sizes that sum to `total` and differ by at most 1, the larger ones first.

    >>> even_sizes(7, 3).tolist()
    [3, 2, 2]
    """
    return total // parts + (np.arange(parts) < total % parts).astype(np.int64)


def cut(indices: Indices, sizes: Indices) -> list[Indices]:
    """Cut indices into consecutive pieces of the given sizes.

    >>> [piece.tolist() for piece in cut(np.arange(5), np.array([2, 0, 3]))]
    [[0, 1], [], [2, 3, 4]]
    """
    return np.split(indices, np.cumsum(sizes)[:-1])


def sort_by_label(indices: Indices, labels: Indices) -> Indices:
    """Order shuffled indices by label; within a label they stay shuffled."""
    return indices[np.argsort(labels[indices], kind="stable")]


def pools_by_label(labels: Indices, rng: np.random.Generator) -> list[Indices]:
    """Return the shuffled sample numbers of each label that occurs, in the labels' order."""
    _, sizes = np.unique(labels, return_counts=True)
    return cut(sort_by_label(rng.permutation(len(labels)), labels), sizes)


def deal(pools: Sequence[Indices], counts: Indices) -> list[Indices]:
    """Give client j `counts[c, j]` samples of pool c, for all pools and clients; sorted.

    >>> [part.tolist() for part in deal([np.array([3, 1]), np.array([0, 2])], np.eye(2) * 2)]
    [[1, 3], [0, 2]]
    """
    rows = [cut(pool, row.astype(np.int64)) for pool, row in zip(pools, counts, strict=True)]
    return [np.sort(np.concatenate(column)) for column in zip(*rows, strict=True)]


def log_dirichlet(alpha: float, shape: tuple[int, ...], rng: np.random.Generator) -> NDArray[Any]:
    """Return logarithms of unnormalised symmetric Dirichlet weights; `softmax` normalises them.

    A gamma variate of shape alpha is one of shape alpha + 1 times U^(1/alpha). Its logarithm stays
    finite however small alpha is, where the variate itself would underflow and leave 0 / 0.
    """
    shrink = np.log1p(-rng.random(shape)) / max(alpha, 1e-300)
    return np.log(rng.standard_gamma(alpha + 1, shape)) + shrink


def softmax(logits: NDArray[Any]) -> NDArray[Any]:
    """Normalise logarithms of weights over the last axis."""
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return np.asarray(weights / weights.sum(axis=-1, keepdims=True))


def check_alpha(name: str, alpha: float) -> None:
    """Check a Dirichlet concentration."""
    if not 0 < alpha < np.inf:
        raise ValueError(
            f"partition {name!r} needs a finite alpha above 0, but got {alpha}; a small alpha "
            "such as 0.1 is heterogeneous, a large one such as 100 nearly iid."
        )
