"""Static BatchNorm (HeteroFL): nothing is tracked in training, statistics are asked for afterwards.

Diao, Ding and Tarokh, "HeteroFL: Computation and Communication Efficient Federated Learning for
Heterogeneous Clients", ICLR 2021, arXiv:2010.01264.

Client: ordinary BatchNorm on its own batches, without running statistics.

Server: averages weights, γ and β. Before an evaluation it asks all clients once for the moments of
their data under the final weights and pools them; these are the running statistics.

Only the normalization of HeteroFL is here, not its clients with models of different widths.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from fednorm.core.layer import NormRule, Survey
from fednorm.core.messages import Broadcast
from fednorm.core.strategy import Conversion
from fednorm.nn import rules
from fednorm.nn.convert import federate
from fednorm.strategies.base import Strategy, require_batch_norm


@dataclass(frozen=True)
class HeteroFL(Strategy):
    """BatchNorm that tracks nothing in training; one survey of the clients before evaluation."""

    statistics = "pool"
    survey: ClassVar[Survey] = "evaluation"
    needs_batch_statistics: ClassVar[bool] = True
    lockstep: ClassVar[bool] = True

    def convert(self, model: nn.Module) -> Conversion:
        """Return a copy whose BatchNorm layers follow this strategy's rule."""
        return require_batch_norm(federate(model, tracking=True), self, model)

    def rule(self, broadcast: Broadcast) -> NormRule:  # noqa: ARG002 (the same in all rounds)
        """Normalise with the batch's own statistics and track nothing."""
        return rules.untracked
