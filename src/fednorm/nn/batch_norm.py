"""BatchNorm layers that follow a rule and record the moments of what they see.

They are torch's own BatchNorm layers with another forward pass: same parameters, same buffers, same
state_dict keys, so a checkpoint moves freely between a plain model and a converted one.
"""

from dataclasses import dataclass, field, replace
from functools import reduce

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from fednorm.core.aggregation import weighted_mean
from fednorm.core.layer import NormLayer, NormRule, RoundContext, Statistics
from fednorm.core.messages import LayerStats, RunningStats
from fednorm.core.moments import Moments


@dataclass(slots=True)
class CallRecord:
    """What a layer has seen in one call per step, over the steps of a round."""

    moments: Moments
    var: Tensor  # the mean of the batches' own variances, as running statistics follow them
    samples: float  # behind the moments, in the same weights
    mass: float  # how much of the running statistics these batches would replace


@dataclass(slots=True)
class LayerRecorder:
    """What a layer follows and records during one round of one client."""

    rule: NormRule
    context: RoundContext
    site: str
    logs: list[CallRecord] = field(default_factory=list)  # one for each call in a step
    seen: int = 0  # batches
    calibrated: int = 0  # batches of a pass without training
    step: int = -1  # of the last call
    call: int = 0  # which call of its step that was, counted from 0
    per_step: set[int] = field(default_factory=set)  # how many calls the steps before it had

    def next_call(self) -> int:
        """Return which call of its step this is: a shared layer is called more than once."""
        again = self.step == self.context.step and self.step >= 0
        if not again and self.logs:
            self.per_step.add(self.call + 1)
        self.call = self.call + 1 if again else 0
        self.step = self.context.step
        return self.call

    def add(self, moments: Moments, momentum: float, *, rows: int, call: int = 0) -> None:
        """Add a batch that replaces `momentum` of what the running statistics hold.

        Step s of E weighs β(1-β)^(E-s), as it would in the running statistics; the weights are
        kept normalised to sum 1. Calls are kept apart: torch's running variance follows each of
        them, and does not see how far their means are apart.
        """
        samples = float(self.context.samples or rows)
        for log in self.logs:
            log.mass *= 1 - momentum
        if call == len(self.logs):
            self.logs.append(CallRecord(moments, moments.unbiased_var, samples, momentum))
            return
        log = self.logs[call]
        log.mass += momentum
        new = momentum / log.mass if log.mass else 1.0
        log.moments = log.moments.scale(1 - new).merge(moments.scale(new))
        log.var = torch.lerp(log.var, moments.unbiased_var, new)
        log.samples += new * (samples - log.samples)

    def accumulate(self, moments: Moments, *, rows: int) -> None:
        """Add a batch to those of a pass without training; every value weighs the same."""
        self.calibrated += 1
        samples = float(self.context.samples or rows)
        if not self.logs:
            self.logs.append(CallRecord(moments, moments.var, samples, 1.0))
            return
        log = self.logs[0]
        log.moments, log.samples = log.moments.merge(moments), log.samples + samples

    def average(self, moments: Moments, *, rows: int) -> None:
        """Average a batch's mean and unbiased variance with those of the batches before it.

        As torch does with momentum=None: every batch of the pass weighs the same.
        """
        batch = replace(moments, var=moments.unbiased_var)
        self.calibrated += 1
        if not self.logs:
            self.logs.append(CallRecord(batch, batch.var, float(self.context.samples or rows), 1.0))
            return
        log, share = self.logs[0], 1 / self.calibrated
        mean = torch.lerp(log.moments.mean, batch.mean, share)
        var = torch.lerp(log.moments.var, batch.var, share)
        log.moments = replace(log.moments, mean=mean, var=var)

    def report(self, batches: int) -> LayerStats:
        """Return the moments of each call, with the layer's counter after the round.

        Where steps call the layer unequally often, calls do not correspond: they are merged, each
        with its weight.
        """
        first, *more = (log.moments for log in self.logs)
        samples = self.logs[0].samples or 1.0
        if more and len({*self.per_step, self.call + 1}) > 1:
            mass = sum(log.mass for log in self.logs)
            parts = (log.moments.scale(log.mass / mass) for log in self.logs)
            return LayerStats(reduce(Moments.merge, parts), batches, samples)
        return LayerStats(first, batches, samples, tuple(more))


class FedBatchNorm(NormLayer, _BatchNorm):
    """What the layers below share; see `rules.py` for how a batch is treated."""

    recorder: LayerRecorder

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 (torch's own name)
        """Normalise by the rule in training, by the running statistics in evaluation."""
        self._check_input_dim(input)  # type: ignore[no-untyped-call]
        if not self.training and self.running_mean is not None:
            return self.normalize_by_running(input)
        return self.recorder.rule.normalize(self, input)

    def normalize_by_batch(self, x: Tensor, momentum: float | None = None) -> Tensor:
        """Normalise with the batch's own statistics; merged clients each with their part's.

        With a `momentum` the running statistics follow, as in torch; with None they stay fixed.
        """
        if self.recorder.context.client_sizes:
            return normalize_per_client(self, x, momentum)
        return functional.batch_norm(
            x,
            None if momentum is None else self.running_mean,
            None if momentum is None else self.running_var,
            self.weight,
            self.bias,
            training=True,
            momentum=momentum or 0.0,
            eps=self.eps,
        )

    def normalize_corrected(
        self, x: Tensor, scale: Tensor, shift: Tensor, momentum: float | None = None
    ) -> Tensor:
        """Normalise with the batch's own statistics, then scale and shift before γ and β.

        γ(x·scale + shift) + β is BatchNorm with γ·scale and β + γ·shift: one call of torch's
        kernel. `momentum` is as in `normalize_by_batch`.
        """
        weight, bias = scale, shift
        if self.weight is not None:
            weight, bias = self.weight * scale, self.weight * shift
        if self.bias is not None:  # torch has layers with γ alone
            bias = bias + self.bias
        return functional.batch_norm(
            x,
            None if momentum is None else self.running_mean,
            None if momentum is None else self.running_var,
            weight,
            bias,
            training=True,
            momentum=momentum or 0.0,
            eps=self.eps,
        )

    def normalize_by_running(self, x: Tensor) -> Tensor:
        """Normalise with the running statistics, constants for the gradient.

        A layer that tracks none normalises by the batch, as torch's does in evaluation.
        """
        return functional.batch_norm(
            x,
            self.running_mean,
            self.running_var,
            self.weight,
            self.bias,
            training=self.running_mean is None,
            eps=self.eps,
        )

    def start_round(self, rule: NormRule, context: RoundContext, site: str) -> None:
        """Start a round: forget what was recorded and follow `rule`."""
        if context.client_sizes and rule.normalize_with == "mixed":
            raise ValueError(
                f"layer {site!r} was given the merged batches of {len(context.client_sizes)} "
                "clients, which its rule cannot tell apart; set mergeable_batches = False in the "
                "strategy, or choose engine 'loop'."
            )
        self.recorder = LayerRecorder(rule, context, site)

    def count_batch(self) -> float:
        """Count a batch and return the momentum with which it counts."""
        self.recorder.seen += 1
        if self.num_batches_tracked is None:
            return 0.0
        self.num_batches_tracked.add_(1)
        if self.momentum is None:
            return 1.0 / int(self.num_batches_tracked)
        return self.momentum

    def record_batch(self, batch: Tensor, moments: Moments | None = None) -> None:
        """Add a batch to the moments of this round; `moments` replace its own."""
        moments, call = moments or Moments.of(batch.detach()), self.recorder.next_call()
        self.recorder.add(moments, self.count_batch(), rows=len(batch), call=call)

    def accumulate(self, batch: Tensor) -> None:
        """Add a batch to the moments of a calibration pass; every value weighs the same."""
        self.recorder.accumulate(Moments.of(batch.detach()), rows=len(batch))

    def average_batch(self, batch: Tensor) -> None:
        """Average a batch's statistics with those before it; every batch weighs the same."""
        self.recorder.average(Moments.of(batch.detach()), rows=len(batch))

    def read_running(self) -> RunningStats | None:
        """Return a copy of the running statistics, or None if the layer tracks none."""
        if self.running_mean is None:
            return None
        mean, var, batches = self.running_buffers()
        return RunningStats(mean.clone(), var.clone(), int(batches))

    def load_running(self, running: RunningStats) -> None:
        """Overwrite the running statistics."""
        mean, var, batches = self.running_buffers()
        with torch.no_grad():
            mean.copy_(running.mean)
            var.copy_(running.var)
            batches.fill_(running.num_batches)

    def report(self, statistics: Statistics) -> LayerStats | None:
        """Return the statistics of this round, or None if the rule recorded nothing."""
        log = self.recorder
        if not log.seen and not log.calibrated:
            return None
        mean, var, batches = self.running_buffers()
        if log.calibrated or (statistics == "pool" and log.logs):
            return log.report(int(batches) + log.calibrated)
        mean, var = mean.clone(), var.clone()
        if log.logs:  # the rule kept the shared statistics fixed meanwhile
            left = 1 - sum(one.mass for one in log.logs)
            mean, var = mean * left, var * left
            for one in log.logs:
                mean += one.mass * one.moments.mean
                var += one.mass * one.var
        return LayerStats(Moments(float(log.seen), mean, var), int(batches))

    def running_buffers(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the live running mean, running variance and counter."""
        mean, var, batches = self.running_mean, self.running_var, self.num_batches_tracked
        if mean is None or var is None or batches is None:
            raise ValueError(
                f"layer {self.recorder.site!r} tracks no running statistics; "
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


def _follow_batch(layer: FedBatchNorm, x: Tensor) -> Tensor:
    return layer.normalize_by_batch(x, layer.count_batch())


batch_stats = NormRule("batch", tracks=True, reports="running", normalize=_follow_batch)
FedBatchNorm.recorder = LayerRecorder(batch_stats, RoundContext(), "")  # outside of rounds


def normalize_per_client(layer: FedBatchNorm, x: Tensor, momentum: float | None) -> Tensor:
    """Normalise each client's part by itself.

    With a momentum, the running statistics become the mean of those that the clients would have,
    weighted by the sizes of their parts; with None they stay fixed.
    """
    sizes = layer.recorder.context.client_sizes
    mean, var = layer.running_mean, layer.running_var
    if momentum is None or mean is None or var is None:
        return _normalize_parts(layer, x, None, None, 0.0)
    # One row for each client.
    means, variances = (_repeat_rows(values, len(sizes)) for values in (mean, var))
    y = _normalize_parts(layer, x, means, variances, momentum)
    if len(set(sizes)) == 1:
        torch.mean(means, 0, out=mean)
        torch.mean(variances, 0, out=var)
        return y
    weights = torch.tensor(sizes, dtype=torch.float64)
    with torch.autocast(x.device.type, enabled=False):  # bfloat16 is too coarse for statistics
        mean.copy_(weighted_mean(means, weights))
        var.copy_(weighted_mean(variances, weights))
    return y


def _normalize_parts(
    layer: FedBatchNorm, x: Tensor, means: Tensor | None, variances: Tensor | None, momentum: float
) -> Tensor:
    """Normalise the parts; torch updates the clients' rows of `means` and `variances`."""
    sizes = layer.recorder.context.client_sizes
    if len(set(sizes)) == 1:
        return _normalize_as_channels(layer, x, means, variances, momentum)
    parts = [
        functional.batch_norm(
            part,
            _row_of(means, i),
            _row_of(variances, i),
            layer.weight,
            layer.bias,
            training=True,
            momentum=momentum,
            eps=layer.eps,
        )
        for i, part in enumerate(torch.split(x, list(sizes)))
    ]
    return torch.cat(parts)


def _repeat_rows(values: Tensor, count: int) -> Tensor:
    """Return a row of the values for each client; a quarter of the time that `repeat` takes."""
    return values.expand(count, -1).clone(memory_format=torch.contiguous_format)


def _row_of(rows: Tensor | None, i: int) -> Tensor | None:
    return None if rows is None else rows[i]


def _normalize_as_channels(
    layer: FedBatchNorm, x: Tensor, means: Tensor | None, variances: Tensor | None, momentum: float
) -> Tensor:
    """Treat clients with parts of one size, which are interleaved, as further channels.

    A model may have folded more into the batch, such as the positions of a sequence: then several
    rows in succession are one sample's.
    """
    sizes = layer.recorder.context.client_sizes
    count, folded = len(sizes), len(x) // sum(sizes)
    by_client = x
    if folded != 1:
        by_client = x.reshape(-1, count, folded, *x.shape[1:]).transpose(1, 2)
    y = functional.batch_norm(
        by_client.reshape(-1, count * x.shape[1], *x.shape[2:]),
        None if means is None else means.view(-1),
        None if variances is None else variances.view(-1),
        None if layer.weight is None else _repeat_rows(layer.weight, count).view(-1),
        None if layer.bias is None else _repeat_rows(layer.bias, count).view(-1),
        training=True,
        momentum=momentum,
        eps=layer.eps,
    )
    y = y.view(by_client.shape)
    return y if folded == 1 else y.transpose(1, 2).reshape(x.shape)


def per_channel(value: Tensor, x: Tensor) -> Tensor:
    """Shape one value per channel so that it broadcasts against a batch."""
    return value.view(1, -1, *[1] * (x.dim() - 2))
