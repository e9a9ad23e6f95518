"""Each class is dealt over the clients by a Dirichlet distribution, so clients differ in size too.

Yurochkin et al., "Bayesian Nonparametric Federated Learning of Neural Networks" (2019),
arXiv:1905.12022, section 4. Drawn again until every client has `min_samples`.

byzfl, the library of FBN's authors, deals likewise (`dirichlet_niid` of its DataDistributor), but
among honest clients only, cuts a class at shares rounded down instead of to the nearest sample, and
may leave a client without data.
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
    log_dirichlet,
    pools_by_label,
    softmax,
)

TRIES = 1000


@dataclass(frozen=True, slots=True)
class DirichletUnbalanced(Partition):
    """Dirichlet shares of every class; sizes differ."""

    argument: ClassVar[str | None] = "alpha"

    alpha: float = param(help="concentration above 0: small is heterogeneous, large nearly iid")
    min_samples: int = param(1, "the least that every client must have")

    def __post_init__(self) -> None:
        """Check the fields."""
        check_alpha("dirichlet_unbalanced", self.alpha)
        if self.min_samples < 1:
            raise ValueError(
                "partition 'dirichlet_unbalanced' needs min_samples of at least 1, because a "
                f"client without data cannot take part, but got {self.min_samples}."
            )

    def split(
        self, labels: Indices, clients: int, rng: np.random.Generator, groups: NDArray[Any] | None
    ) -> list[Indices]:
        """Draw shares until every client has enough, then deal the classes."""
        del groups
        pools = pools_by_label(labels, rng)
        stock = np.array([len(pool) for pool in pools])
        for _ in range(TRIES if self.min_samples * clients <= len(labels) else 0):
            shares = softmax(log_dirichlet(self.alpha, (len(pools), clients), rng))
            ends = np.rint(np.cumsum(shares, axis=1) * stock[:, None]).astype(np.int64)
            ends[:, -1] = stock
            counts = np.diff(ends, axis=1, prepend=0)
            if counts.sum(axis=0).min() >= self.min_samples:
                return deal(pools, counts)
        raise ValueError(
            f"partition 'dirichlet_unbalanced' found no division of {len(labels)} samples that "
            f"gives each of {clients} clients {self.min_samples} with alpha={self.alpha} "
            f"({TRIES} tries); choose fewer clients, a larger alpha or a smaller min_samples."
        )
