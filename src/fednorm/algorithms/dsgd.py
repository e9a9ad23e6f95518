"""Distributed SGD: one mini-batch gradient per client and round.

As in Guerraoui et al., 2024, arXiv:2405.14670, Algorithm 3, with client momentum.

Client: computes the gradient of one mini-batch; with momentum ρ it keeps m ← ρ·m + (1-ρ)·g and
sends m.

Server: takes one step along the mean, weighted by batch sizes. Without momentum that mean is
the gradient of the merged batch.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fednorm.algorithms.base import SGD, clip_gradients
from fednorm.core.algorithm import CombinedReplies, LocalResult, LocalWork
from fednorm.core.messages import Batches, ServerState
from fednorm.core.types import Tensors


@dataclass(frozen=True)
class DSGD(SGD):
    """One mini-batch gradient per client and round; the server takes the step."""

    single_step: ClassVar[bool] = True

    @property
    def keeps_state(self) -> bool:
        """Whether clients keep momentum between rounds."""
        return self.momentum > 0

    def examples(self, batches: Batches, samples: int) -> int:  # noqa: ARG002 (protocol)
        """Return the size of the client's batch."""
        return samples

    def local(self, work: LocalWork) -> LocalResult:
        """Compute the gradient of the round's first batch."""
        x, y = next(iter(work.batches.steps))
        parameters = {**work.shared, **work.personal}
        loss = work.loss(work.model(x), y)
        gradients = torch.autograd.grad(
            loss, list(parameters.values()), allow_unused=True, materialize_grads=True
        )
        named = dict(zip(parameters, gradients, strict=True))
        for name, clip in work.clips.items():
            named[name] = clip(named[name], parameters[name].detach())
        if self.clip_norm:
            clipped = clip_gradients(list(named.values()), self.clip_norm, work.batches.stacked)
            named = dict(zip(named, clipped, strict=True))
        sent = self._momentum(work, named)
        rate = self.rate(work.broadcast.round, work.broadcast.rounds)
        with torch.no_grad():
            for name, parameter in work.personal.items():
                parameter.sub_(sent[name], alpha=rate * work.rates.get(name, 1.0))
        return LocalResult(
            update={name: sent[name] for name in work.shared},
            examples=self.examples(work.batches, len(y)),
            loss=float(loss.detach()),
            optimizer={**work.optimizer, **sent} if self.momentum else {},
        )

    def change(self, state: ServerState, combined: CombinedReplies) -> Tensors:
        """Return one step along the aggregated direction."""
        rate = self.rate(state.round + 1, combined.rounds)
        return {
            name: direction * (-rate * combined.rates.get(name, 1.0))
            for name, direction in combined.update.items()
        }

    def move(self, state: ServerState, combined: CombinedReplies) -> Tensors:
        """Take that step, rounded once."""
        rate = self.rate(state.round + 1, combined.rounds)
        return {
            name: torch.sub(
                state.weights[name], direction, alpha=rate * combined.rates.get(name, 1.0)
            )
            for name, direction in combined.update.items()
        }

    def _momentum(self, work: LocalWork, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
        if self.weight_decay:
            parameters = {**work.shared, **work.personal}
            gradients = {
                name: g.add(parameters[name].detach(), alpha=self.weight_decay)
                for name, g in gradients.items()
            }
        if not self.momentum:
            return gradients
        old = work.optimizer
        return {
            name: torch.lerp(g, old[name] if name in old else torch.zeros_like(g), self.momentum)
            for name, g in gradients.items()
        }
