"""Data sets, and how they are divided among clients (`fednorm.data.partition`)."""

from typing import Any

from fednorm.core.registry import create
from fednorm.data.dataset import Dataset, Source
from fednorm.data.digits import Digits
from fednorm.data.patterns import Patterns
from fednorm.data.ring import Ring

__all__ = ["DATASETS", "Dataset", "Digits", "Patterns", "Ring", "Source", "load"]

DATASETS: dict[str, type[Source]] = {
    "digits": Digits,
    "ring": Ring,
    "patterns": Patterns,
}


def load(name: str, seed: int, **fields: Any) -> Dataset:
    """Return the data set `name`, drawn or split with the seed.

    >>> load("ring", seed=0, classes=3).classes
    3
    """
    return create("data set", DATASETS, name, fields).load(seed)
