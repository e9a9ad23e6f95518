"""Replace the BatchNorm layers in a copy of a model, and report each replacement.

A layer becomes FedBatchNorm, which follows a rule (`to_fed_batch_norm`); SampleNorm, which is
GroupNorm, LayerNorm or InstanceNorm (`to_sample_norm`); or a copy of its input (`remove`).
"""

from collections.abc import Callable, Mapping
from dataclasses import replace as with_fields
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fednorm.core.strategy import Conversion, Replacement
from fednorm.errors import ConversionError
from fednorm.nn.batch_norm import (
    FedBatchNorm,
    FedBatchNorm1d,
    FedBatchNorm2d,
    FedBatchNorm3d,
    FedSyncBatchNorm,
)
from fednorm.nn.copies import (
    copy_model,
    list_hooks,
    list_skipped_layers,
    mark,
    replace_references,
)
from fednorm.nn.custom_layers import restore_subclass, strip_subclass

Make: TypeAlias = Callable[[str, _BatchNorm], nn.Module]

_FEDERATED: dict[type[_BatchNorm], type[FedBatchNorm]] = {
    nn.BatchNorm1d: FedBatchNorm1d,
    nn.BatchNorm2d: FedBatchNorm2d,
    nn.BatchNorm3d: FedBatchNorm3d,
    nn.SyncBatchNorm: FedSyncBatchNorm,
    _BatchNorm: FedBatchNorm,  # of users' classes that take any number of dimensions
}

_MARK = "is_no_batch_norm_use_fednorm_load"


def replace(model: nn.Module, make: Make) -> Conversion:
    """Return a copy of `model` in which `make(path, layer)` replaces every BatchNorm layer.

    `make` is given a layer of exactly one of torch's types, or of this library's where the model
    was converted before. It returns the layer itself, with another class, or another module. What
    a user's class adds to torch's is put back after that, or the layer is refused: see
    `custom_layers.py`.

    A new module gets the training flag and the hooks of the layer. A layer of another kind with the
    same `state_dict` keys, such as GroupNorm for BatchNorm without running statistics, is marked,
    so that the plain model refuses it. A layer that is used in several places is converted once and
    stays shared.
    """
    _refuse_compiled(model)
    root = nn.ModuleDict({"model": copy_model(model)})  # so that the model may be a layer itself
    made: dict[nn.Module, nn.Module] = {}
    replaced = []
    found = [(path, m) for path, m in root.named_modules() if isinstance(m, _BatchNorm)]
    for inner, layer in found:
        path = inner.removeprefix("model").removeprefix(".")
        where, before = path or "(the model itself)", type(layer).__name__
        stripped = strip_subclass(where, layer)
        affine, keys = {"γ": layer.weight, "β": layer.bias}, layer.state_dict().keys()
        made[layer] = new = make(where, layer)
        if new is not layer:
            vars(new.train(layer.training)).update(list_hooks(layer))
        if type(new) not in _FEDERATED.values() and new.state_dict().keys() == keys:
            mark(new, _MARK)
        restore_subclass(where, stripped, layer, new)
        note = _describe_dropped(affine, new)
        replaced.append(Replacement(path, before, type(new).__name__, note))
    replace_references(root, {old: new for old, new in made.items() if new is not old})
    converted = root["model"]
    skipped = list_skipped_layers(converted, set(made.values()))
    return Conversion(converted, tuple(replaced), skipped)


def _refuse_compiled(model: nn.Module) -> None:
    for path, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise ConversionError(
                f"layer {path or '(the model itself)'!r} ({type(module).__name__}) is compiled; "
                "convert the model before scripting it."
            )


def _describe_dropped(affine: Mapping[str, Tensor | None], new: nn.Module) -> str:
    """Say which of γ and β the new module lacks, shared or copied."""
    there = list(new.parameters())
    lost = [
        symbol
        for symbol, old in affine.items()
        if old is not None and not any(p is old or _are_equal(p, old) for p in there)
    ]
    return f"{' and '.join(lost)} {'is' if len(lost) == 1 else 'are'} dropped" if lost else ""


def _are_equal(one: Tensor, other: Tensor) -> bool:
    alike = one.shape == other.shape and one.dtype == other.dtype and one.device == other.device
    return alike and not one.is_meta and torch.equal(one, other)


def to_fed_batch_norm(
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


def add_to_norms(
    conversion: Conversion, name: str, make: Callable[[Tensor], nn.Module]
) -> Conversion:
    """Give every converted layer a child, made from its running mean and in the layer's mode."""
    for layer in list(conversion.model.modules()):
        if isinstance(layer, FedBatchNorm) and layer.running_mean is not None:
            setattr(layer, name, make(layer.running_mean).train(layer.training))
    return conversion


class SampleNorm(nn.GroupNorm):
    """GroupNorm that refuses to normalise a single value, which would erase its input.

    One group is LayerNorm over all of a sample; as many groups as channels is InstanceNorm.
    """

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 (torch's own name)
        """Normalise each group of channels of each sample."""
        values = input[0].numel() // self.num_groups
        if values <= 1:
            raise ValueError(
                f"{self.num_groups} groups on input of shape {tuple(input.shape)} leave one value "
                "per group, and normalising a single value always gives 0; "
                "use fewer groups (strategy 'gn' or 'ln')."
            )
        return super().forward(input)


def to_sample_norm(model: nn.Module, groups: int | None, *, round_down: bool = False) -> Conversion:
    """Replace every BatchNorm layer by SampleNorm, which keeps γ and β.

    Args:
        model: the model.
        groups: groups of channels; None is one group per channel.
        round_down: where `groups` does not divide a layer's channels, take the largest smaller
            number that does, instead of refusing; the report says so.
    """

    def make(path: str, layer: _BatchNorm) -> nn.Module:
        channels = layer.num_features
        count = channels if groups is None else groups
        if channels % count:
            if not round_down:
                raise ConversionError(
                    f"layer {path!r} has {channels} channels, which {count} groups do not divide; "
                    "choose a number of groups that divides them, or round_down=True for the "
                    "largest smaller one that does."
                )
            count = max(n for n in range(1, count) if channels % n == 0)
        norm = SampleNorm(count, channels, layer.eps, layer.affine)
        norm.weight, norm.bias = layer.weight, layer.bias
        return norm

    conversion = replace(model, make)
    replaced = (_name_sample_norm(conversion.model, r, groups) for r in conversion.replaced)
    return with_fields(conversion, replaced=tuple(replaced))


def _name_sample_norm(model: nn.Module, made: Replacement, groups: int | None) -> Replacement:
    norm = model.get_submodule(made.path)
    count, channels = norm.num_groups, norm.num_channels
    if groups is None or groups == 1:
        return with_fields(made, after="InstanceNorm" if groups is None else "LayerNorm")
    rounded = "" if count == groups else f"{groups} groups do not divide {channels} channels"
    return with_fields(made, after=f"GroupNorm({count} groups)", note=made.note or rounded)


class Removed(nn.Identity):
    """The identity, as a copy.

    A normalization layer never returns its own input, so what follows it may work in place; the
    input itself may be needed elsewhere, as in a residual block.
    """

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 (torch's own name)
        """Return a copy of the input."""
        return input.clone()


def remove(model: nn.Module) -> Conversion:
    """Remove every BatchNorm layer, with its γ and β."""
    return replace(model, lambda _path, _layer: Removed())
