"""FedBN: BatchNorm layers stay with their client.

Li, Jiang, Zhang, Kamp and Dou, "FedBN: Federated Learning on Non-IID Features via Local Batch
Normalization", ICLR 2021, arXiv:2102.07623.

Client: keeps γ, β and the running statistics of its BatchNorm layers for itself; the rest as in
FedAvg.

Server: averages the rest. There is no global model, so accuracy is measured per client.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from fednorm.core.types import Kind, Role
from fednorm.strategies.base import BatchNormStrategy


@dataclass(frozen=True)
class FedBN(BatchNormStrategy):
    """Clients keep γ, β and the running statistics of their BatchNorm layers."""

    needs_batch_statistics: ClassVar[bool] = True
    roles: ClassVar[Mapping[Kind, Role]] = {
        Kind.AFFINE: Role.PERSONAL,
        Kind.STATISTIC: Role.PERSONAL,
        Kind.COUNTER: Role.PERSONAL,
    }
