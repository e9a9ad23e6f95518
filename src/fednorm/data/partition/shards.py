"""Shards: each client holds only some of the classes.

McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data" (2017),
arXiv:1602.05629, section 3, and FixBN's experiments, where a client has a fifth of the classes.
Here the share of classes is exact: shards are cut along class borders, never across them.
"""

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from fednorm.data.partition.base import Indices, Partition, deal, divide_evenly, shuffle_by_label
from fednorm.registry import param


@dataclass(frozen=True, slots=True)
class Shards(Partition):
    """A fraction of the classes per client; a class is split evenly over the clients holding it."""

    argument: ClassVar[str | None] = "fraction"

    fraction: float = param(help="share of the classes that each client holds, in (0, 1]")

    def __post_init__(self) -> None:
        if not 0 < self.fraction <= 1:
            raise ValueError(
                f"partition 'shards' needs a fraction of the classes above 0 and at most 1, "
                f"but got {self.fraction}."
            )

    def split(
        self, labels: Indices, clients: int, rng: np.random.Generator, groups: NDArray[Any] | None
    ) -> list[Indices]:
        """Deal class slots from a shuffled cycle of the classes, then split every class."""
        del groups
        pools = shuffle_by_label(labels, rng)
        classes, held = len(pools), self._classes_per_client(len(pools), clients)
        cycle = rng.permutation(classes)
        # Consecutive slots of a cycle are distinct classes, and reach every class in turn.
        slots = cycle[np.arange(clients * held) % classes].reshape(clients, held)
        counts = np.zeros((classes, clients), dtype=np.int64)
        for label, pool in enumerate(pools):
            holders = np.flatnonzero((slots == label).any(axis=1))
            counts[label, holders] = divide_evenly(len(pool), len(holders))
        return deal(pools, counts)

    def _classes_per_client(self, classes: int, clients: int) -> int:
        """Return the classes per client; raise if a class would have no client."""
        held = max(1, round(self.fraction * classes))
        if clients * held < classes:
            raise ValueError(
                f"partition 'shards' must give every class a client, but {clients} clients with "
                f"{held} of {classes} classes each hold {clients * held} at most; use a fraction "
                f"of {math.ceil(classes / clients) / classes:.4g} or more, or at least "
                f"{math.ceil(classes / held)} clients."
            )
        return held
