"""Switchable normalization: BatchNorm layers that mix instance, layer and batch statistics.

Means are mixed with one softmax of three learnable weights, variances with another. In evaluation
the running statistics replace the batch's. A part that looks at a single value has variance 0
and would erase it, so it is left out and the softmax runs over the others: the instance part where
a channel of a sample is one value (every 2-D input), and the layer part where a whole sample is.

A layer keeps all that BatchNorm has, and gains the keys `mean_mix` and `var_mix`.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fednorm.core.layer import NormRule, RoundContext
from fednorm.core.moments import Moments, exact_values
from fednorm.core.strategy import Conversion
from fednorm.errors import ConversionError
from fednorm.nn import convert
from fednorm.nn.batch_norm import (
    FedBatchNorm,
    FedBatchNorm1d,
    FedBatchNorm2d,
    FedBatchNorm3d,
    FedSyncBatchNorm,
    LayerRecorder,
)

_Pair: TypeAlias = tuple[Tensor, Tensor]  # mean and variance
_PARTS = 3  # instance, layer, batch: in this order in the mixing weights


def _follow(layer: "SwitchableNorm", x: Tensor) -> Tensor:
    y = _normalize_mixed(layer, x, _measure_batch(x))
    momentum, moments = layer.count_batch(), Moments.of(x.detach())
    if layer.running_mean is not None and layer.running_var is not None:
        layer.running_mean.lerp_(moments.mean, momentum)
        layer.running_var.lerp_(moments.unbiased_var, momentum)
    return y


def _record(layer: "SwitchableNorm", x: Tensor) -> Tensor:
    layer.record_batch(x)
    return _normalize_mixed(layer, x, _measure_batch(x))


def _accumulate(layer: "SwitchableNorm", x: Tensor) -> Tensor:
    layer.accumulate(x)
    return _normalize_mixed(layer, x, _measure_batch(x))


normalize_switched = NormRule("mixed", tracks=True, reports="running", normalize=_follow)
normalize_switched_recorded = NormRule("mixed", tracks=False, reports="moments", normalize=_record)
normalize_switched_calibrated = NormRule(
    "mixed", tracks=False, reports="totals", normalize=_accumulate
)


class SwitchableNorm(FedBatchNorm):
    """What the layers below share: two vectors of mixing weights, all equal at first."""

    recorder = LayerRecorder(normalize_switched, RoundContext(), "")  # outside of rounds
    mean_mix: nn.Parameter
    var_mix: nn.Parameter

    def __init__(self, *args: Any, **fields: Any) -> None:
        super().__init__(*args, **fields)
        _add_mixing_weights(self)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 (torch's own name)
        """Mix by the rule in training, with the running statistics in evaluation."""
        self._check_input_dim(input)  # type: ignore[no-untyped-call]
        if not self.training and self.running_mean is not None and self.running_var is not None:
            return _normalize_mixed(self, input, (self.running_mean, self.running_var))
        return self.recorder.rule.normalize(self, input)


class SwitchNorm1d(SwitchableNorm, FedBatchNorm1d):
    """Switchable normalization of BatchNorm1d's inputs."""


class SwitchNorm2d(SwitchableNorm, FedBatchNorm2d):
    """Switchable normalization of BatchNorm2d's inputs."""


class SwitchNorm3d(SwitchableNorm, FedBatchNorm3d):
    """Switchable normalization of BatchNorm3d's inputs."""


class SwitchSyncNorm(SwitchableNorm, FedSyncBatchNorm):
    """Switchable normalization of SyncBatchNorm's inputs."""


_SWITCHED: dict[type[_BatchNorm], type[SwitchableNorm]] = {
    FedBatchNorm1d: SwitchNorm1d,
    FedBatchNorm2d: SwitchNorm2d,
    FedBatchNorm3d: SwitchNorm3d,
    FedSyncBatchNorm: SwitchSyncNorm,
    FedBatchNorm: SwitchableNorm,
}


def to_switch_norm(model: nn.Module, *, momentum: float | str | None = "layer") -> Conversion:
    """Convert every BatchNorm layer to one that mixes; γ, β and statistics stay as they are."""

    def make(path: str, layer: _BatchNorm) -> nn.Module:
        if isinstance(layer, SwitchableNorm):
            return layer
        if type(layer) not in _SWITCHED:
            raise ConversionError(
                f"layer {path!r} ({type(layer).__name__}) comes from the conversion by another "
                "strategy; convert the model that it was made from."
            )
        layer.__class__ = _SWITCHED[type(layer)]
        _add_mixing_weights(layer)
        return layer

    federated = convert.to_fed_batch_norm(model, momentum=momentum, tracking=True)
    mixing = convert.replace(federated.model, make)
    steps = zip(federated.replaced, mixing.replaced, strict=True)
    return replace(mixing, replaced=tuple(replace(old, after=new.after) for old, new in steps))


def _add_mixing_weights(layer: _BatchNorm) -> None:
    """Add equal weights, in the type and place of the layer's other tensors."""
    like = next((t for t in (layer.running_mean, layer.weight) if t is not None), torch.empty(0))
    layer.mean_mix = nn.Parameter(like.new_ones(_PARTS))
    layer.var_mix = nn.Parameter(like.new_ones(_PARTS))


def _measure_batch(x: Tensor) -> _Pair:
    """Return mean and variance of every channel, `[C]` each; the gradient flows through them."""
    if x.numel() == x.shape[1]:
        raise ValueError(
            f"a batch of shape {tuple(x.shape)} has one value per channel, which has no variance; "
            "train with larger batches."
        )
    var, mean = torch.var_mean(exact_values(x), [0, *range(2, x.dim())], correction=0)
    return mean, var


def _normalize_mixed(layer: SwitchableNorm, x: Tensor, batch: _Pair) -> Tensor:
    """Normalise with the mixture of instance, layer and batch statistics."""
    samples, channels, *space = x.shape
    values = exact_values(x).reshape(samples, channels, math.prod(space))
    instance_var, instance_mean = torch.var_mean(values, 2, correction=0, keepdim=True)
    sample_var, sample_mean = torch.var_mean(values, (1, 2), correction=0, keepdim=True)
    # Parts that look at a single value are left out: the instance part, then the layer part.
    first = (math.prod(space) == 1) + (channels * math.prod(space) == 1)
    means = (instance_mean, sample_mean, batch[0][:, None])
    variances = (instance_var, sample_var, batch[1][:, None])
    mean = _mix(layer.mean_mix[first:], means[first:])
    var = _mix(layer.var_mix[first:], variances[first:])
    y = (values - mean) * torch.rsqrt(var + layer.eps)
    if layer.weight is not None:
        y = y * layer.weight[:, None]
    if layer.bias is not None:  # torch has layers with γ alone
        y = y + layer.bias[:, None]
    return y.view(x.shape)


def _mix(weights: Tensor, parts: Sequence[Tensor]) -> Tensor:
    """Return the mixture of the parts, which broadcast against each other."""
    terms = (p * part for p, part in zip(weights.softmax(0), parts, strict=True))
    mixture: Tensor = reduce(torch.add, terms)
    return mixture
