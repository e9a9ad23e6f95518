"""The rule of FedTAN: statistics synchronised over clients, forward and backward.

Both passes are exact: on all clients together the layer computes what one BatchNorm layer would
compute on the union of their batches.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fednorm.core.layer import Exchange, NormRule, RoundContext
from fednorm.core.moments import Moments, exact_values
from fednorm.nn.batch_norm import FedBatchNorm, per_channel


def make_sync_rule(*, shared_message: bool = False, follow: bool = False) -> NormRule:
    """Return the rule; with `shared_message`, mean and variance travel in one exchange.

    Only the first step of a round is synchronised; later ones are ordinary local BatchNorm. With
    `follow`, a client's running statistics follow the synchronised ones in that step, not those of
    the client's batch.
    """
    normalize = partial(_synchronize, shared_message=shared_message, follow=follow)
    return NormRule("synchronized", tracks=False, reports="moments", normalize=normalize)


def _synchronize(layer: FedBatchNorm, x: Tensor, *, shared_message: bool, follow: bool) -> Tensor:
    context = layer.recorder.context
    if context.step > 0:
        layer.record_batch(x)
        return layer.normalize_by_batch(x)
    around, _, _ = layer.running_buffers()
    values = exact_values(x)
    # A layer may be called twice in a step.
    place = _Site.of(context, x, f"{layer.recorder.site}#{layer.recorder.seen}")
    mean, var = place.moments(values.detach(), around if shared_message else None)
    layer.record_batch(x, Moments(x.numel() / x.shape[1], mean, var) if follow else None)
    normalised: Tensor = _Synchronized.apply(values, mean, var, layer.eps, place)  # type: ignore[no-untyped-call]
    if layer.weight is None:
        return normalised.clone()  # kept for the backward pass; what follows may work in place
    scaled = normalised * per_channel(layer.weight, x)
    return scaled if layer.bias is None else scaled + per_channel(layer.bias, x)


@dataclass(frozen=True, slots=True)
class _Site:
    """Where a client is in its round, and what its values weigh there.

    A client's statistics weigh what its update weighs, times the values per example in the layer.
    """

    exchange: Exchange
    site: str
    samples: int  # of the batch
    examples: int  # the weight of the client's update
    values: float  # per sample

    @classmethod
    def of(cls, context: RoundContext, x: Tensor, site: str) -> "_Site":
        samples = context.samples or len(x)
        values = x.numel() / x.shape[1] / samples
        return cls(context.exchange, site, samples, context.examples or samples, values)

    def mean(self, what: str, value: Tensor) -> Tensor:
        """Return the mean over clients."""
        return self.exchange.mean(f"{self.site}/{what}", value, self.examples * self.values)

    def moments(self, x: Tensor, around: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return mean and variance over clients, in one exchange around a point if there is one."""
        axes = [0, *range(2, x.dim())]
        if around is None:
            mean = self.mean("mean", x.mean(axes))
            squares = (x - per_channel(mean, x)).square().mean(axes)
            return mean, self.mean("variance", squares)
        shifted = x - per_channel(around, x)
        local = torch.stack([shifted.mean(axes), shifted.square().mean(axes)])
        first, second = self.mean("moments", local)
        return around + first, (second - first.square()).clamp_min(0)


class _Synchronized(torch.autograd.Function):
    """Normalisation by the mean and variance of all clients' batches."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mean: Tensor, var: Tensor, eps: float, place: _Site) -> Tensor:
        scale = torch.rsqrt(var + eps)
        normalised = (x - per_channel(mean, x)) * per_channel(scale, x)
        ctx.save_for_backward(normalised, scale)
        ctx.place, ctx.axes = place, [0, *range(2, x.dim())]
        return normalised

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        normalised, scale = ctx.saved_tensors
        # The two gradients with respect to the statistics share one exchange: what the variance
        # passes on to the mean sums to zero over all clients, so neither waits for the other.
        # A client's loss is a mean over its samples, and weighs what its update does; the mean of
        # an exchange weighs it by its values in this layer, too, which are divided out.
        place = ctx.place
        local = torch.stack([grad.sum(ctx.axes), (grad * normalised).sum(ctx.axes)])
        total, along = place.mean("gradient", local / place.values) / place.samples
        centred = grad - per_channel(total, grad) - normalised * per_channel(along, grad)
        return centred * per_channel(scale, grad), None, None, None, None
