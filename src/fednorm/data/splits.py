"""Test samples held out of data that come without a test part."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fednorm.data.store import Arrays


def held_out(kinds: NDArray[Any], share: float, rng: np.random.Generator) -> NDArray[np.bool_]:
    """Return which samples are for testing: the same share of every kind, rounded.

    >>> held_out(np.array([0, 0, 0, 0, 1, 1]), 0.5, np.random.default_rng(0)).sum()
    np.int64(3)
    """
    chosen = np.zeros(len(kinds), dtype=np.bool_)
    for kind in np.unique(kinds):
        own = np.flatnonzero(kinds == kind)
        chosen[rng.permutation(own)[: round(share * len(own))]] = True
    return chosen


def check_share(name: str, share: float) -> None:
    """Refuse a share that leaves one of the parts empty."""
    if not 0 < share < 1:
        raise ValueError(f"data set {name!r} needs test_share between 0 and 1, but got {share}.")


def split(arrays: Arrays, kinds: NDArray[Any], share: float, rng: np.random.Generator) -> Arrays:
    """Return the arrays of a training part and, named with `_test`, of a test part."""
    held = held_out(kinds, share, rng)
    train = {name: array[~held] for name, array in arrays.items()}
    return train | {f"{name}_test": array[held] for name, array in arrays.items()}
