"""Each client draws its own class mix from a Dirichlet distribution; clients are of equal size.

Hsu, Qi and Brown, "Measuring the Effects of Non-Identical Data Distribution for Federated Visual
Classification" (2019), arXiv:1909.06335. Samples are drawn without replacement; where a class has
run out, the mix is renormalised over the classes that are left. alpha is the concentration of each
class (a Dirichlet of alpha, alpha, ...), not its sum over the classes.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from fednorm.core.registry import param
from fednorm.data.partition.base import (
    Indices,
    Partition,
    check_alpha,
    deal,
    even_sizes,
    log_dirichlet,
    pools_by_label,
    softmax,
)


@dataclass(frozen=True, slots=True)
class Dirichlet(Partition):
    """A Dirichlet class mix per client; sizes differ by at most 1."""

    argument: ClassVar[str | None] = "alpha"

    alpha: float = param(help="concentration above 0: small is heterogeneous, large nearly iid")

    def __post_init__(self) -> None:
        """Check the concentration."""
        check_alpha("dirichlet", self.alpha)

    def split(
        self, labels: Indices, clients: int, rng: np.random.Generator, groups: NDArray[Any] | None
    ) -> list[Indices]:
        """Draw every client's class counts in turn from what is left, then deal them."""
        del groups
        pools = pools_by_label(labels, rng)
        stock = np.array([len(pool) for pool in pools])
        mixes = log_dirichlet(self.alpha, (clients, len(pools)), rng)
        counts = np.zeros((len(pools), clients), dtype=np.int64)
        for client, size in enumerate(even_sizes(len(labels), clients)):
            left = stock - counts.sum(axis=1)
            counts[:, client] = draw_counts(int(size), mixes[client], left, rng)
        return deal(pools, counts)


def draw_counts(
    size: int, log_mix: NDArray[Any], stock: Indices, rng: np.random.Generator
) -> Indices:
    """Draw how many of `size` samples come from each class, at most its stock.

    A draw beyond a class's stock is rejected and drawn again from the classes still in stock: the
    same distribution as drawing the samples one by one. Each pass ends it or empties a class.
    """
    counts = np.zeros_like(stock)
    while missing := size - int(counts.sum()):
        left = counts < stock
        counts[left] += rng.multinomial(missing, softmax(log_mix[left]))
        counts = np.minimum(counts, stock)
    return counts
