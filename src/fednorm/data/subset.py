"""A part of the samples, with as many of each class as can be."""

from typing import Any

import numpy as np
from numpy.typing import NDArray


def balanced(
    owner: str, labels: NDArray[Any], count: int, rng: np.random.Generator
) -> NDArray[np.int64]:
    """Return `count` sample numbers in ascending order, drawn evenly from the classes.

    Every class gives its samples in a random order, one class after the other in turns, until
    there are enough; a class that has no more is passed over.

    >>> balanced("mine", np.array([0, 0, 0, 0, 1]), 3, np.random.default_rng(0))[-1]
    np.int64(4)
    """
    if count > len(labels):
        raise ValueError(f"{owner} has {len(labels)} samples, but {count} were asked for.")
    order = rng.permutation(len(labels))
    turn = np.empty(len(labels), dtype=np.int64)
    for label in np.unique(labels):
        own = order[labels[order] == label]
        turn[own] = np.arange(len(own))
    # Within a turn the random order decides which classes come first.
    return np.sort(order[np.argsort(turn[order], kind="stable")][:count])
