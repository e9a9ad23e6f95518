"""Copy models and move their hooks; refuse a copy that would silently be another model.

Conversions, stacked models and processes all train copies. `copy.deepcopy` keeps the hooks of
modules and drops those of tensors, and it cannot copy a lazy layer that has no shape yet.
"""

import copy
from collections import OrderedDict
from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.lazy import LazyModuleMixin

from fednorm.errors import ConversionError


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
