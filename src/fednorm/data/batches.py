"""Which samples a client sees: a function of seed, client, round and step, the same everywhere."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np

from fednorm.data.partition import Indices

TAG = 301


@dataclass(frozen=True, slots=True)
class Plan:
    """How much a client trains in a round: a number of steps, or a number of epochs."""

    batch: int
    steps: int | None = 1
    epochs: int | None = None

    def __post_init__(self) -> None:
        if self.batch < 1:
            raise ValueError(f"batch must be at least 1, not {self.batch}.")
        if (self.steps is None) == (self.epochs is None):
            raise ValueError(
                f"a round needs either steps or epochs, but got steps={self.steps} and "
                f"epochs={self.epochs}; give one of them."
            )
        if (self.steps or self.epochs or 0) < 1:
            raise ValueError(
                f"steps and epochs must be at least 1, not {self.steps or self.epochs}."
            )

    def draw(self, samples: int, *, seed: int, client: int, round_: int) -> Iterator[Indices]:
        """Yield the positions of each batch among a client's `samples`.

        Each epoch is a new random order. Counted in steps, every batch is full (or holds all
        samples, if those are fewer); counted in epochs, every sample is seen once an epoch, and a
        leftover of one sample joins the batch before it, because BatchNorm cannot use it.

        >>> [len(b) for b in Plan(4, epochs=1, steps=None).draw(9, seed=0, client=0, round_=1)]
        [4, 5]
        """
        size = min(self.batch, samples)
        if self.steps is not None:
            yield from islice(_full(samples, size, (seed, client, round_)), self.steps)
            return
        for epoch in range(self.epochs or 0):
            order = _order(samples, (seed, client, round_), epoch)
            cuts = list(range(size, samples, size))
            if cuts and samples - cuts[-1] == 1 and size > 1:
                cuts.pop()
            yield from np.split(order, cuts)

    def smallest(self, samples: int) -> int:
        """Return the size of the smallest batch that a client with so many samples sees."""
        draws = self.draw(samples, seed=0, client=0, round_=1)
        return min(len(indices) for indices in draws)


def _order(samples: int, key: tuple[int, int, int], epoch: int) -> Indices:
    return np.random.default_rng([*key, epoch, TAG]).permutation(samples)


def _full(samples: int, size: int, key: tuple[int, int, int]) -> Iterator[Indices]:
    epoch = 0
    while True:
        order = _order(samples, key, epoch)
        for start in range(0, samples - size + 1, size):
            yield order[start : start + size]
        epoch += 1


def participants(clients: int, share: float, *, seed: int, round_: int) -> list[int]:
    """Return which clients take part in a round, in ascending order.

    >>> participants(10, 0.2, seed=0, round_=1) == participants(10, 0.2, seed=0, round_=1)
    True
    """
    if not 0 < share <= 1:
        raise ValueError(f"participation must be in (0, 1], not {share}.")
    count = max(1, round(share * clients))
    if count == clients:
        return list(range(clients))
    rng = np.random.default_rng([seed, round_, TAG + 1])
    return sorted(rng.choice(clients, count, replace=False).tolist())
