"""The hooks that torch calls around a module's forward and backward pass."""

from typing import Any

from torch import nn


def call_hooks(module: nn.Module) -> dict[str, Any]:
    """Return what torch stores of these hooks in a module, by its name for each kind."""
    return {
        name: value
        for name, value in vars(module).items()
        if "hook" in name and ("forward" in name or "backward" in name)
    }


def move_hooks(old: nn.Module, new: nn.Module) -> None:
    """Give the hooks of one module to another that stands in its place."""
    vars(new).update(call_hooks(old))


def drop_hooks(module: nn.Module) -> None:
    """Take the hooks off a module and all that it holds."""
    for part in module.modules():
        vars(part).update(call_hooks(nn.Identity()))
