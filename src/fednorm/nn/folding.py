"""Fold a converted model: torch's own layers, which compute in evaluation what its layers do.

A conversion changes what layers do in training. In evaluation most of them are torch's layers with
other numbers: a standardised convolution is a convolution with the standardised kernel, and
BatchNorm that follows a rule is BatchNorm. What has no counterpart in torch stays as it is:
switchable normalization, directions before a classifier, scalars instead of norms.
"""

from collections.abc import Mapping
from typing import TypeAlias

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from fednorm.nn.aligned_norm import Placement
from fednorm.nn.batch_norm import (
    FedBatchNorm,
    FedBatchNorm1d,
    FedBatchNorm2d,
    FedBatchNorm3d,
    FedSyncBatchNorm,
)
from fednorm.nn.convert import SampleNorm
from fednorm.nn.copies import copy_model
from fednorm.nn.custom_layers import change_base
from fednorm.nn.dual_norm import BackwardMeans
from fednorm.nn.hybrid_norm import Mixing
from fednorm.nn.weight_std import (
    StandardizedConv,
    StandardizedConv1d,
    StandardizedConv2d,
    StandardizedConv3d,
)

_Class: TypeAlias = type[nn.Module]

_PLAIN: Mapping[_Class, _Class] = {
    FedBatchNorm1d: nn.BatchNorm1d,
    FedBatchNorm2d: nn.BatchNorm2d,
    FedBatchNorm3d: nn.BatchNorm3d,
    FedSyncBatchNorm: nn.SyncBatchNorm,
    FedBatchNorm: _BatchNorm,
    SampleNorm: nn.GroupNorm,
    StandardizedConv1d: nn.Conv1d,
    StandardizedConv2d: nn.Conv2d,
    StandardizedConv3d: nn.Conv3d,
}


def fold(model: nn.Module) -> nn.Module:
    """Return a copy of a converted model, in evaluation mode, with torch's layers where possible.

    It gives the same outputs in evaluation, and its `state_dict` fits the model before conversion
    wherever the strategy keeps the layers' kinds; elsewhere that model refuses it. The given model
    stays as it is; a model without converted layers is only copied.

    >>> import fednorm
    >>> plain = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2))
    >>> [type(layer).__name__ for layer in fold(fednorm.convert(plain, "dualbn"))]
    ['Conv2d', 'BatchNorm2d']
    """
    # What a layer recorded in a round may refer to threads and connections.
    own = [vars(module).get("recorder") for module in model.modules()]
    folded = copy_model(model, sharing=[recorder for recorder in own if recorder is not None])
    for layer in list(folded.modules()):
        if isinstance(layer, StandardizedConv):
            _fold_convolution(layer)
        elif isinstance(layer, FedBatchNorm | SampleNorm):
            _fold_norm(layer)
    return folded.eval()


def _fold_norm(layer: FedBatchNorm | SampleNorm) -> None:
    """Turn a layer into torch's, without what only training uses."""
    vars(layer).pop("recorder", None)
    for name, child in list(layer.named_children()):
        if isinstance(child, Mixing | BackwardMeans | Placement):
            delattr(layer, name)
    change_base(layer, _PLAIN)


@torch.no_grad()
def _fold_convolution(layer: StandardizedConv) -> None:
    """Let a convolution hold the kernels that it convolved with."""
    # New parameters: those of the layer may be another layer's as well.
    learns = layer.weight.requires_grad
    layer.weight = nn.Parameter(layer.standardize_weight(), requires_grad=learns)
    if layer.bias is not None and not layer.standard.bias:
        zeros = torch.zeros_like(layer.bias)
        layer.bias = nn.Parameter(zeros, requires_grad=layer.bias.requires_grad)
    layer._parameters.pop("gain", None)  # noqa: SLF001 (not all layers have one)
    vars(layer).pop("standard", None)
    change_base(layer, _PLAIN)
