"""The base of all training algorithms: fields of SGD, and learning rates by round and parameter."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, TypeAlias

import torch
from torch import Tensor, nn

from fednorm.algorithms.server_optimizer import ServerOptimizer, ServerRule
from fednorm.core.algorithm import CombinedReplies
from fednorm.core.messages import ServerState
from fednorm.core.types import Tensors
from fednorm.registry import param

Schedule: TypeAlias = Literal["constant", "step", "inverse"]


@dataclass(frozen=True)
class SGD:
    """Stochastic gradient descent: learning rate, schedule, momentum and weight decay."""

    needs_client_state: ClassVar[bool] = False

    lr: float = param(0.05, "learning rate")
    momentum: float = param(0.0, "momentum of the optimizer, in [0, 1)")
    weight_decay: float = param(0.0, "weight decay, added to the gradient")
    schedule: Schedule = param(
        "constant", "'constant', 'step' (÷10 at the milestones), or 'inverse' (η/(1+⌊t/1000⌋))"
    )
    milestones: tuple[float, ...] = param(
        (0.5, 0.75), "shares of all rounds after each of which 'step' divides by 10"
    )
    decay_every: int = param(1000, "rounds after which 'inverse' divides by 2, then by 3, …")
    warmup: int | None = param(
        None, "rounds of linear warm-up; 'none' leaves it to the strategy (50 for dualbn, else 0)"
    )

    clip_norm: float = param(
        0.0, "largest norm of the gradient of all parameters in a step; 0 clips nothing"
    )

    server: ServerRule = param(
        "sgd",
        "the server's optimizer of the clients' mean change: 'sgd', 'adam', 'yogi', 'adagrad'",
    )
    server_lr: float | None = param(
        None, "the server's learning rate; 'none' is 1 for 'sgd' and 0.01 for the others"
    )
    server_momentum: float | None = param(
        None,
        "the server's momentum (β1), in [0, 1); 'none' is 0.9 for 'adam' and 'yogi', else 0",
    )
    server_beta2: float = param(0.99, "decay of the squares of 'adam' and 'yogi', in [0, 1)")
    server_tau: float = param(
        0.001, "added to the root of the squares: the smaller, the more adaptive"
    )

    def __post_init__(self) -> None:
        _ = self.server_optimizer  # checks its fields
        if not 0 <= self.clip_norm < float("inf"):
            raise ValueError(f"clip_norm must be 0 or more and finite, not {self.clip_norm}.")
        if self.warmup is not None and self.warmup < 0:
            raise ValueError(f"warmup must not be negative, but is {self.warmup}.")
        if not 0 < self.lr < float("inf"):
            raise ValueError(f"lr must be positive and finite, not {self.lr}.")
        if not all(0 <= share <= 1 for share in self.milestones):
            raise ValueError(f"milestones must be shares from 0 to 1, not {self.milestones}.")
        if self.decay_every < 1:
            raise ValueError(f"decay_every must be at least 1 round, not {self.decay_every}.")
        if not 0 <= self.momentum < 1:
            raise ValueError(f"momentum must be in [0, 1), not {self.momentum}.")
        if not 0 <= self.weight_decay < float("inf"):
            raise ValueError(
                f"weight_decay must be finite and not negative, but is {self.weight_decay}."
            )
        if self.schedule not in ("constant", "step", "inverse"):
            raise ValueError(
                f"schedule must be 'constant', 'step' or 'inverse', not {self.schedule!r}."
            )

    @property
    def clips_gradients(self) -> bool:
        """Whether a client clips its gradient before a step."""
        return self.clip_norm > 0

    def sends(self, update: Tensors) -> Tensors:  # noqa: ARG002 (protocol)
        """Return what clients send with an update, by name: nothing."""
        return {}

    def find_ranges(self, batches: int) -> Mapping[str, tuple[float, float]]:  # noqa: ARG002 (protocol)
        """Return the range of single numbers that clients send: none does."""
        return {}

    @property
    def server_optimizer(self) -> ServerOptimizer:
        """The server's optimizer."""
        return ServerOptimizer(
            self.server, self.server_lr, self.server_momentum, self.server_beta2, self.server_tau
        )

    def change(self, state: ServerState, combined: CombinedReplies) -> Tensors:  # noqa: ARG002 (protocol)
        """Return the change of weights that the clients propose."""
        return combined.update

    def move(self, state: ServerState, combined: CombinedReplies) -> Tensors:
        """Return the weights after the change that the clients propose."""
        change = self.change(state, combined)
        return {name: state.weights[name] + moved for name, moved in change.items()}

    def apply(self, state: ServerState, combined: CombinedReplies) -> ServerState:
        """Move the weights by the server's optimizer; momentum is that of the replies."""
        optimizer, kept = self.server_optimizer, state.optimizer
        if optimizer.is_plain:
            weights = self.move(state, combined)
        else:
            weights, kept = optimizer.step(state, self.change(state, combined))
        return replace(
            state,
            weights={**state.weights, **weights},
            momentum=combined.momentum,
            optimizer=kept,
        )

    def rate(self, round_: int, rounds: int | None) -> float:
        """Return the learning rate of a round, counted from 1.

        `step` divides by 10 at each milestone, a share of the rounds (FixBN); `inverse` is
        η/(1+⌊t/decay_every⌋) with t counted from 0 (FBN).
        """
        warm = min(1.0, round_ / self.warmup) if self.warmup else 1.0
        if self.schedule == "constant":
            return warm * self.lr
        if self.schedule == "inverse":
            return warm * (self.lr / (1 + (round_ - 1) // self.decay_every))
        if rounds is None:
            raise ValueError(
                "the schedule 'step' needs the number of rounds; give it, or 'constant'."
            )
        passed = sum(round_ > share * rounds for share in self.milestones)
        return warm * (self.lr * 0.1**passed)


def clip_gradients(gradients: Sequence[Tensor], largest: float, clients: int = 1) -> list[Tensor]:
    """Scale all gradients of a client down together, where their joint norm exceeds `largest`.

    With several `clients`, whose parameters are stacked along the first axis, each has its norm.

    >>> clip_gradients([torch.tensor([3.0]), torch.tensor([4.0])], largest=1.0)
    [tensor([0.6000]), tensor([0.8000])]
    """
    squares = [g.reshape(clients, -1).square().sum(1) for g in gradients]
    norms = torch.stack(squares).sum(0).sqrt()
    factors = (largest / norms).clamp_max(1.0)  # of a norm of 0 it is infinite, so 1
    return [g * _spread(factors, g) for g in gradients]


def _spread(factors: Tensor, stacked: Tensor) -> Tensor:
    """Return each client's factor for all its rows of a stacked tensor."""
    if len(factors) == 1:
        return factors[0]
    rows = factors.repeat_interleave(len(stacked) // len(factors))
    return rows.view(-1, *[1] * (stacked.dim() - 1))


def parameter_groups(
    parameters: Mapping[str, nn.Parameter], rate: float, rates: Mapping[str, float]
) -> list[dict[str, Any]]:
    """Return an optimizer's parameter groups; a group's rate is `rate` times that in `rates`.

    >>> two = nn.Linear(1, 1)
    >>> [g["lr"] for g in parameter_groups(dict(two.named_parameters()), 0.5, {"bias": 0.1})]
    [0.5, 0.05]
    """
    groups: dict[float, list[nn.Parameter]] = {}
    for name, parameter in parameters.items():
        groups.setdefault(rates.get(name, 1.0), []).append(parameter)
    return [{"params": own, "lr": rate * factor} for factor, own in groups.items()]
