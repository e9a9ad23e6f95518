"""SCAFFOLD: control variates correct the drift of clients in their local steps.

Karimireddy et al., "SCAFFOLD: Stochastic Controlled Averaging for Federated Learning", 2020,
arXiv:1910.06378, Algorithm 1 with option II.

Client i: keeps a control variate c_i, 0 at first. It takes K steps y ← y - η(g(y) - c_i + c) from
the received weights x, then c_i⁺ = c_i - c + (x - y)/(K·η), and sends y - x and c_i⁺ - c_i.

Server: x ← x + η_g·mean(y - x), c ← c + |S|/N·mean(c_i⁺ - c_i) for the |S| of N clients that
replied. Every client counts the same, as in the paper. It broadcasts x and c: messages are twice as
large both ways.

η_g is `server_lr`. With local momentum, which the paper has not, K becomes what the gradients
weigh in y - x, as in FedNova, so that c_i is still a mean of gradients. Personal parameters have no
control variates. Option I, a pass over all the client's data at x, is not here.

The paper uses every reply. Here c_i moves only if its change is used, as c does: else c would
differ from the mean of all c_i until the run ends, and a client whose replies are always rejected
would drift from c until its loss is NaN. A node of Flower is not told, so there c_i moves always.
After a round that `rollback` undoes, c_i has moved as well; the next one renews it from gradients.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from fednorm.algorithms.fedavg import FedAvg
from fednorm.core.algorithm import CombinedReplies, LocalResult, LocalWork
from fednorm.core.messages import Batches, ServerState
from fednorm.core.types import Tensors


@dataclass(frozen=True)
class Scaffold(FedAvg):
    """Local steps corrected by control variates of the client and of all clients."""

    needs_client_state: ClassVar[bool] = True
    starts_anew: ClassVar[str] = "reads its control variates off"

    @property
    def keeps_state(self) -> bool:
        """Clients keep their control variates."""
        return True

    def sends(self, update: Tensors) -> Tensors:
        """Return the changes of control variates, one for each parameter."""
        return update

    def examples(self, batches: Batches, samples: int) -> int:  # noqa: ARG002 (protocol)
        """Return 1: every client counts the same."""
        return 1

    @torch.no_grad()
    def correct_gradients(self, work: LocalWork) -> None:
        """Add c - c_i."""
        shared, own = work.broadcast.state.momentum, work.optimizer
        for name, weight in work.shared.items():
            if weight.grad is not None:
                _add(weight.grad, shared.get(name), 1.0)
                _add(weight.grad, own.get(name), -1.0)

    def local(self, work: LocalWork) -> LocalResult:
        """Take corrected steps, and renew the control variates."""
        trained = super().local(work)
        scale = self.rate(work.broadcast.round, work.broadcast.rounds)
        scale *= -self.sum_weights(trained.steps)
        shared, own = work.broadcast.state.momentum, work.optimizer
        changes = {}
        for name, update in trained.update.items():
            change = update / (scale * work.rates.get(name, 1.0))
            _add(change, shared.get(name), -1.0)
            changes[name] = change
        renewed = {name: own[name] + c if name in own else c for name, c in changes.items()}
        return replace(trained, momentum=changes, optimizer={**own, **renewed})

    def apply(self, state: ServerState, combined: CombinedReplies) -> ServerState:
        """Move the weights, and the shared control variates by the mean over all clients."""
        moved = {name: combined.share * change for name, change in combined.momentum.items()}
        for name, change in moved.items():
            _add(change, state.momentum.get(name), 1.0)
        after = super().apply(state, combined)
        return replace(after, momentum={**state.momentum, **moved})


def _add(total: Tensor, value: Tensor | None, factor: float) -> None:
    """Add a control variate, which is 0 where there is none yet."""
    if value is not None:
        total.add_(value, alpha=factor)
