"""What a user's BatchNorm class adds to torch's: set aside for a conversion, put back after it.

In between, a layer has exactly one of torch's types or of this library's, whose forward pass is
known. A class may add three things.

- Methods only, such as its own check of the input's shape: it goes back on top.
- A forward pass that asks `super().forward(x)` once: it goes back on top, too; what is asked is
  then the converted layer. A layer that is replaced by another would lose it, so that is refused.
- BatchNorm, then its children `drop` and `act`, as timm's BatchNormAct2d: both are put behind
  whatever the layer becomes.

All else is refused by name.
"""

from dataclasses import dataclass

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils import parametrize

from fednorm.nn.activated import Activated, activate
from fednorm.nn.batch_norm import FedBatchNorm
from fednorm.nn.blend import blend, parts
from fednorm.nn.errors import ConversionError
from fednorm.nn.probe import cooperates, ends_in_activation

_TORCH = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm, _BatchNorm)


@dataclass(frozen=True, slots=True)
class Outer:
    """What was set aside of a layer."""

    user: type[nn.Module] | None = None  # the user's class, if it goes back on top
    own_forward: bool = False  # whether that class computes something of its own
    tail: tuple[nn.Module, nn.Module] | None = None  # drop and act


def peel(path: str, layer: nn.Module) -> Outer:
    """Set aside what a user's class adds to a layer."""
    if parametrize.is_parametrized(layer):
        raise ConversionError(
            f"layer {path!r} ({type(layer).__name__}) has parametrized tensors, which a conversion "
            "would lose; remove the parametrization before converting the model."
        )
    cls = type(layer)
    if (blended := parts(cls)) is not None:
        outer, layer.__class__ = blended
        if outer is Activated:
            return Outer(tail=_detach(layer))
        return Outer(outer, own_forward=outer.forward is not _torch_type(outer).forward)
    known = cls in _TORCH or isinstance(layer, FedBatchNorm)
    return Outer() if known else _peel_user(path, layer)


def _peel_user(path: str, layer: nn.Module) -> Outer:
    cls, plain = type(layer), _torch_type(type(layer))
    own_forward = cls.forward is not plain.forward
    if own_forward and ends_in_activation(layer, plain):
        layer.__class__ = plain
        return Outer(tail=_detach(layer))
    if own_forward and not cooperates(layer, plain):
        raise ConversionError(
            f"layer {path!r} ({cls.__name__}) is a BatchNorm with a forward pass of its own, which "
            "a conversion would lose; let it call super().forward(x) once, or use one of torch's "
            "BatchNorm layers there."
        )
    if taken := [name for name in _OURS if hasattr(layer, name)]:
        raise ConversionError(
            f"layer {path!r} ({cls.__name__}) has attributes that a converted layer needs for "
            f"itself: {', '.join(taken)}; rename them."
        )
    layer.__class__ = plain
    return Outer(cls, own_forward=own_forward)


def dress(path: str, outer: Outer, old: nn.Module, new: nn.Module) -> None:
    """Put back on `new`, which stands in the place of `old`, what was set aside."""
    if outer.user is not None and new is old:
        new.__class__ = blend(outer.user, type(new), f"Fed{outer.user.__name__}")
    elif outer.user is not None and outer.own_forward:
        raise ConversionError(
            f"layer {path!r} ({outer.user.__name__}) is a BatchNorm with a forward pass of its "
            f"own, which {type(new).__name__} in its place would lose; use one of torch's "
            "BatchNorm layers there, or a strategy that keeps BatchNorm."
        )
    if outer.tail is not None:
        activate(new, *outer.tail)


def _torch_type(cls: type[nn.Module]) -> type[_BatchNorm]:
    return next(base for base in cls.__mro__ if base in _TORCH)


def _detach(layer: nn.Module) -> tuple[nn.Module, nn.Module]:
    tail = layer.get_submodule("drop"), layer.get_submodule("act")
    del layer.drop, layer.act
    return tail


def _attributes_of_ours() -> tuple[str, ...]:
    """Return what FedBatchNorm has and torch's layer has not."""
    plain = dir(nn.BatchNorm1d(1))
    return tuple(name for name in dir(FedBatchNorm) if name not in plain)


_OURS = _attributes_of_ours()
