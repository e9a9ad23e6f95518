"""iid: every client draws from the same distribution."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fednorm.data.partition.base import Indices, Partition, cut, divide_evenly


@dataclass(frozen=True, slots=True)
class Iid(Partition):
    """Samples dealt at random; sizes differ by at most 1."""

    def split(
        self, labels: Indices, clients: int, rng: np.random.Generator, groups: NDArray[Any] | None
    ) -> list[Indices]:
        """Shuffle and cut."""
        del groups
        sizes = divide_evenly(len(labels), clients)
        return [np.sort(part) for part in cut(rng.permutation(len(labels)), sizes)]
