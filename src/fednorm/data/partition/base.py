"""The interface of partitions, their checks, and helpers that deal samples to clients.

Test splits follow a partition: each client is tested on its mix of the data.
"""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

Indices = NDArray[np.int64]


class Partition(Protocol):
    """A rule that divides samples among clients: a frozen dataclass with its settings as fields."""

    argument: ClassVar[str | None] = None  # the field that the text after "=" sets

    @abstractmethod
    def split(
        self, labels: Indices, clients: int, rng: np.random.Generator, groups: NDArray[Any] | None
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


def apportion(total: int, weights: NDArray[Any], rng: np.random.Generator) -> Indices:
    """Divide `total` in proportion to `weights`; draw among equal remainders.

    >>> apportion(10, np.array([1, 1, 3]), np.random.default_rng(0)).tolist()
    [2, 2, 6]
    """
    quota = total * weights / weights.sum()
    shares: Indices = np.floor(quota).astype(np.int64)
    # Rounded, so that remainders that are equal in exact arithmetic tie here too.
    remainder = np.round(quota - shares, 9)
    order = np.lexsort((rng.random(len(weights)), -remainder))
    shares[order[: total - shares.sum()]] += 1
    return shares


def match_test(
    train_labels: Tensor | Sequence[int] | NDArray[Any],
    parts: Sequence[Indices],
    test_labels: Tensor | Sequence[int] | NDArray[Any],
    rng: np.random.Generator,
) -> list[Indices]:
    """Deal test samples in proportion to each client's training labels.

    The test samples of a class go to the clients in proportion to their training samples of that
    class; a class without training samples goes to the clients in proportion to their size. Every
    test sample is used exactly once. A client with little data may get no test sample.

    >>> rng = np.random.default_rng(0)
    >>> parts = [np.array([0, 1]), np.array([2, 3])]
    >>> [part.tolist() for part in match_test([0, 0, 1, 1], parts, [1, 0, 1], rng)]
    [[1], [0, 2]]
    """
    train, test = to_labels(train_labels), to_labels(test_labels)
    if not len(test):
        return [np.empty(0, dtype=np.int64) for _ in parts]
    sizes = np.array([len(part) for part in parts])
    counts = []
    for label, total in zip(*np.unique(test, return_counts=True), strict=True):
        held = np.array([np.count_nonzero(train[part] == label) for part in parts])
        counts.append(apportion(int(total), held if held.any() else sizes, rng))
    return deal(shuffle_by_label(test, rng), np.stack(counts))


def match_groups(
    groups: NDArray[Any], parts: Sequence[Indices], groups_test: NDArray[Any]
) -> list[Indices]:
    """Give each client the test samples of the groups that it trains on.

    >>> parts = [np.array([0, 1]), np.array([2])]
    >>> groups, groups_test = np.array(["a", "a", "b"]), np.array(["b", "a", "b"])
    >>> [part.tolist() for part in match_groups(groups, parts, groups_test)]
    [[1], [0, 2]]
    """
    owned = [np.unique(groups[part]) for part in parts]
    names, holders = np.unique(np.concatenate(owned), return_counts=True)
    if (holders > 1).any():
        raise ValueError(
            f"test samples go by group only where a group has one client, but group "
            f"{names[holders > 1][0]!s} has {holders.max()}; use partition 'natural' or match_test."
        )
    strangers = np.setdiff1d(groups_test, names)
    if len(strangers):
        raise ValueError(
            f"test group {strangers[0]!s} is in no client's training data, so no client can be "
            "tested on it; leave its samples out or use match_test."
        )
    return [np.flatnonzero(np.isin(groups_test, own)).astype(np.int64) for own in owned]
