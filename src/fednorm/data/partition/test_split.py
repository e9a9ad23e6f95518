"""Test splits that follow a partition: test each client on its mix of the data."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fednorm.data.partition.base import Indices, deal, shuffle_by_label, to_labels


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
