"""FedDyn: a dynamic regularizer makes the clients' optima agree with the optimum of all.

Acar et al., "Federated Learning Based on Dynamic Regularization", 2021, arXiv:2111.04263,
Algorithm 1.

Client i: keeps h_i, 0 at first. From the received weights w_t it takes local steps on its loss plus
α/2·‖w - w_t‖² - ⟨h_i, w⟩, then h_i ← h_i - α(w - w_t), and sends w - w_t.

Server: keeps h, 0 at first: h ← h - α·|S|/N·mean(w - w_t) for the |S| of N clients that replied,
and the new weights are mean(w) - h/α. Every client counts the same, as in the paper. Messages are
those of FedAvg.

The paper's client minimises exactly; here it takes its local steps. Personal parameters are not
regularized.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from fednorm.algorithms.fedavg import FedAvg
from fednorm.core.algorithm import CombinedReplies, LocalResult, LocalWork
from fednorm.core.messages import Batches, ServerState
from fednorm.registry import param

_KEPT = "feddyn"  # the kind under which the server keeps h


@dataclass(frozen=True)
class FedDyn(FedAvg):
    """Local steps with a regularizer that follows each client's drift."""

    needs_client_state: ClassVar[bool] = True

    alpha: float = param(0.1, "weight of the regularizer; the paper uses 0.001 to 0.1")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.alpha < float("inf"):
            raise ValueError(f"alpha must be positive and finite, not {self.alpha}.")
        if self.momentum_state != "reset":
            raise ValueError(
                "feddyn keeps its regularizer on the client; use momentum_state = 'reset' with it."
            )
        if not self.server_optimizer.is_plain:
            raise ValueError(
                "feddyn defines the server step; leave server, server_lr and server_momentum "
                "out, or choose another algorithm."
            )

    @property
    def keeps_state(self) -> bool:
        """Clients keep the gradient of their regularizer."""
        return True

    def examples(self, batches: Batches, samples: int) -> int:  # noqa: ARG002 (protocol)
        """Return 1: every client counts the same."""
        return 1

    @torch.no_grad()
    def correct_gradients(self, work: LocalWork) -> None:
        """Add the gradient of the regularizer."""
        start, own = work.broadcast.state.weights, work.optimizer
        for name, weight in work.shared.items():
            if weight.grad is not None:
                weight.grad.add_(weight - start[name], alpha=self.alpha)
                if name in own:
                    weight.grad.sub_(own[name])

    def local(self, work: LocalWork) -> LocalResult:
        """Take regularized steps, and let the regularizer follow them."""
        trained, own = super().local(work), work.optimizer
        moved = {name: -self.alpha * change for name, change in trained.update.items()}
        renewed = {name: own[name] + h if name in own else h for name, h in moved.items()}
        return replace(trained, optimizer={**own, **renewed})

    def apply(self, state: ServerState, combined: CombinedReplies) -> ServerState:
        """Move the weights to the clients' mean, less h/α."""
        kept = dict(state.optimizer.get(_KEPT, {}))
        for name, change in combined.update.items():
            moved = -self.alpha * combined.share * change
            kept[name] = kept[name] + moved if name in kept else moved
        after = super().apply(state, combined)
        weights = {name: after.weights[name] - kept[name] / self.alpha for name in combined.update}
        return replace(after, weights={**after.weights, **weights}, optimizer={_KEPT: kept})
