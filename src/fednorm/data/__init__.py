"""Data sets, and how they are divided among clients (`fednorm.data.partition`)."""

from typing import Any

from fednorm.core.registry import create
from fednorm.data.cifar10 import Cifar10
from fednorm.data.dataset import Dataset, Source
from fednorm.data.digits import Digits
from fednorm.data.patterns import Patterns
from fednorm.data.ring import Ring

__all__ = ["DATASETS", "Cifar10", "Dataset", "Digits", "Patterns", "Ring", "Source", "load"]

DATASETS: dict[str, type[Source]] = {
    "digits": Digits,
    "ring": Ring,
    "patterns": Patterns,
    "cifar10": Cifar10,
}


def load(name: str, seed: int, **fields: Any) -> Dataset:
    """Return the data set `name`, drawn or split with the seed.

    >>> load("ring", seed=0, classes=3).classes
    3
    """
    return create("data set", DATASETS, name, fields).load(seed)
