"""Training algorithms: one file for each, and one line here."""

from typing import Any

from fednorm.algorithms.base import SGD
from fednorm.algorithms.dsgd import DSGD
from fednorm.algorithms.fedavg import FedAvg
from fednorm.registry import create

ALGORITHMS: dict[str, type[FedAvg] | type[DSGD]] = {"fedavg": FedAvg, "dsgd": DSGD}

__all__ = ["ALGORITHMS", "SGD", "algorithm"]


def algorithm(name: str, **fields: Any) -> FedAvg | DSGD:
    """Make a training algorithm by its name; fields are its hyper-parameters.

    >>> algorithm("fedavg", lr=0.1).lr
    0.1
    """
    return create("algorithm", ALGORITHMS, name, fields)
