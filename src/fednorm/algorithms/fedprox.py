"""FedProx: local steps that are pulled back towards the weights of the round's beginning.

Li et al., "Federated Optimization in Heterogeneous Networks", 2020, arXiv:1812.06127.

Client: as in FedAvg, on its loss plus μ/2·‖w - w_t‖², w_t the received weights.

Server: as in FedAvg.

Shared parameters alone are pulled back; personal ones have no received value.
"""

from dataclasses import dataclass

import torch

from fednorm.algorithms.fedavg import FedAvg
from fednorm.core.algorithm import LocalWork
from fednorm.registry import param


@dataclass(frozen=True)
class FedProx(FedAvg):
    """FedAvg with a proximal term that keeps local weights near the received ones."""

    mu: float = param(0.01, "weight of the proximal term; 0 is fedavg")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.mu < float("inf"):
            raise ValueError(f"mu must be 0 or more and finite, not {self.mu}.")

    @torch.no_grad()
    def correct_gradients(self, work: LocalWork) -> None:
        """Add the gradient of the proximal term."""
        start = work.broadcast.state.weights
        for name, weight in work.shared.items():
            if weight.grad is not None:
                weight.grad.add_(weight - start[name], alpha=self.mu)
