"""Training algorithms: one file and one line of the registry for each."""

from typing import TYPE_CHECKING, Any

from fednorm.registry import Registry, export_lazily

if TYPE_CHECKING:
    from fednorm.algorithms.base import SGD
    from fednorm.algorithms.dsgd import DSGD
    from fednorm.algorithms.fedavg import FedAvg

__all__ = ["ALGORITHMS", "DSGD", "SGD", "FedAvg", "create_algorithm", "list_algorithms"]

ALGORITHMS: "Registry[FedAvg | DSGD]" = Registry(
    "algorithm",
    __name__,
    {
        "fedavg": "fedavg:FedAvg",
        "dsgd": "dsgd:DSGD",
        "fedprox": "fedprox:FedProx",
        "scaffold": "scaffold:Scaffold",
        "fednova": "fednova:FedNova",
        "feddyn": "feddyn:FedDyn",
    },
    "fednorm.core.algorithm:Algorithm",
)

__getattr__ = export_lazily(
    __name__,
    {
        "fednorm.algorithms.base": "SGD",
        "fednorm.algorithms.dsgd": "DSGD",
        "fednorm.algorithms.fedavg": "FedAvg",
    },
)


def create_algorithm(name: str, **fields: Any) -> "FedAvg | DSGD":
    """Create the training algorithm `name`; `fields` are its hyper-parameters.

    >>> create_algorithm("fedavg", lr=0.1).lr
    0.1
    """
    return ALGORITHMS.create(name, fields)


def list_algorithms() -> list[str]:
    """Return the names of all algorithms, sorted.

    >>> list_algorithms()
    ['dsgd', 'fedavg', 'feddyn', 'fednova', 'fedprox', 'scaffold']
    """
    return sorted(ALGORITHMS.list_names())
