"""FedBN: BatchNorm layers stay with their client.

Li, Jiang, Zhang, Kamp and Dou, "FedBN: Federated Learning on Non-IID Features via Local Batch
Normalization", ICLR 2021, arXiv:2102.07623.

Client: keeps γ, β and the running statistics of its BatchNorm layers for itself; the rest as in
FedAvg. Other normalization layers (LayerNorm, RMSNorm, GroupNorm, InstanceNorm) stay with it as
well, so that a transformer has personal layers too.

Server: averages the rest. There is no global model: every client's own is tested, on its own test
split or, with `evaluate = "global"`, on all test samples. A client that has not trained yet is
tested with the mean of the layers of those that have (`unseen_init = "average"`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from fednorm.core.layout import NORM_LAYERS
from fednorm.core.types import Kind, Role
from fednorm.strategies.base import RunningStatisticsStrategy, list_other_norms


@dataclass(frozen=True)
class FedBN(RunningStatisticsStrategy):
    """Clients keep their normalization layers: γ, β and running statistics."""

    roles: ClassVar[Mapping[Kind, Role]] = {
        Kind.AFFINE: Role.PERSONAL,
        Kind.STATISTIC: Role.PERSONAL,
        Kind.COUNTER: Role.PERSONAL,
    }

    def role(self, module: nn.Module, kind: Kind) -> Role:
        """Keep the tensors of every normalization layer."""
        kept = isinstance(module, NORM_LAYERS)
        return self.roles[kind] if kept else super().role(module, kind)

    def takes(self, model: nn.Module) -> bool:
        """Take a model with normalization layers of any kind."""
        return bool(list_other_norms(model))
