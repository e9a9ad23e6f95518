"""FedAvg: local steps on every client, then an average weighted by the clients' examples.

McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", 2017,
arXiv:1602.05629. The optimizer's momentum between rounds follows Zhong et al., 2023,
arXiv:2303.06530, section 7.

Client: trains with SGD, Adam or AdamW on its batches of the round, and sends the change of its
weights.

Server: adds the weighted mean of the changes.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.optim.sgd import sgd

from fednorm.algorithms.base import SGD, clip_gradients, parameter_groups
from fednorm.core.algorithm import LocalResult, LocalWork
from fednorm.core.messages import Batches
from fednorm.core.types import Tensors
from fednorm.registry import param


@dataclass(frozen=True)
class FedAvg(SGD):
    """Local SGD steps or epochs, then an average weighted by examples."""

    single_step: ClassVar[bool] = False
    starts_anew: ClassVar[str] = ""  # why plain SGD has to start anew every round, if it has to

    optimizer: Literal["sgd", "adam", "adamw"] = param(
        "sgd",
        "optimizer of the local steps; 'adam' and 'adamw' (weight decay apart from the gradient) "
        "are reset every round and take no momentum",
    )
    momentum_state: Literal["reset", "local", "global"] = param(
        "reset",
        "momentum between rounds: 'reset', 'local' (kept on the client) or 'global' (averaged at "
        "the server and sent back, which doubles the message)",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.momentum_state not in ("reset", "local", "global"):
            raise ValueError(
                f"momentum_state must be 'reset', 'local' or 'global', not {self.momentum_state!r}."
            )
        if self.optimizer not in ("sgd", "adam", "adamw"):
            raise ValueError(f"optimizer must be 'sgd', 'adam' or 'adamw', not {self.optimizer!r}.")
        if self.optimizer != "sgd" and (self.momentum or self.momentum_state != "reset"):
            raise ValueError(
                f"the optimizer {self.optimizer!r} keeps its moments itself and resets them every "
                "round; use momentum = 0 and momentum_state = 'reset' with it."
            )
        if self.starts_anew and (self.optimizer != "sgd" or self.momentum_state != "reset"):
            raise ValueError(
                f"{type(self).__name__.lower()} {self.starts_anew} SGD that starts anew every "
                "round; use optimizer = 'sgd' and momentum_state = 'reset' with it."
            )

    def sends(self, update: Tensors) -> Tensors:
        """Return the momentum of all parameters, if it is global."""
        return update if self.momentum_state == "global" and self.momentum > 0 else {}

    @property
    def keeps_state(self) -> bool:
        """Whether clients keep momentum between rounds."""
        return self.momentum_state == "local" and self.momentum > 0

    def examples(self, batches: Batches, samples: int) -> int:  # noqa: ARG002 (protocol)
        """Return how many examples the client holds."""
        return batches.examples

    def local(self, work: LocalWork) -> LocalResult:
        """Take one SGD step for each batch."""
        parameters = {**work.shared, **work.personal}
        optimizer = self._optimizer(parameters, work)
        for name, value in self._received_momentum(work).items():
            if name in parameters:
                optimizer.state[parameters[name]]["momentum_buffer"] = value.clone()
        losses = []
        for x, y in work.batches.steps:
            optimizer.zero_grad()
            loss = work.loss(work.model(x), y)
            loss.backward()  # type: ignore[no-untyped-call]
            self.correct_gradients(work)
            self._clip(parameters, work)
            optimizer.step()
            losses.append(loss.detach())
        if not losses:
            raise ValueError(
                f"client {work.batches.client} has no batch to train on; its steps must yield at "
                "least one, every time they are iterated over."
            )
        sent, kept = self._momentum(optimizer, work)
        start = work.broadcast.state.weights
        return LocalResult(
            update={name: p.detach() - start[name] for name, p in work.shared.items()},
            examples=self.examples(work.batches, len(y)),
            loss=float(torch.stack(losses).mean()),
            optimizer=kept,
            momentum=sent,
            steps=len(losses),
        )

    def sum_weights(self, steps: int) -> float:
        """Return ‖a‖₁: what all gradients of `steps` weigh in the change, in learning rates.

        With momentum ρ, from 0, it is (τ - ρ(1-ρ^τ)/(1-ρ)) / (1-ρ) of τ steps.

        >>> FedAvg().sum_weights(3), round(FedAvg(momentum=0.5).sum_weights(3), 9)  # 1.75+1.5+1
        (3.0, 4.25)
        """
        rho = self.momentum
        return (steps - rho * (1 - rho**steps) / (1 - rho)) / (1 - rho)

    def forget_clients(self) -> "FedAvg":
        """Return plain FedAvg of the same settings, for one machine: no client drifts there."""
        return FedAvg(**{field.name: getattr(self, field.name) for field in fields(FedAvg)})

    def correct_gradients(self, work: LocalWork) -> None:
        """Change the gradients of a step before they are clipped; FedAvg's stay as they are."""

    def _clip(self, parameters: Mapping[str, nn.Parameter], work: LocalWork) -> None:
        """Clip the gradients of a step, as the strategy says and by their joint norm."""
        for name, clip in work.clips.items():
            weight = parameters[name]
            if weight.grad is not None:
                weight.grad = clip(weight.grad, weight.detach())
        if self.clip_norm:
            having = {p: p.grad for p in parameters.values() if p.grad is not None}
            clipped = clip_gradients(list(having.values()), self.clip_norm, work.batches.stacked)
            for parameter, gradient in zip(having, clipped, strict=True):
                parameter.grad = gradient

    def _optimizer(
        self, parameters: Mapping[str, nn.Parameter], work: LocalWork
    ) -> "torch.optim.Optimizer | GroupedSGD":
        rate = self.rate(work.broadcast.round, work.broadcast.rounds)
        groups = parameter_groups(parameters, rate, work.rates)
        if self.optimizer != "sgd":
            adam = torch.optim.Adam if self.optimizer == "adam" else torch.optim.AdamW
            return adam(groups, lr=rate, weight_decay=self.weight_decay)
        return GroupedSGD(groups, self.momentum, self.weight_decay)

    def _received_momentum(self, work: LocalWork) -> Tensors:
        if self.momentum_state == "reset":
            return {}
        if self.momentum_state == "local":
            return work.optimizer
        return {**work.optimizer, **work.broadcast.state.momentum}

    def _momentum(
        self, optimizer: "torch.optim.Optimizer | GroupedSGD", work: LocalWork
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return the momentum to send and the momentum to keep."""
        if self.momentum_state == "reset" or not self.momentum:
            return {}, {}
        shared, personal = _buffers(optimizer, work.shared), _buffers(optimizer, work.personal)
        if self.momentum_state == "local":
            # Keep the momentum of parameters that do not train in this round.
            return {}, {**work.optimizer, **shared, **personal}
        return shared, {**work.optimizer, **personal}


class GroupedSGD:
    """`torch.optim.SGD` without its class, whose first step imports torch's compiler: 2 seconds."""

    def __init__(
        self, groups: Sequence[Mapping[str, Any]], momentum: float, weight_decay: float
    ) -> None:
        self.groups, self.momentum, self.weight_decay = groups, momentum, weight_decay
        self.state: defaultdict[Tensor, dict[str, Any]] = defaultdict(dict)

    def zero_grad(self) -> None:
        """Forget the gradients."""
        for group in self.groups:
            for parameter in group["params"]:
                parameter.grad = None

    @torch.no_grad()
    def step(self) -> None:
        """Take a step along the gradients."""
        for group in self.groups:
            having = [p for p in group["params"] if p.grad is not None]
            buffers = (
                [self.state[p].get("momentum_buffer") for p in having] if self.momentum else []
            )
            sgd(
                having,
                [p.grad for p in having],
                buffers,
                has_sparse_grad=any(p.grad.is_sparse for p in having),
                foreach=True,
                weight_decay=self.weight_decay,
                momentum=self.momentum,
                lr=group["lr"],
                dampening=0,
                nesterov=False,
                maximize=False,
            )
            for parameter, buffer in zip(having, buffers, strict=False):
                self.state[parameter]["momentum_buffer"] = buffer


def _buffers(
    optimizer: "torch.optim.Optimizer | GroupedSGD", parameters: Mapping[str, nn.Parameter]
) -> dict[str, Tensor]:
    states = {name: optimizer.state[p].get("momentum_buffer") for name, p in parameters.items()}
    return {name: buffer for name, buffer in states.items() if buffer is not None}
