"""Convolutions whose kernels are standardised in the forward pass.

They are torch's own convolutions with another forward pass: the parameter `weight` stays what it
was, under the key it had, and every output channel convolves with it standardised over its fan-in
(input channels of its group times kernel size). No sample depends on another.

Qiao et al., "Micro-Batch Training with Batch-Channel Normalization and Weight Standardization",
2019, arXiv:1903.10520; scaled by the fan-in and with a gain: Brock, De and Smith, "Characterizing
Signal Propagation to Close the Performance Gap in Unnormalized ResNets", 2021, arXiv:2101.08692.
"""

import math
from dataclasses import dataclass
from typing import cast

from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.nn.utils import parametrize

from fednorm.core.layout import NORM_LAYERS
from fednorm.core.strategy import Conversion, Replacement
from fednorm.errors import ConversionError
from fednorm.nn.copies import MarkedLayer, copy_model

# γ of Brock et al.: the standard deviation of ReLU(x) for a standard normal x, inverted.
RELU_GAMMA = math.sqrt(2 / (1 - 1 / math.pi))


@dataclass(frozen=True, slots=True)
class Standard:
    """How a layer standardises its kernels; see `standardize`."""

    scale_by_fan_in: bool
    eps: float
    bias: bool


class StandardizedConv(MarkedLayer, _ConvNd):
    """What the layers below share; `standardize` makes them from torch's convolutions."""

    MARK = "standardizes_its_weight_save_fednorm_fold"

    standard = Standard(scale_by_fan_in=False, eps=1e-6, bias=True)
    gain: nn.Parameter | None

    def standardize_weight(self) -> Tensor:
        """Return the kernels that the layer convolves with."""
        rows = self.weight.flatten(1)
        fan_in, eps = rows.shape[1], self.standard.eps
        if self.standard.scale_by_fan_in:
            # √(var·fan_in + eps) = √fan_in · √(var + eps/fan_in)
            rows = functional.layer_norm(rows, (fan_in,), eps=eps / fan_in) * fan_in**-0.5
        else:
            rows = functional.layer_norm(rows, (fan_in,), eps=eps)
        gain = self._parameters.get("gain")
        if gain is not None:
            rows = rows * (RELU_GAMMA * gain).unsqueeze(1)
        return rows.view(self.weight.shape)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 (torch's own name)
        """Convolve with the standardised kernels."""
        bias = self.bias if self.standard.bias else None
        return self._conv_forward(input, self.standardize_weight(), bias)


class StandardizedConv1d(StandardizedConv, nn.Conv1d):
    """Conv1d with standardised kernels."""


class StandardizedConv2d(StandardizedConv, nn.Conv2d):
    """Conv2d with standardised kernels."""


class StandardizedConv3d(StandardizedConv, nn.Conv3d):
    """Conv3d with standardised kernels."""


_STANDARDIZED: dict[type[_ConvNd], type[StandardizedConv]] = {
    nn.Conv1d: StandardizedConv1d,
    nn.Conv2d: StandardizedConv2d,
    nn.Conv3d: StandardizedConv3d,
}


def standardize(
    model: nn.Module,
    *,
    scale_by_fan_in: bool,
    eps: float,
    gain: bool,
    bias: bool,
    before_norms: bool = False,
) -> Conversion:
    """Return a copy of `model` whose convolutions standardise their kernels.

    The given model stays as it is. Transposed convolutions are left alone; a layer that is used in
    several places is converted once and stays shared.

    Args:
        model: the model, which may have been converted otherwise before.
        scale_by_fan_in: divide by √(var·fan_in + eps), so that a kernel has norm 1, instead of
            √(var + eps), so that it has variance 1. The variance is the biased one.
        eps: as above.
        gain: multiply each kernel by γ = √(2/(1-1/π)), which makes up for the ReLU before it, and
            by a learnable parameter `gain` that starts at 1.
        bias: add the convolution's own bias; False ignores it, the parameter stays in place.
        before_norms: leave alone convolutions that no normalization layer follows, in the order
            in which a model names its layers, such as the classifier of a segmentation network:
            there nothing would undo the scale of a standardised kernel.

    >>> plain, settings = nn.Conv2d(3, 4, 5), {"eps": 1e-6, "gain": False, "bias": True}
    >>> conv = standardize(plain, scale_by_fan_in=True, **settings).model
    >>> round(conv.standardize_weight()[0].norm().item(), 3)
    1.0
    """
    model = copy_model(model)
    standard = Standard(scale_by_fan_in=scale_by_fan_in, eps=eps, bias=bias)
    replaced = []
    for path, layer in _convolutions(model, before_norms=before_norms):
        before, after = type(layer).__name__, _standardized_type(path, layer)
        # The layer keeps everything it has (tensors, hooks, flags); only its forward pass changes.
        layer.__class__ = after
        converted = cast("StandardizedConv", layer)
        converted.standard = standard
        if gain:
            ones = layer.weight.new_ones(layer.out_channels)
            converted.gain = nn.Parameter(ones, requires_grad=layer.weight.requires_grad)
        replaced.append(Replacement(path, before, after.__name__))
    return Conversion(model, tuple(replaced))


def _convolutions(model: nn.Module, *, before_norms: bool) -> list[tuple[str, _ConvNd]]:
    """Return the convolutions; if asked for and known, only those that a norm comes after."""
    found, followed = [], 0
    for path, layer in model.named_modules():
        if isinstance(layer, _ConvNd) and not isinstance(layer, _ConvTransposeNd):
            found.append((path, layer))
        elif isinstance(layer, NORM_LAYERS) and not isinstance(layer, nn.RMSNorm):  # keeps the mean
            followed = len(found)
    # A model that names all its norms first says nothing about what comes after what.
    return found[:followed] if before_norms and followed else found


def _standardized_type(path: str, layer: _ConvNd) -> type[StandardizedConv]:
    named = f"layer {path or '(the model itself)'!r} ({type(layer).__name__})"
    if layer.weight[0].numel() == 1:
        raise ConversionError(
            f"{named} has one weight per output channel, and standardising a single value always "
            "gives 0; use a larger kernel or fewer groups there."
        )
    for plain, standardized in _STANDARDIZED.items():
        if isinstance(layer, plain) and _computes_like(layer, plain):
            return standardized
    raise ConversionError(
        f"{named} is a convolution with a custom forward pass or a parametrization, which a "
        "conversion would lose; use one of torch's convolutions there."
    )


def _computes_like(layer: _ConvNd, plain: type[_ConvNd]) -> bool:
    same = all(getattr(type(layer), m) is getattr(plain, m) for m in ("forward", "_conv_forward"))
    return same and not parametrize.is_parametrized(layer)
