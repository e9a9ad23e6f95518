"""SiloBN: BatchNorm statistics stay with their client, γ and β are shared.

Andreux, Ogier du Terrail, Beguier and Tramel, "Siloed Federated Learning for Multi-Centric
Histopathology Datasets", 2020, arXiv:2008.07424.

Client: keeps the running statistics of its BatchNorm layers for itself; the rest as in FedAvg.

Server: averages the rest. There is no global model: every client's own is tested, on its own test
split or, with `evaluate = "global"`, on all test samples. A client that has not trained yet is
tested with the mean of the layers of those that have (`unseen_init = "average"`).

For clients that differ in features. Where they differ in labels, and take local epochs, it was
behind plain FedAvg on the clients' own data; `fedbn`, which keeps γ and β as well, was ahead of it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from fednorm.core.types import Kind, Role
from fednorm.strategies.base import RunningStatisticsStrategy


@dataclass(frozen=True)
class SiloBN(RunningStatisticsStrategy):
    """Clients keep the running statistics of their BatchNorm layers; γ and β are averaged."""

    roles: ClassVar[Mapping[Kind, Role]] = {
        Kind.AFFINE: Role.SHARED,
        Kind.STATISTIC: Role.PERSONAL,
        Kind.COUNTER: Role.PERSONAL,
    }
