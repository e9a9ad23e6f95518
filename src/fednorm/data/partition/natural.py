"""Natural clients of a data set: one per writer, city, hospital or source."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fednorm.data.partition.base import Indices, Partition


@dataclass(frozen=True, slots=True)
class Natural(Partition):
    """One client per natural group; with fewer clients, whole groups share a client."""

    def split(
        self, labels: Indices, clients: int, rng: np.random.Generator, groups: NDArray[Any] | None
    ) -> list[Indices]:
        """Give each client whole groups, without randomness."""
        del labels, rng
        if groups is None:
            raise ValueError(
                "partition 'natural' needs the group of every sample, but the data set has none; "
                "choose a data set with groups or another partition."
            )
        names, member, sizes = np.unique(groups, return_inverse=True, return_counts=True)
        if clients > len(names):
            raise ValueError(
                f"partition 'natural' has one client per group at most, but got {clients} clients "
                f"for {len(names)} groups; choose {len(names)} clients or fewer."
            )
        owner = deal_groups(sizes, clients)
        return [np.flatnonzero(owner[member] == client) for client in range(clients)]


def deal_groups(sizes: NDArray[Any], clients: int) -> Indices:
    """Return each group's client: in order, or the largest group to the smallest client.

    >>> deal_groups(np.array([5, 1, 3, 3]), 2).tolist()
    [0, 0, 1, 1]
    """
    if clients == len(sizes):
        return np.arange(clients)
    owner = np.zeros(len(sizes), dtype=np.int64)
    load = np.zeros(clients, dtype=np.int64)
    for group in np.argsort(-sizes, kind="stable"):
        owner[group] = load.argmin()
        load[owner[group]] += sizes[group]
    return owner
