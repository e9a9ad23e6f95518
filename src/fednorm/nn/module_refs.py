"""References to modules: registered children, and attributes that torch does not look into.

A plain list of registered layers, such as `self.norms = [...]`, must follow a replacement. A layer
that is not registered is in no state_dict either, and no strategy can see it.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeAlias

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from fednorm.core.layer import NormLayer
from fednorm.core.strategy import SkippedLayer

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
        return "it is no BatchNorm; its running statistics are averaged in every strategy"
    if {"weight", "bias"} <= buffers:
        return "it is frozen: its statistics, γ and β are constants"
    return "it is none of torch's BatchNorm layers; its buffers are averaged in every strategy"
