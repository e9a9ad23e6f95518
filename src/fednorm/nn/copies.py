"""Copy models, and replace layers in a copy wherever it refers to them.

Conversions, stacked models and processes all train copies. `copy.deepcopy` keeps the hooks of
modules and drops those of tensors, and it cannot copy a lazy layer that has no shape yet: a copy
that would silently be another model is refused. A `state_dict` is a copy, too: that of a layer
that is marked is refused by the layer it was made from.

A plain list of registered layers, such as `self.norms = [...]`, must follow a replacement. A layer
that is not registered is in no state_dict either, and no strategy can see it.
"""

import copy
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any, ClassVar, TypeAlias

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.modules.lazy import LazyModuleMixin

from fednorm.core.layer import NormLayer
from fednorm.core.strategy import SkippedLayer
from fednorm.errors import ConversionError


class MarkedLayer(nn.Module):
    """A layer that has the tensors of torch's layer, but computes something else with them.

    Its `state_dict` has an empty entry more, whose name says what to do: strict loading into the
    plain model fails and names the entry. It loads with and without it itself.
    """

    MARK: ClassVar[str]

    # Not a buffer: clients would send it.
    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + self.MARK] = torch.empty(0)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        mine = {key: value for key, value in state_dict.items() if key != prefix + self.MARK}
        super()._load_from_state_dict(mine, prefix, *rest)


def mark(layer: nn.Module, name: str) -> None:
    """Mark a layer of any class as `MarkedLayer` does; the mark stays when the class changes."""
    layer.register_state_dict_post_hook(partial(_write_mark, name))  # type: ignore[no-untyped-call]
    layer.register_load_state_dict_pre_hook(  # type: ignore[no-untyped-call]
        partial(_drop_mark, name)
    )


def _write_mark(name: str, _layer: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    state[prefix + name] = torch.empty(0)


def _drop_mark(
    name: str, _layer: nn.Module, state: dict[str, Any], prefix: str, *_rest: Any
) -> None:
    state.pop(prefix + name, None)


def copy_model(model: nn.Module, *, sharing: Iterable[object] = ()) -> nn.Module:
    """Return a copy of a model that computes and learns as the model does.

    Objects in `sharing` are not copied: both models refer to them.

    Raises ConversionError, which names the layer or the parameter that cannot be copied.
    """
    refuse_uncopyable(model)
    copied = {id(item): item for item in sharing}
    try:
        return copy.deepcopy(model, _copy_empty(model) | copied)
    except (RuntimeError, TypeError) as error:
        raise ConversionError(
            f"a conversion works on a copy, but {type(model).__name__} cannot be copied ({error}); "
            "convert it before it has run, and without what copy.deepcopy refuses."
        ) from error


def _copy_empty(model: nn.Module) -> dict[int, Any]:
    """Return copies of the modules' empty dictionaries by id: most of what `deepcopy` copies."""
    attributes = [value for module in model.modules() for value in vars(module).values()]
    empty = [one for one in attributes if type(one) in (dict, OrderedDict) and not one]
    return {id(one): type(one)() for one in empty}


def refuse_uncopyable(model: nn.Module) -> None:
    """Raise if a model has lazy layers without a shape, or hooks on parameters."""
    for path, module in model.named_modules():
        if isinstance(module, LazyModuleMixin) and (
            # A lazy BatchNorm that knows its shape has another class, even if it has no tensors.
            isinstance(module, _BatchNorm) or module.has_uninitialized_params()  # type: ignore[misc]
        ):
            raise ConversionError(
                f"layer {path or '(the model itself)'!r} ({type(module).__name__}) has no shape "
                "yet; run one batch through the model before you pass it on."
            )
    for name, parameter in model.named_parameters():
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:  # noqa: SLF001
            raise ConversionError(
                f"parameter {name!r} of {type(model).__name__} has a hook, which a copy of the "
                "model would lose; remove it (`handle.remove()`) and treat the gradient in the "
                "model's forward pass, on a tensor computed there: `w = self.weight.view_as("
                "self.weight); w.register_hook(...)`."
            )


def drop_hooks(module: nn.Module) -> None:
    """Remove the hooks of a module and of all its submodules."""
    for part in module.modules():
        vars(part).update(list_hooks(nn.Identity()))


def list_hooks(module: nn.Module) -> dict[str, Any]:
    """Return the hooks around forward and backward passes, by torch's name for each kind."""
    return {
        name: value
        for name, value in vars(module).items()
        if "hook" in name and ("forward" in name or "backward" in name)
    }


_Container: TypeAlias = dict[Any, Any] | list[Any] | tuple[Any, ...]
_CONTAINERS = (dict, list, tuple)


def replace_references(root: nn.Module, made: Mapping[nn.Module, nn.Module]) -> None:
    """Put `made[m]` wherever a module below `root` holds `m`: as a child, in a list, in a dict."""
    if not made:
        return
    for module in list(root.modules()):
        for container in list(_containers(vars(module))):
            if not isinstance(container, tuple):
                for key, item in list(_entries(container)):
                    container[key] = _replace_in(item, made)


def _replace_in(item: Any, made: Mapping[nn.Module, nn.Module]) -> Any:
    if isinstance(item, nn.Module):
        return made.get(item, item)
    if type(item) is tuple and any(isinstance(part, nn.Module) for part in item):
        return tuple(_replace_in(part, made) for part in item)
    return item


def _containers(start: _Container) -> Iterator[_Container]:
    """Yield a container and all that are nested in it, each once."""
    waiting, seen = [start], set()
    while waiting:
        container = waiting.pop()
        if id(container) not in seen:
            seen.add(id(container))
            yield container
            waiting += [v for _, v in _entries(container) if isinstance(v, _CONTAINERS) and v]


def _entries(container: _Container) -> Iterable[tuple[Any, Any]]:
    return container.items() if isinstance(container, dict) else enumerate(container)


def list_skipped_layers(model: nn.Module, made: Iterable[nn.Module]) -> tuple[SkippedLayer, ...]:
    """Return the layers with running statistics that a conversion left alone."""
    registered = set(model.modules())
    new = {part for module in made for part in module.modules()}
    left = []
    for path, module in model.named_modules():
        if module not in new and (reason := _explain_skip(module)):
            left.append(SkippedLayer(path, type(module).__name__, reason))
        for attribute, value in vars(module).items():
            if isinstance(value, nn.Module) or (isinstance(value, _CONTAINERS) and value):
                where = f"{path}.{attribute}".lstrip(".")
                hidden = _find_hidden(value, registered)
                left += [SkippedLayer(where, type(layer).__name__, _HIDDEN) for layer in hidden]
    return tuple(left)


_HIDDEN = (
    "it is not registered with the model, so torch neither trains nor saves it; "
    "hold it in nn.ModuleList or nn.ModuleDict to have it converted"
)


def _find_hidden(value: Any, registered: set[nn.Module]) -> Iterator[_BatchNorm]:
    """Yield the BatchNorm layers that an attribute holds and the model does not know."""
    for container in _containers([value]):
        for _, item in _entries(container):
            if isinstance(item, nn.Module) and item not in registered:
                yield from (layer for layer in item.modules() if isinstance(layer, _BatchNorm))


def _explain_skip(module: nn.Module) -> str:
    """Return why a module with running statistics was skipped; nothing if it has none."""
    buffers = {name for name, _ in module.named_buffers(recurse=False)}
    if isinstance(module, NormLayer) or not {"running_mean", "running_var"} <= buffers:
        return ""
    if isinstance(module, _NormBase):
        return "it is not a BatchNorm layer; its statistics are averaged, or kept with 'fedbn'"
    if {"weight", "bias"} <= buffers:
        return "it is frozen: its statistics, γ and β are constants"
    return "it is not one of torch's BatchNorm layers; its buffers are averaged in every strategy"
