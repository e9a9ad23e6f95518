"""Partitions by label: iid, and those that give each client another mix of the classes.

The clients of `natural` are those that the data set names.
"""

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from fednorm.data.partition.base import (
    Indices,
    Partition,
    cut,
    deal,
    divide_evenly,
    shuffle_by_label,
    sort_by_label,
)
from fednorm.registry import param

TRIES = 1000


@dataclass(frozen=True, slots=True)
class Iid(Partition):
    """Samples dealt at random; sizes differ by at most 1.

    Every client draws from the same distribution.
    """

    def split(
        self, labels: Indices, clients: int, rng: np.random.Generator, groups: NDArray[Any] | None
    ) -> list[Indices]:
        """Shuffle and cut."""
        del groups
        sizes = divide_evenly(len(labels), clients)
        return [np.sort(part) for part in cut(rng.permutation(len(labels)), sizes)]


@dataclass(frozen=True, slots=True)
class Gamma(Partition):
    """A share dealt at random, the rest sorted by label and cut; sizes differ by at most 1.

    γ-similarity, the heterogeneity of FBN's experiments: Karimireddy et al., "SCAFFOLD" (2020),
    arXiv:1910.06378, section 7. γ = 1 is iid; γ = 0 gives each client one interval of the sorted
    labels.
    """

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


@dataclass(frozen=True, slots=True)
class Shards(Partition):
    """A fraction of the classes per client; a class is split evenly over the clients holding it.

    McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data"
    (2017), arXiv:1602.05629, section 3, and FixBN's experiments, where a client has a fifth of the
    classes. Here the share of classes is exact: shards are cut along class borders, never across
    them.
    """

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


@dataclass(frozen=True, slots=True)
class Dirichlet(Partition):
    """A Dirichlet class mix per client; sizes differ by at most 1.

    Hsu, Qi and Brown, "Measuring the Effects of Non-Identical Data Distribution for Federated
    Visual Classification" (2019), arXiv:1909.06335. Each client draws its class mix from a
    Dirichlet distribution. Samples are drawn without replacement; where a class has run out, the
    mix is renormalized over the remaining classes. alpha is the concentration of each class (a
    Dirichlet of alpha, alpha, ...), not its sum over the classes.
    """

    argument: ClassVar[str | None] = "alpha"

    alpha: float = param(help="concentration above 0: small is heterogeneous, large nearly iid")

    def __post_init__(self) -> None:
        check_alpha("dirichlet", self.alpha)

    def split(
        self, labels: Indices, clients: int, rng: np.random.Generator, groups: NDArray[Any] | None
    ) -> list[Indices]:
        """Draw every client's class counts from the remaining samples, then deal them."""
        del groups
        pools = shuffle_by_label(labels, rng)
        stock = np.array([len(pool) for pool in pools])
        mixes = draw_log_dirichlet(self.alpha, (clients, len(pools)), rng)
        counts = np.zeros((len(pools), clients), dtype=np.int64)
        for client, size in enumerate(divide_evenly(len(labels), clients)):
            left = stock - counts.sum(axis=1)
            counts[:, client] = draw_counts(int(size), mixes[client], left, rng)
        return deal(pools, counts)


@dataclass(frozen=True, slots=True)
class DirichletUnbalanced(Partition):
    """Dirichlet shares of every class; sizes differ.

    Yurochkin et al., "Bayesian Nonparametric Federated Learning of Neural Networks" (2019),
    arXiv:1905.12022, section 4. Each class is dealt over the clients by a Dirichlet distribution,
    drawn again until every client has `min_samples`.

    byzfl, the library of FBN's authors, deals likewise (`dirichlet_niid` of its DataDistributor),
    but among honest clients only, cuts a class at shares rounded down instead of to the nearest
    sample, and may leave a client without data.
    """

    argument: ClassVar[str | None] = "alpha"

    alpha: float = param(help="concentration above 0: small is heterogeneous, large nearly iid")
    min_samples: int = param(1, "minimum number of samples of every client")

    def __post_init__(self) -> None:
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
        pools = shuffle_by_label(labels, rng)
        stock = np.array([len(pool) for pool in pools])
        for _ in range(TRIES if self.min_samples * clients <= len(labels) else 0):
            shares = softmax(draw_log_dirichlet(self.alpha, (len(pools), clients), rng))
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


def draw_counts(
    size: int, log_mix: NDArray[Any], stock: Indices, rng: np.random.Generator
) -> Indices:
    """Draw the number of samples of each class, `size` in all, at most its stock.

    A draw beyond a class's stock is rejected and drawn again from the classes still in stock: the
    same distribution as drawing sample by sample. Each pass is the last one or empties a class.
    """
    counts = np.zeros_like(stock)
    while missing := size - int(counts.sum()):
        left = counts < stock
        counts[left] += rng.multinomial(missing, softmax(log_mix[left]))
        counts = np.minimum(counts, stock)
    return counts


def draw_log_dirichlet(
    alpha: float, shape: tuple[int, ...], rng: np.random.Generator
) -> NDArray[Any]:
    """Draw logarithms of unnormalized symmetric Dirichlet weights, for `softmax`.

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
