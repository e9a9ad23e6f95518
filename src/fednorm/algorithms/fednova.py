"""FedNova: changes are divided by the clients' numbers of steps before they are averaged.

Wang et al., "Tackling the Objective Inconsistency Problem in Heterogeneous Federated Optimization",
2020, arXiv:2007.07481.

Client: trains as in FedAvg and sends its change divided by ‖a‖₁, and ‖a‖₁: the sum of the weights
that its gradients have in the change. Of τ plain SGD steps it is τ, with momentum more.

Server: adds the mean of both multiplied, weighted by examples: mean(‖a‖₁)·mean(change/‖a‖₁). If all
clients take equally many steps that is FedAvg.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from fednorm.algorithms.fedavg import FedAvg
from fednorm.core.algorithm import CombinedReplies, LocalResult, LocalWork
from fednorm.core.messages import ServerState
from fednorm.core.types import Tensors

_STEPS = "steps"  # the name of ‖a‖₁ in a reply


@dataclass(frozen=True)
class FedNova(FedAvg):
    """FedAvg of normalized changes: clients that take more steps do not weigh more."""

    starts_anew: ClassVar[str] = "normalizes"

    def sends(self, update: Tensors) -> Tensors:
        """Return one number: the weight of all steps."""
        like = next(iter(update.values()), None)
        return {} if like is None else {_STEPS: like.new_zeros(())}

    def find_ranges(self, batches: int) -> Mapping[str, tuple[float, float]]:
        """Return the range of the weight of steps: a client cannot claim more than it took."""
        return {_STEPS: (1.0, self.sum_weights(batches))}

    def local(self, work: LocalWork) -> LocalResult:
        """Train, and normalize the change."""
        trained = super().local(work)
        weight = self.sum_weights(trained.steps)
        return replace(
            trained,
            update={name: change / weight for name, change in trained.update.items()},
            momentum={name: t.fill_(weight) for name, t in self.sends(trained.update).items()},
        )

    def change(self, state: ServerState, combined: CombinedReplies) -> Tensors:  # noqa: ARG002 (protocol)
        """Return the mean normalized change times the mean weight of steps."""
        if _STEPS not in combined.momentum:
            return combined.update
        weight = combined.momentum[_STEPS].clamp_min(1.0)  # a robust rule's may be less
        return {name: weight * change for name, change in combined.update.items()}

    def apply(self, state: ServerState, combined: CombinedReplies) -> ServerState:
        """Move the weights; the weight of steps is not broadcast."""
        return replace(super().apply(state, combined), momentum={})
