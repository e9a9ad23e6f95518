"""No normalization at all: plain FedAvg on a model without BatchNorm.

McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", 2017,
arXiv:1602.05629.

Client: trains the model with its BatchNorm layers taken out; γ and β go with them.

Server: averages everything. The only strategy for a model that has no BatchNorm layers.
"""

from dataclasses import dataclass

from torch import nn

from fednorm.core.strategy import Conversion, Strategy
from fednorm.nn.convert import remove


@dataclass(frozen=True)
class NoNorm(Strategy):
    """BatchNorm layers are taken out."""

    def convert(self, model: nn.Module) -> Conversion:
        """Return a copy without BatchNorm layers."""
        return remove(model)
