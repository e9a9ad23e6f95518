"""FedBN: BatchNorm layers stay with their client.

Li, Jiang, Zhang, Kamp and Dou, "FedBN: Federated Learning on Non-IID Features via Local Batch
Normalization", ICLR 2021, arXiv:2102.07623.

Client: keeps γ, β and the running statistics of its BatchNorm layers for itself; the rest as in
FedAvg.

Server: averages the rest. There is no global model: every client's own is tested, on its own test
split or, with `evaluate = "global"`, on all test samples. A client that has not trained yet is
tested with the mean of the layers of those that have (`unseen_init = "average"`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from fednorm.core.types import Kind, Role
from fednorm.strategies.base import RunningStatisticsStrategy


@dataclass(frozen=True)
class FedBN(RunningStatisticsStrategy):
    """Clients keep γ, β and the running statistics of their BatchNorm layers."""

    roles: ClassVar[Mapping[Kind, Role]] = {
        Kind.AFFINE: Role.PERSONAL,
        Kind.STATISTIC: Role.PERSONAL,
        Kind.COUNTER: Role.PERSONAL,
    }
