"""BatchNorm layers that follow a rule and record the moments of what they see.

They are torch's own BatchNorm layers with another forward pass: same parameters, same buffers, same
state_dict keys, so a checkpoint moves freely between a plain model and a converted one.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fednorm.core.layer import NormLayer, NormRule, Session, Statistics
from fednorm.core.messages import Report, Running
from fednorm.core.moments import Moments
from fednorm.nn import rules


@dataclass(slots=True)
class Round:
    """What a layer follows and records during one round of one client."""

    rule: NormRule
    session: Session
    site: str
    moments: Moments | None = None
    mass: float = 0.0  # how much of the running statistics this round's batches would replace
    seen: int = 0  # batches

    def add(self, moments: Moments, momentum: float) -> None:
        """Add a batch that replaces `momentum` of what the running statistics hold.

        Step s of E weighs β(1-β)^(E-s), as it would in the running statistics; the weights are
        kept normalised to sum 1, so that the count of a round is that of one step.
        """
        mass = 1 - (1 - self.mass) * (1 - momentum)
        if self.moments is not None and mass:
            new = momentum / mass
            moments = self.moments.scaled(1 - new).merge(moments.scaled(new))
        self.moments, self.mass = moments, mass


_PLAIN = Round(rules.batch, Session(), "")  # a layer that has taken part in no round is BatchNorm


class FedBatchNorm(NormLayer, _BatchNorm):
    """What the layers below share; see `rules.py` for how a batch is treated."""

    round = _PLAIN

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 (torch's own name)
        """Normalise by the rule in training, by the running statistics in evaluation."""
        self._check_input_dim(input)  # type: ignore[no-untyped-call]
        if not self.training and self.running_mean is not None:
            return rules.frozen(self, input)
        return self.round.rule(self, input)

    def begin(self, rule: NormRule, session: Session, site: str) -> None:
        """Start a round: forget what was recorded and follow `rule`."""
        self.round = Round(rule, session, site)

    def advance(self) -> float:
        """Count a batch and return the momentum with which it counts."""
        self.round.seen += 1
        if self.num_batches_tracked is None:
            return 0.0
        self.num_batches_tracked.add_(1)
        if self.momentum is None:
            return 1.0 / int(self.num_batches_tracked)
        return self.momentum

    def record(self, batch: Tensor) -> None:
        """Add a batch to the moments of this round."""
        self.round.add(Moments.of(batch.detach()), self.advance())

    def watch(self, batch: Tensor) -> None:
        """Add a batch to the moments of a survey; here every value weighs the same."""
        moments = Moments.of(batch.detach())
        log = self.round
        log.moments = moments if log.moments is None else log.moments.merge(moments)
        log.seen += 1

    def running(self) -> Running | None:
        """Return a copy of the running statistics, or None if the layer tracks none."""
        if self.running_mean is None:
            return None
        mean, var, batches = self.tracked()
        return Running(mean.clone(), var.clone(), int(batches))

    def load(self, running: Running) -> None:
        """Overwrite the running statistics."""
        mean, var, batches = self.tracked()
        with torch.no_grad():
            mean.copy_(running.mean)
            var.copy_(running.var)
            batches.fill_(running.batches)

    def report(self, statistics: Statistics) -> Report | None:
        """Return what this round showed, or None if the rule recorded nothing."""
        log = self.round
        if not log.seen:
            return None
        mean, var, batches = self.tracked()
        if statistics == "pool" and log.moments is not None:
            return Report(log.moments, int(batches))
        mean, var = mean.clone(), var.clone()
        if log.moments is not None:  # the rule kept the shared statistics fixed meanwhile
            mean.lerp_(log.moments.mean, log.mass)
            var.lerp_(log.moments.unbiased_var, log.mass)
        return Report(Moments(float(log.seen), mean, var), int(batches))

    def tracked(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the live running mean, running variance and counter."""
        mean, var, batches = self.running_mean, self.running_var, self.num_batches_tracked
        if mean is None or var is None or batches is None:
            raise ValueError(
                f"layer {self.round.site!r} tracks no running statistics; "
                "build it with track_running_stats=True."
            )
        return mean, var, batches


class FedBatchNorm1d(FedBatchNorm, nn.BatchNorm1d):
    """BatchNorm1d that follows a rule."""


class FedBatchNorm2d(FedBatchNorm, nn.BatchNorm2d):
    """BatchNorm2d that follows a rule."""


class FedBatchNorm3d(FedBatchNorm, nn.BatchNorm3d):
    """BatchNorm3d that follows a rule."""


class FedSyncBatchNorm(FedBatchNorm, nn.SyncBatchNorm):
    """SyncBatchNorm that follows a rule; a client is one process, so there is nothing to sync."""
