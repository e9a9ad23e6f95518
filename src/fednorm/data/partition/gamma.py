"""γ-similarity: a share γ of the data is iid over the clients, the rest sorted by label.

Karimireddy et al., "SCAFFOLD" (2020), arXiv:1910.06378, section 7; the heterogeneity of FBN's
experiments. γ = 1 is iid; γ = 0 gives each client one interval of the sorted labels.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from fednorm.data.partition.base import Indices, Partition, cut, divide_evenly, sort_by_label
from fednorm.registry import param


@dataclass(frozen=True, slots=True)
class Gamma(Partition):
    """A share dealt at random, the rest sorted by label and cut; sizes differ by at most 1."""

    argument: ClassVar[str | None] = "gamma"

    gamma: float = param(help="share of the samples dealt at random, from 0 to 1")

    def __post_init__(self) -> None:
        if not 0 <= self.gamma <= 1:
            raise ValueError(
                f"partition 'gamma' needs a share gamma from 0 (sorted by label) to 1 (iid), "
                f"but got {self.gamma}."
            )

    def split(
        self, labels: Indices, clients: int, rng: np.random.Generator, groups: NDArray[Any] | None
    ) -> list[Indices]:
        """Deal the random share, then cut the sorted rest into consecutive chunks."""
        del groups
        order = rng.permutation(len(labels))
        mixed = round(self.gamma * len(labels))
        # The random share's larger pieces come last, the rest's first, so the sums stay even.
        dealt = cut(order[:mixed], divide_evenly(mixed, clients)[::-1])
        rest = sort_by_label(order[mixed:], labels)
        chunks = cut(rest, divide_evenly(len(rest), clients))
        return [
            np.sort(np.concatenate([one, other])) for one, other in zip(dealt, chunks, strict=True)
        ]
