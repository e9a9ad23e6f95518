"""Sampling: draw the batches of a client and the participants of a round.

All draws are functions of seed, client and round, and equal on every machine.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, islice, pairwise

import numpy as np

from fednorm.core.random_streams import Stream
from fednorm.data.partition.base import Indices

_WORD = 2**32


@dataclass(frozen=True, slots=True)
class Plan:
    """The local work of a round: a number of steps, or a number of epochs."""

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
        """Return the positions of each batch among a client's `samples`.

        Each epoch has a new random order. With steps, every batch is full, or holds all samples if
        they are fewer. With epochs, every sample is seen once per epoch, and a last batch of one
        sample joins the batch before it: BatchNorm needs two values for a variance.

        >>> [len(b) for b in Plan(4, epochs=1, steps=None).draw(9, seed=0, client=0, round_=1)]
        [4, 5]
        """
        key = (seed, client, round_)
        if self.steps is not None:
            return islice(_draw_full(samples, self.batch, key), self.steps)
        cuts = self._cuts(samples)
        orders = (_draw_order(samples, key, epoch) for epoch in range(self.epochs or 0))
        return chain.from_iterable(np.split(order, cuts) for order in orders)

    def lengths(self, samples: int) -> tuple[int, ...]:
        """Return the sizes of a round's batches for a client with `samples` samples.

        >>> Plan(4, epochs=1, steps=None).lengths(9)
        (4, 5)
        """
        if self.steps is not None:
            return (min(self.batch, samples),) * self.steps
        edges = [0, *self._cuts(samples), samples]
        return tuple(b - a for a, b in pairwise(edges)) * (self.epochs or 0)

    def _cuts(self, samples: int) -> list[int]:
        """Return the positions at which an epoch is cut into batches."""
        cuts = list(range(self.batch, samples, self.batch))
        if cuts and samples - cuts[-1] == 1 and self.batch > 1:
            cuts.pop()
        return cuts


def _draw_order(samples: int, key: tuple[int, int, int], epoch: int) -> Indices:
    words = [*key, epoch, Stream.BATCH_ORDER]
    # An array gives the same seed as a list, and numpy reads it faster.
    seed = np.array(words, np.uint32) if max(words) < _WORD else words
    return np.random.default_rng(seed).permutation(samples)


def _draw_full(samples: int, batch: int, key: tuple[int, int, int]) -> Iterator[Indices]:
    epoch, size = 0, min(batch, samples)
    while True:
        order = _draw_order(samples, key, epoch)
        for start in range(0, samples - size + 1, size):
            yield order[start : start + size]
        epoch += 1


def count_participants(clients: int, share: float) -> int:
    """Return how many of `clients` take part in a round: the rounded share, at least 1.

    >>> count_participants(10, 0.25), count_participants(10, 0.01)
    (2, 1)
    """
    if not 0 < share <= 1:
        raise ValueError(f"participation must be in (0, 1], not {share}.")
    return max(1, round(share * clients))


def draw_participants(
    clients: int, share: float, *, seed: int, round_: int, independent: bool = False
) -> list[int]:
    """Draw the clients that take part in a round, in ascending order.

    Their number is the same in all rounds, unless draws are `independent`: then each client takes
    part with the probability `share`, which is Poisson sampling.

    >>> draw_participants(10, 0.2, seed=0, round_=1) == draw_participants(10, 0.2, seed=0, round_=1)
    True
    """
    count = count_participants(clients, share)
    if share == 1 or (count == clients and not independent):
        return list(range(clients))
    rng = np.random.default_rng([seed, round_, Stream.PARTICIPANTS])
    if independent:
        return np.flatnonzero(rng.random(clients) < share).tolist()
    return sorted(rng.choice(clients, count, replace=False).tolist())
