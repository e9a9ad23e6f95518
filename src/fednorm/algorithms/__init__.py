"""Training algorithms: one file and one line of the registry for each."""

from typing import Any

from fednorm.algorithms.base import SGD
from fednorm.algorithms.dsgd import DSGD
from fednorm.algorithms.fedavg import FedAvg
from fednorm.registry import create

ALGORITHMS: dict[str, type[FedAvg] | type[DSGD]] = {"fedavg": FedAvg, "dsgd": DSGD}

__all__ = ["ALGORITHMS", "SGD", "create_algorithm", "list_algorithms"]


def create_algorithm(name: str, **fields: Any) -> FedAvg | DSGD:
    """Create the training algorithm `name`; `fields` are its hyper-parameters.

    >>> create_algorithm("fedavg", lr=0.1).lr
    0.1
    """
    return create("algorithm", ALGORITHMS, name, fields)


def list_algorithms() -> list[str]:
    """Return the names of all algorithms, sorted.

    >>> list_algorithms()
    ['dsgd', 'fedavg']
    """
    return sorted(ALGORITHMS)
