"""The server's optimizer: the mean change of the clients' weights as a (negative) gradient.

Reddi et al., "Adaptive Federated Optimization", 2021, arXiv:2003.00295, Algorithm 2: FedAdagrad,
FedAdam and FedYogi. 'sgd' with momentum is FedAvgM: Hsu, Qi and Brown, 2019, arXiv:1909.06335.

Client: as its algorithm says.

Server: with the mean change Δ, β1 the momentum and η the server's learning rate,

    sgd                  m ← β1·m + Δ               w ← w + η·m
    adam, yogi, adagrad  m ← β1·m + (1-β1)·Δ        w ← w + η·m / (√v + τ)

    adam     v ← β2·v + (1-β2)·Δ²
    yogi     v ← v - (1-β2)·Δ²·sign(v - Δ²)
    adagrad  v ← v + Δ²

from m = 0 and v = τ², without bias correction, as in the paper. Parameters alone pass through it:
statistics and buffers would become meaningless, a variance negative.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor

from fednorm.core.messages import ServerState
from fednorm.core.types import Tensors

ServerRule: TypeAlias = Literal["sgd", "adam", "yogi", "adagrad"]


@dataclass(frozen=True, slots=True)
class ServerOptimizer:
    """A rule with its hyper-parameters; None is the rule's default.

    >>> ServerOptimizer("sgd").is_plain, ServerOptimizer("adam").rate
    (True, 0.01)
    """

    rule: ServerRule
    lr: float | None = None
    momentum: float | None = None
    beta2: float = 0.99
    tau: float = 0.001

    def __post_init__(self) -> None:
        if self.rule not in get_args(ServerRule):
            known = ", ".join(map(repr, get_args(ServerRule)))
            raise ValueError(f"server must be one of {known}, not {self.rule!r}.")
        if not 0 < self.rate < float("inf"):
            raise ValueError(f"server_lr must be positive and finite, not {self.lr}.")
        if not 0 <= self.beta1 < 1:
            raise ValueError(f"server_momentum must be in [0, 1), not {self.momentum}.")
        if not 0 <= self.beta2 < 1:
            raise ValueError(f"server_beta2 must be in [0, 1), not {self.beta2}.")
        if not 0 < self.tau < float("inf"):
            raise ValueError(f"server_tau must be positive and finite, not {self.tau}.")

    @property
    def rate(self) -> float:
        """The server's learning rate."""
        if self.lr is None:
            return 1.0 if self.rule == "sgd" else 0.01
        return self.lr

    @property
    def beta1(self) -> float:
        """The momentum."""
        if self.momentum is None:
            return 0.9 if self.rule in {"adam", "yogi"} else 0.0
        return self.momentum

    @property
    def is_plain(self) -> bool:
        """Whether weights move by the clients' mean change and nothing is kept."""
        return self.rule == "sgd" and self.rate == 1 and not self.beta1

    def step(self, state: ServerState, change: Tensors) -> tuple[Tensors, Mapping[str, Tensors]]:
        """Return the new weights after `change`, and what to keep of it.

        Parameters without a change, which do not learn in this round, keep theirs.
        """
        old, squares = state.optimizer.get("momentum", {}), state.optimizer.get("squares", {})
        fresh = 1.0 if self.rule == "sgd" else 1.0 - self.beta1
        moments = {
            name: fresh * own + self.beta1 * old[name] if name in old else fresh * own
            for name, own in change.items()
        }
        kept = {"momentum": {**old, **moments}} if self.beta1 else {}
        steps = moments
        if self.rule != "sgd":
            first = self.tau**2
            squares = dict(squares)
            for name, own in change.items():
                before = squares.get(name, torch.full_like(own, first))
                squares[name] = self._follow_square(before, own.square())
            kept["squares"] = squares
            steps = {name: m / (squares[name].sqrt() + self.tau) for name, m in moments.items()}
        weights = {name: state.weights[name] + self.rate * step for name, step in steps.items()}
        return weights, kept

    def _follow_square(self, before: Tensor, new: Tensor) -> Tensor:
        if self.rule == "adam":
            return self.beta2 * before + (1 - self.beta2) * new
        if self.rule == "yogi":
            return before - (1 - self.beta2) * new * (before - new).sign()
        return before + new
