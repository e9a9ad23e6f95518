"""Subclasses of BatchNorm that users or other libraries wrote: what they add to torch's class.

`strip_subclass` sets the addition aside, so that a layer has exactly one of torch's types or of
this library's while it is converted, whose forward pass is known; `restore_subclass` puts it back.
A class may add three things.

- Methods only, such as its own check of the input's shape: it goes back on top.
- A forward pass that asks `super().forward(x)` once: it goes back on top, too; what is asked is
  then the converted layer. A layer that is replaced by another would lose it, so that is refused.
- BatchNorm, then its children `drop` and `act`, as timm's BatchNormAct2d: both are put behind
  whatever the layer becomes.

All else is refused by name.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils import parametrize

from fednorm.errors import ConversionError
from fednorm.nn.batch_norm import FedBatchNorm
from fednorm.nn.forward_probe import calls_super_once, ends_in_activation

_Class: TypeAlias = type[nn.Module]
_TORCH = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm, _BatchNorm)


@dataclass(frozen=True, slots=True)
class Subclass:
    """What a layer's class adds to torch's, set aside for a conversion."""

    user: _Class | None = None  # the user's class, if it goes back on top
    own_forward: bool = False  # whether that class overrides the forward pass
    tail: tuple[nn.Module, nn.Module] | None = None  # drop and act


def strip_subclass(path: str, layer: nn.Module) -> Subclass:
    """Set aside what a user's class adds to a layer."""
    if parametrize.is_parametrized(layer):
        raise ConversionError(
            f"layer {path!r} ({type(layer).__name__}) has parametrized tensors, which a conversion "
            "would lose; remove the parametrization before converting the model."
        )
    cls = type(layer)
    if combined := _PARTS.get(cls):
        top, layer.__class__ = combined
        if top is Activated:
            return Subclass(tail=_detach_tail(layer))
        return Subclass(top, own_forward=top.forward is not _torch_type(top).forward)
    known = cls in _TORCH or isinstance(layer, FedBatchNorm)
    return Subclass() if known else _strip_user_class(path, layer)


def _strip_user_class(path: str, layer: nn.Module) -> Subclass:
    cls, plain = type(layer), _torch_type(type(layer))
    own_forward = cls.forward is not plain.forward
    if own_forward and ends_in_activation(layer, plain):
        layer.__class__ = plain
        return Subclass(tail=_detach_tail(layer))
    if own_forward and not calls_super_once(layer, plain):
        raise ConversionError(
            f"layer {path!r} ({cls.__name__}) is a BatchNorm with a custom forward pass, which a "
            "conversion would lose; let it call super().forward(x) once, or use one of torch's "
            "BatchNorm layers there."
        )
    if taken := [name for name in _OURS if hasattr(layer, name)]:
        raise ConversionError(
            f"layer {path!r} ({cls.__name__}) has attributes that a converted layer needs for "
            f"itself: {', '.join(taken)}; rename them."
        )
    layer.__class__ = plain
    return Subclass(cls, own_forward=own_forward)


def restore_subclass(path: str, stripped: Subclass, old: nn.Module, new: nn.Module) -> None:
    """Put back on `new`, the replacement of `old`, what was set aside."""
    if stripped.user is not None and new is old:
        new.__class__ = _combine_classes(stripped.user, type(new), f"Fed{stripped.user.__name__}")
    elif stripped.user is not None and stripped.own_forward:
        raise ConversionError(
            f"layer {path!r} ({stripped.user.__name__}) is a BatchNorm with a custom forward pass, "
            f"which {type(new).__name__} would lose; use one of torch's "
            "BatchNorm layers there, or a strategy that keeps BatchNorm."
        )
    if stripped.tail is not None:
        _activate(new, *stripped.tail)


def change_base(layer: nn.Module, bases: Mapping[_Class, _Class]) -> None:
    """Give a layer of a class in `bases` the class it maps to; a user's addition stays on top."""
    top, base = _PARTS.get(type(layer), (None, type(layer)))
    if base not in bases:
        return
    new = bases[base]
    if top is None:
        layer.__class__ = new
    elif issubclass(top, new):  # the user's class, as it was written
        layer.__class__ = top
    else:
        layer.__class__ = _combine_classes(top, new, f"{new.__name__}Act")


def _torch_type(cls: _Class) -> type[_BatchNorm]:
    return next(base for base in cls.__mro__ if base in _TORCH)


def _detach_tail(layer: nn.Module) -> tuple[nn.Module, nn.Module]:
    tail = layer.get_submodule("drop"), layer.get_submodule("act")
    del layer.drop, layer.act
    return tail


def _list_attributes() -> tuple[str, ...]:
    """Return what FedBatchNorm has and torch's layer has not."""
    plain = dir(nn.BatchNorm1d(1))
    return tuple(name for name in dir(FedBatchNorm) if name not in plain)


_OURS = _list_attributes()


class Activated(nn.Module):
    """A forward pass that ends in `drop` and `act`; combined with the class of another layer."""

    drop: nn.Module
    act: nn.Module

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 (torch's own name)
        """Return what the other layer returns, dropped and activated."""
        activated: Tensor = self.act(self.drop(super().forward(input)))
        return activated


def _activate(layer: nn.Module, drop: nn.Module, act: nn.Module) -> None:
    """Let a layer end in `drop` and `act`, under the keys that they have in timm's layer."""
    layer.__class__ = _combine_classes(Activated, type(layer), f"{type(layer).__name__}Act")
    layer.drop, layer.act = drop, act


_COMBINED: dict[tuple[_Class, _Class, str], _Class] = {}
_PARTS: dict[_Class, tuple[_Class, _Class]] = {}  # that a class was combined from


def _combine_classes(top: _Class, base: _Class, name: str) -> _Class:
    """Return a class of both: `super()` in `top` is `base`.

    Unlike other classes that are made at run time, it can be copied and pickled.
    """
    key = (top, base, name)
    if key not in _COMBINED:
        fields = {"__reduce__": _reduce, "__module__": top.__module__}
        _COMBINED[key] = cls = type(name, (top, base), fields)
        _PARTS[cls] = (top, base)
    return _COMBINED[key]


def _reduce(self: nn.Module) -> tuple[Any, ...]:
    cls = type(self)
    state = self.__getstate__()  # type: ignore[no-untyped-call]  # object's own, or the user's
    return _remake, (*_PARTS[cls], cls.__name__), state


def _remake(top: _Class, base: _Class, name: str) -> nn.Module:
    cls = _combine_classes(top, base, name)
    return cls.__new__(cls)
