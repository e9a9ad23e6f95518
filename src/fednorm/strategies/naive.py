"""FedAvg with BatchNorm as it is: the method that breaks.

McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", 2017,
arXiv:1602.05629, applied to all tensors of a model with BatchNorm; called "Naive BatchNorm" by
Guerraoui et al., 2024.

Client: ordinary BatchNorm on its own batches. A model without BatchNorm is trained as it is.

Server: averages weights, γ, β and the running statistics. The average of the variances lacks the
variance between clients, on purpose: that is the method. `statistics="pool"` fixes this part, but
not the normalisation by local batches.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from fednorm.core.layer import NormRule
from fednorm.core.messages import Broadcast
from fednorm.nn import rules
from fednorm.strategies.base import SharedStatisticsStrategy


@dataclass(frozen=True)
class Naive(SharedStatisticsStrategy):
    """Ordinary BatchNorm on every client; the server averages everything."""

    mergeable_batches: ClassVar[bool] = True
    needs_tracking: ClassVar[bool] = False  # nothing is shared of layers that track nothing

    def takes(self, model: nn.Module) -> bool:
        """Take every model: without BatchNorm layers it is FedAvg."""
        del model
        return True

    def rule(self, broadcast: Broadcast) -> NormRule:  # noqa: ARG002 (the same in all rounds)
        """Normalise with the batch's own statistics."""
        return rules.batch_stats if self.statistics == "average" else rules.batch_stats_recorded
