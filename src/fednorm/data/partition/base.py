"""The interface of partitions, their checks, and helpers that deal samples to clients."""

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
        """Return each client's sorted indices; every sample has exactly one client."""
        ...

    def transform(self, x: Tensor, client: int, clients: int, seed: int) -> Tensor:
        """Return the samples as `client` sees them; the default does not change them."""
        del client, clients, seed
        return x


def divide_evenly(total: int, parts: int) -> Indices:
    """Return sizes that sum to `total` and differ by at most 1, the larger ones first.

    >>> divide_evenly(7, 3).tolist()
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


def shuffle_by_label(labels: Indices, rng: np.random.Generator) -> list[Indices]:
    """Return the shuffled indices of each label that occurs, ordered by label."""
    _, sizes = np.unique(labels, return_counts=True)
    return cut(sort_by_label(rng.permutation(len(labels)), labels), sizes)


def deal(pools: Sequence[Indices], counts: Indices) -> list[Indices]:
    """Give client j `counts[c, j]` samples of pool c, for all pools and clients; sorted.

    >>> [part.tolist() for part in deal([np.array([3, 1]), np.array([0, 2])], np.eye(2) * 2)]
    [[1, 3], [0, 2]]
    """
    rows = [cut(pool, row.astype(np.int64)) for pool, row in zip(pools, counts, strict=True)]
    return [np.sort(np.concatenate(column)) for column in zip(*rows, strict=True)]


def to_labels(labels: Tensor | Sequence[int] | NDArray[Any]) -> Indices:
    """Return labels as a one-dimensional int64 array.

    >>> to_labels([2, 0, 1]).tolist()
    [2, 0, 1]
    """
    array = labels.detach().cpu().numpy() if isinstance(labels, Tensor) else np.asarray(labels)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise ValueError(
            "a partition needs one integer label per sample, but got an array of shape "
            f"{array.shape} and type {array.dtype}; pass class numbers, not one-hot rows or scores."
        )
    return array.astype(np.int64)


def check_request(name: str, samples: int, clients: int, groups: NDArray[Any] | None) -> None:
    """Check that the samples can be divided among the clients."""
    if clients < 1:
        raise ValueError(f"partition {name!r} needs at least 1 client, but got {clients}.")
    if clients > samples:
        raise ValueError(
            f"partition {name!r} cannot give each of {clients} clients a sample: there are "
            f"{samples}; choose fewer clients or more samples."
        )
    if groups is not None and len(groups) != samples:
        raise ValueError(
            f"partition {name!r} needs one group per sample, but got {len(groups)} groups "
            f"for {samples} samples."
        )


def check_parts(name: str, parts: Sequence[Indices], samples: int) -> None:
    """Check that every client has data and that every sample is used exactly once."""
    for client, part in enumerate(parts):
        if not len(part):
            raise ValueError(
                f"client {client} has no data: partition {name!r} gave it none of {samples} "
                f"samples for {len(parts)} clients; choose fewer clients, another seed, or a "
                "milder heterogeneity (a larger alpha or fraction)."
            )
    if not np.array_equal(np.sort(np.concatenate(parts)), np.arange(samples)):
        raise ValueError(
            f"partition {name!r} must use each of {samples} samples exactly once, but did not; "
            "its split is at fault."
        )
