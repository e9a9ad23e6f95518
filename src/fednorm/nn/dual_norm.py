"""The rule of dualbn: shared statistics in the forward pass and in the backward pass.

BatchNorm's gradient subtracts two means from the gradient that comes in, because the statistics
follow the weights. A client cannot know the means over all clients' samples; it uses the shared
ones of the round before, and reports its own part of the new ones.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from fednorm.core.layer import NormLayer, NormRule, RoundContext, Statistics
from fednorm.core.messages import LayerStats, RunningStats
from fednorm.core.moments import Moments
from fednorm.core.strategy import Conversion
from fednorm.nn.batch_norm import FedBatchNorm, LayerRecorder, batch_stats, per_channel
from fednorm.nn.convert import add_to_norms, to_fed_batch_norm


class BackwardMeans(NormLayer):
    """The two means of a layer's backward pass, p = E[δ] and q = E[δ·x̂], one below the other.

    δ is the loss gradient at the layer's output, scaled to one sample. The means are shared like
    running statistics, but they are not part of a checkpoint: the model's state_dict stays torch's.
    """

    means: Tensor
    batches: Tensor

    def __init__(self, like: Tensor, momentum: float) -> None:
        super().__init__()
        self.momentum: float | None = momentum
        self.register_buffer("means", torch.zeros_like(like).repeat(2, 1), persistent=False)
        self.register_buffer("batches", torch.zeros((), dtype=torch.int64), persistent=False)
        self.recorder = LayerRecorder(batch_stats, RoundContext(), "")

    def start_round(self, rule: NormRule, context: RoundContext, site: str) -> None:
        """Start a round: forget what was recorded."""
        self.recorder = LayerRecorder(rule, context, site)

    def record_backward(self, grad: Tensor, normalised: Tensor) -> None:
        """Add a batch, given the gradient of its mean loss and its normalised values."""
        axes, samples = [0, *range(2, grad.dim())], len(grad)
        count = grad.numel() / grad.shape[1]
        sums = torch.stack([grad.sum(axes), (grad * normalised).sum(axes)])
        mean = sums * (samples / count)
        self.batches.add_(1)
        means = Moments(count, mean, torch.zeros_like(mean))
        self.recorder.add(means, self.momentum or 0.0, rows=samples)

    def report(self, statistics: Statistics) -> LayerStats | None:  # noqa: ARG002 (always moments)
        """Return the means of this round; they have no variance."""
        if not self.recorder.logs:
            return None
        report = self.recorder.report(int(self.batches))
        return replace(report, moments=replace(report.moments, var=self.means.new_empty(0)))

    def read_running(self) -> RunningStats | None:
        """Return a copy of the shared means."""
        return RunningStats(self.means.clone(), self.means.new_empty(0), int(self.batches))

    def load_running(self, running: RunningStats) -> None:
        """Overwrite the shared means."""
        self.means.copy_(running.mean)
        self.batches.fill_(running.num_batches)


def add_backward_means(
    model: nn.Module, *, momentum: float, backward_momentum: float
) -> Conversion:
    """Convert BatchNorm layers and give each its backward means."""
    conversion = to_fed_batch_norm(model, momentum=momentum, tracking=True)
    make = partial(BackwardMeans, momentum=backward_momentum)
    return add_to_norms(conversion, "backward_means", make)


def _record_and_use_shared(layer: FedBatchNorm, x: Tensor) -> Tensor:
    layer.record_batch(x)
    means = layer.backward_means
    if not isinstance(means, BackwardMeans):
        raise TypeError(f"layer {layer.recorder.site!r} has no backward means; convert the model.")
    y: Tensor = _Dual.apply(  # type: ignore[no-untyped-call]
        x, layer.weight, layer.bias, layer.running_mean, layer.running_var, layer.eps, means
    )
    return y


# The shared statistics, forward and backward; both are recorded.
normalize_dual = NormRule(
    "shared", tracks=False, reports="moments", normalize=_record_and_use_shared
)


class _Dual(torch.autograd.Function):
    """y = γ·x̂ + β with x̂ = (x-r)/√(v+ε); backward with the means p and q of another round."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *rest: Any) -> Tensor:
        weight, bias, mean, var, eps, means = rest
        scale = torch.rsqrt(var + eps)
        normalised = (x - per_channel(mean, x)) * per_channel(scale, x)
        ctx.save_for_backward(normalised, scale, weight)
        # Copied: the workspace may hold another client's means by the time of the backward pass.
        ctx.means, ctx.shared = means, means.means.clone()
        if weight is None:
            return normalised.clone()
        if bias is None:
            return normalised * per_channel(weight, x)
        return torch.addcmul(per_channel(bias, x), normalised, per_channel(weight, x))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        normalised, scale, weight = ctx.saved_tensors
        ctx.means.record_backward(grad, normalised)
        axes = [0, *range(2, grad.dim())]
        p, q = (per_channel(t, grad) / len(grad) for t in ctx.shared)
        gain = scale if weight is None else scale * weight
        into = (grad - p - normalised * q) * per_channel(gain, grad)
        if weight is None:
            return into, *[None] * 6
        shift = grad.sum(axes) if ctx.needs_input_grad[2] else None  # β may be missing, or frozen
        return into, (grad * normalised).sum(axes), shift, *[None] * 4
