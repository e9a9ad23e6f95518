"""Replaces the BatchNorm layers in a copy of a model, and says what it replaced."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace as with_fields
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fednorm.core.strategy import Conversion, Replacement
from fednorm.nn import held
from fednorm.nn.batch_norm import (
    FedBatchNorm,
    FedBatchNorm1d,
    FedBatchNorm2d,
    FedBatchNorm3d,
    FedSyncBatchNorm,
)
from fednorm.nn.copies import copy_model
from fednorm.nn.custom_layers import dress, peel
from fednorm.nn.errors import ConversionError
from fednorm.nn.hooks import move_hooks
from fednorm.nn.removed import Removed
from fednorm.nn.sample_norm import SampleNorm

__all__ = ["ConversionError", "Make", "federate", "remove", "replace", "to_sample_norm"]

Make: TypeAlias = Callable[[str, _BatchNorm], nn.Module]

_FEDERATED: dict[type[_BatchNorm], type[FedBatchNorm]] = {
    nn.BatchNorm1d: FedBatchNorm1d,
    nn.BatchNorm2d: FedBatchNorm2d,
    nn.BatchNorm3d: FedBatchNorm3d,
    nn.SyncBatchNorm: FedSyncBatchNorm,
    _BatchNorm: FedBatchNorm,  # of users' classes that take any number of dimensions
}


def replace(model: nn.Module, make: Make) -> Conversion:
    """Return a copy of `model` in which `make(path, layer)` stands for every BatchNorm layer.

    `make` is given a layer of exactly one of torch's types, or of this library's where the model
    was converted before. It returns the layer itself, with another class, or another module. What
    a user's class adds to torch's is put back after that, or the layer is refused: see
    `custom_layers.py`.

    A new module gets the training flag and the hooks of the layer. A layer that is used in several
    places is converted once and stays shared.
    """
    _refuse_compiled(model)
    root = nn.ModuleDict({"model": copy_model(model)})  # so that the model may be a layer itself
    made: dict[nn.Module, nn.Module] = {}
    replaced = []
    for path, layer in list(_batch_norms(root)):
        where, before = path or "(the model itself)", type(layer).__name__
        outer = peel(where, layer)
        affine = {"γ": layer.weight, "β": layer.bias}
        made[layer] = new = make(where, layer)
        if new is not layer:
            move_hooks(layer, new.train(layer.training))
        dress(where, outer, layer, new)
        replaced.append(Replacement(path, before, type(new).__name__, _dropped(affine, new)))
    held.exchange(root, {old: new for old, new in made.items() if new is not old})
    converted = root["model"]
    return Conversion(converted, tuple(replaced), held.kept(converted, set(made.values())))


def _batch_norms(root: nn.Module) -> Iterator[tuple[str, _BatchNorm]]:
    for path, module in root.named_modules():
        if isinstance(module, _BatchNorm):
            yield path.removeprefix("model").removeprefix("."), module


def _refuse_compiled(model: nn.Module) -> None:
    for path, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise ConversionError(
                f"layer {path or '(the model itself)'!r} ({type(module).__name__}) is compiled; "
                "convert the model before scripting it."
            )


def _dropped(affine: Mapping[str, Tensor | None], new: nn.Module) -> str:
    """Say which of γ and β the new module does not have, neither as they are nor as copies."""
    there = list(new.parameters())
    lost = [
        symbol
        for symbol, old in affine.items()
        if old is not None and not any(p is old or _equal(p, old) for p in there)
    ]
    return f"{' and '.join(lost)} {'is' if len(lost) == 1 else 'are'} dropped" if lost else ""


def _equal(one: Tensor, other: Tensor) -> bool:
    alike = one.shape == other.shape and one.dtype == other.dtype and one.device == other.device
    return alike and not one.is_meta and torch.equal(one, other)


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
        if not isinstance(layer, FedBatchNorm):
            layer.__class__ = _FEDERATED[type(layer)]
        if not isinstance(momentum, str):
            layer.momentum = momentum
        return layer

    return replace(model, make)


def to_sample_norm(model: nn.Module, groups: int | None, *, fit: bool = False) -> Conversion:
    """Replace every BatchNorm layer by SampleNorm, which keeps γ and β.

    Args:
        model: the model.
        groups: groups of channels; None stands for one group per channel.
        fit: where `groups` does not divide a layer's channels, take the largest smaller number
            that does, instead of refusing; the report says so.
    """
    fitted: dict[str, str] = {}

    def make(path: str, layer: _BatchNorm) -> nn.Module:
        channels = layer.num_features
        count = channels if groups is None else groups
        if channels % count:
            if not fit:
                raise ConversionError(
                    f"layer {path!r} has {channels} channels, which {count} groups do not divide; "
                    "choose a number of groups that divides them, or fit=True for the largest "
                    "smaller one that does."
                )
            fits = max(n for n in range(1, count) if channels % n == 0)
            fitted[path] = f"{fits} groups, as {count} do not divide {channels} channels"
            count = fits
        norm = SampleNorm(count, channels, layer.eps, layer.affine)
        norm.weight, norm.bias = layer.weight, layer.bias
        return norm

    conversion = replace(model, make)
    replaced = [with_fields(r, note=r.note or fitted.get(r.path, "")) for r in conversion.replaced]
    return with_fields(conversion, replaced=tuple(replaced))


def remove(model: nn.Module) -> Conversion:
    """Take every BatchNorm layer out, with its γ and β."""
    return replace(model, lambda _path, _layer: Removed())
