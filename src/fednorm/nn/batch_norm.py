"""BatchNorm layers that follow a rule and record the moments of what they see.

They are torch's own BatchNorm layers with another forward pass: same parameters, same buffers, same
state_dict keys, so a checkpoint moves freely between a plain model and a converted one.
"""

from dataclasses import dataclass, field, replace
from functools import reduce

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fednorm.core.layer import NormLayer, NormRule, Session, Statistics
from fednorm.core.messages import Report, Running
from fednorm.core.moments import Moments
from fednorm.nn import rules


@dataclass(slots=True)
class Log:
    """What a layer has seen in one of its calls of a step, over the steps of a round."""

    moments: Moments
    var: Tensor  # the mean of the batches' own variances, as running statistics follow them
    samples: float  # that the moments are of, in the same weights
    mass: float  # how much of the running statistics these batches would replace


@dataclass(slots=True)
class Round:
    """What a layer follows and records during one round of one client."""

    rule: NormRule
    session: Session
    site: str
    logs: list[Log] = field(default_factory=list)  # one for each call in a step
    seen: int = 0  # batches
    watched: int = 0  # batches of a pass without training
    step: int = -1  # of the last call
    call: int = 0  # which call of its step that was, counted from 0
    per_step: set[int] = field(default_factory=set)  # how many calls the steps before it had

    def next_call(self) -> int:
        """Return which call of its step this is: a shared layer is called more than once."""
        again = self.step == self.session.step and self.step >= 0
        if not again and self.logs:
            self.per_step.add(self.call + 1)
        self.call = self.call + 1 if again else 0
        self.step = self.session.step
        return self.call

    def add(self, moments: Moments, momentum: float, *, rows: int, call: int = 0) -> None:
        """Add a batch that replaces `momentum` of what the running statistics hold.

        Step s of E weighs β(1-β)^(E-s), as it would in the running statistics; the weights are
        kept normalised to sum 1. Calls are kept apart: torch's running variance follows each of
        them, and does not see how far their means are apart.
        """
        samples = float(self.session.samples or rows)
        for log in self.logs:
            log.mass *= 1 - momentum
        if call == len(self.logs):
            self.logs.append(Log(moments, moments.unbiased_var, samples, momentum))
            return
        log = self.logs[call]
        log.mass += momentum
        new = momentum / log.mass if log.mass else 1.0
        log.moments = log.moments.scaled(1 - new).merge(moments.scaled(new))
        log.var = torch.lerp(log.var, moments.unbiased_var, new)
        log.samples += new * (samples - log.samples)

    def watch(self, moments: Moments, *, rows: int) -> None:
        """Add a batch to what a pass without training has seen; every value weighs the same."""
        self.watched += 1
        samples = float(self.session.samples or rows)
        if not self.logs:
            self.logs.append(Log(moments, moments.var, samples, 1.0))
            return
        log = self.logs[0]
        log.moments, log.samples = log.moments.merge(moments), log.samples + samples

    def average(self, moments: Moments, *, rows: int) -> None:
        """Average a batch's mean and unbiased variance with those of the batches before it.

        As torch does with momentum=None: every batch of the pass weighs the same.
        """
        batch = replace(moments, var=moments.unbiased_var)
        self.watched += 1
        if not self.logs:
            self.logs.append(Log(batch, batch.var, float(self.session.samples or rows), 1.0))
            return
        log, share = self.logs[0], 1 / self.watched
        mean = torch.lerp(log.moments.mean, batch.mean, share)
        var = torch.lerp(log.moments.var, batch.var, share)
        log.moments = replace(log.moments, mean=mean, var=var)

    def report(self, batches: int) -> Report:
        """Return the moments of each call, with the layer's counter after the round.

        Where steps call the layer unequally often, no call stands for all of them: they are put
        together, each with its weight.
        """
        first, *more = (log.moments for log in self.logs)
        samples = self.logs[0].samples or 1.0
        if more and len({*self.per_step, self.call + 1}) > 1:
            mass = sum(log.mass for log in self.logs)
            parts = (log.moments.scaled(log.mass / mass) for log in self.logs)
            return Report(reduce(Moments.merge, parts), batches, samples)
        return Report(first, batches, samples, tuple(more))


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

    def record(self, batch: Tensor, moments: Moments | None = None) -> None:
        """Add a batch to the moments of this round; `moments` stand in the place of its own."""
        moments, call = moments or Moments.of(batch.detach()), self.round.next_call()
        self.round.add(moments, self.advance(), rows=len(batch), call=call)

    def watch(self, batch: Tensor) -> None:
        """Add a batch to the moments of a survey; here every value weighs the same."""
        self.round.watch(Moments.of(batch.detach()), rows=len(batch))

    def average(self, batch: Tensor) -> None:
        """Average a batch's statistics with those before it; here every batch weighs the same."""
        self.round.average(Moments.of(batch.detach()), rows=len(batch))

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
        if not log.seen and not log.watched:
            return None
        mean, var, batches = self.tracked()
        if log.watched or (statistics == "pool" and log.logs):
            return log.report(int(batches) + log.watched)
        mean, var = mean.clone(), var.clone()
        if log.logs:  # the rule kept the shared statistics fixed meanwhile
            left = 1 - sum(one.mass for one in log.logs)
            mean, var = mean * left, var * left
            for one in log.logs:
                mean += one.mass * one.moments.mean
                var += one.mass * one.var
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
