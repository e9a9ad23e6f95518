"""Replaces the BatchNorm layers in a copy of a model, and says what it replaced."""

import copy
from collections.abc import Callable
from typing import TypeAlias

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.lazy import LazyModuleMixin

from fednorm.core.strategy import Conversion, Replacement
from fednorm.nn.batch_norm import (
    FedBatchNorm,
    FedBatchNorm1d,
    FedBatchNorm2d,
    FedBatchNorm3d,
    FedSyncBatchNorm,
)
from fednorm.nn.sample_norm import SampleNorm

Make: TypeAlias = Callable[[str, _BatchNorm], nn.Module]

_FEDERATED: dict[type[_BatchNorm], type[FedBatchNorm]] = {
    nn.BatchNorm1d: FedBatchNorm1d,
    nn.BatchNorm2d: FedBatchNorm2d,
    nn.BatchNorm3d: FedBatchNorm3d,
    nn.SyncBatchNorm: FedSyncBatchNorm,
}


class ConversionError(TypeError):
    """A layer that cannot be converted; the message names it."""


def replace(model: nn.Module, make: Make) -> Conversion:
    """Return a copy of `model` in which `make(path, layer)` stands for every BatchNorm layer.

    A layer that is used in several places is converted once and stays shared.
    """
    _refuse_lazy(model)
    root = nn.ModuleDict({"model": copy.deepcopy(model)})  # so that the model may be a layer itself
    made: dict[int, nn.Module] = {}
    replaced = []
    for parent_path, parent in list(root.named_modules()):
        for name, child in list(parent.named_children()):
            if not isinstance(child, _BatchNorm):
                continue
            if id(child) not in made:
                path = f"{parent_path}.{name}".lstrip(".").removeprefix("model").lstrip(".")
                before = type(child).__name__
                made[id(child)] = make(path or "(the model itself)", child)
                after = type(made[id(child)]).__name__
                replaced.append(Replacement(path, before, after))
            setattr(parent, name, made[id(child)])
    return Conversion(root["model"], tuple(replaced))


def _refuse_lazy(model: nn.Module) -> None:
    for path, module in model.named_modules():
        if isinstance(module, LazyModuleMixin) and module.has_uninitialized_params():  # type: ignore[misc]
            raise ConversionError(
                f"layer {path!r} ({type(module).__name__}) has no shape yet; "
                "run the model once on a sample before converting it."
            )


def federate(
    model: nn.Module, *, momentum: float | str | None = "layer", tracking: bool = False
) -> Conversion:
    """Convert every BatchNorm layer to one that follows a rule.

    `momentum` replaces the layers' own unless it is "layer"; None is the cumulative average. With
    `tracking`, a layer without running statistics is refused.
    """

    def make(path: str, layer: _BatchNorm) -> nn.Module:
        if tracking and layer.running_mean is None:
            raise ConversionError(
                f"layer {path!r} ({type(layer).__name__}) tracks no running statistics, which "
                "this strategy shares; build it with track_running_stats=True."
            )
        # The layer keeps everything it has (tensors, hooks, flags); only its forward pass changes.
        layer.__class__ = _federated_type(path, layer)
        if not isinstance(momentum, str):
            layer.momentum = momentum
        return layer

    return replace(model, make)


def _federated_type(path: str, layer: _BatchNorm) -> type[FedBatchNorm]:
    if isinstance(layer, FedBatchNorm):
        return type(layer)
    for plain, federated in _FEDERATED.items():
        if isinstance(layer, plain) and type(layer).forward is plain.forward:
            return federated
    raise ConversionError(
        f"layer {path!r} ({type(layer).__name__}) is a BatchNorm with a forward pass of its own, "
        "which a conversion would lose; use one of torch's BatchNorm layers there."
    )


def to_sample_norm(model: nn.Module, groups: int | None) -> Conversion:
    """Replace every BatchNorm layer by SampleNorm; None stands for one group per channel."""

    def make(path: str, layer: _BatchNorm) -> nn.Module:
        _federated_type(path, layer)  # refuses what a replacement would not do justice to
        count = layer.num_features if groups is None else groups
        if layer.num_features % count:
            raise ConversionError(
                f"layer {path!r} has {layer.num_features} channels, which {count} groups do not "
                "divide; choose a number of groups that divides them."
            )
        norm = SampleNorm(count, layer.num_features, layer.eps, layer.affine)
        norm.weight, norm.bias = layer.weight, layer.bias
        return norm.train(layer.training)

    return replace(model, make)


def remove(model: nn.Module) -> Conversion:
    """Replace every BatchNorm layer by the identity."""

    def make(path: str, layer: _BatchNorm) -> nn.Module:
        _federated_type(path, layer)
        return nn.Identity().train(layer.training)

    return replace(model, make)
