"""Subclasses of BatchNorm that users or other libraries wrote: what they add to torch's class.

`strip_subclass` sets the addition aside, so that a layer has exactly one of torch's types or of
this library's while it is converted, whose forward pass is known; `restore_subclass` puts it back.
A class may add three things.

- Methods only, such as its own check of the input's shape: it goes back on top.
- A forward pass that asks `super().forward(x)` once: it goes back on top, too; what is asked is
  then the converted layer. A layer that is replaced by another would lose it, so that is refused.
- BatchNorm, then its children `drop` and `act`, as timm's BatchNormAct2d: both are put behind
  whatever the layer becomes.

All else is refused by name. What a forward pass does is found by running a copy of the layer
without hooks on a sample, so nothing that belongs to the user changes.
"""

import copy
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils import parametrize

from fednorm.core.task import isolated_rng
from fednorm.errors import ConversionError
from fednorm.nn.batch_norm import FedBatchNorm
from fednorm.nn.copies import drop_hooks

_Class: TypeAlias = type[nn.Module]
_TORCH = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm, _BatchNorm)
# What FedBatchNorm has and torch's layer has not.
_OURS = sorted({*dir(FedBatchNorm)} - {*dir(nn.BatchNorm1d(1))})

_BATCH, _SIDE = 4, 3  # of the sample
_DIMENSIONS: dict[type[_BatchNorm], tuple[int, ...]] = {
    nn.BatchNorm1d: (2, 3),
    nn.BatchNorm2d: (4,),
    nn.BatchNorm3d: (5,),
}
_ANY = (4, 2, 3, 5)


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
    if combined := vars(cls).get(_PARTS):
        top, layer.__class__ = combined
        if top is Activated:
            return Subclass(tail=_detach_tail(layer))
        return Subclass(top, own_forward=top.forward is not _torch_type(top).forward)
    known = cls in _TORCH or isinstance(layer, FedBatchNorm)
    return Subclass() if known else _strip_user_class(path, layer)


def _strip_user_class(path: str, layer: nn.Module) -> Subclass:
    cls, plain = type(layer), _torch_type(type(layer))
    own_forward = cls.forward is not plain.forward
    if own_forward and _ends_in_activation(layer, plain):
        layer.__class__ = plain
        return Subclass(tail=_detach_tail(layer))
    if own_forward and not _calls_super_once(layer, plain):
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
    if stripped.tail is not None:  # under the keys that they have in timm's layer
        new.__class__ = _combine_classes(Activated, type(new), f"{type(new).__name__}Act")
        new.drop, new.act = stripped.tail


def change_base(layer: nn.Module, bases: Mapping[_Class, _Class]) -> None:
    """Give a layer of a class in `bases` the class it maps to; a user's addition stays on top."""
    top, base = vars(type(layer)).get(_PARTS, (None, type(layer)))
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


class Activated(nn.Module):
    """A forward pass that ends in `drop` and `act`; combined with the class of another layer."""

    drop: nn.Module
    act: nn.Module

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 (torch's own name)
        """Return what the other layer returns, dropped and activated."""
        activated: Tensor = self.act(self.drop(super().forward(input)))
        return activated


_COMBINED: dict[tuple[_Class, _Class, str], _Class] = {}
_PARTS = "_combined_from"  # the attribute of a combined class


def _combine_classes(top: _Class, base: _Class, name: str) -> _Class:
    """Return a class of both: `super()` in `top` is `base`.

    Unlike other classes that are made at run time, it can be copied and pickled.
    """
    key = (top, base, name)
    if key not in _COMBINED:
        fields = {"__reduce__": _reduce, "__module__": top.__module__, _PARTS: (top, base)}
        _COMBINED[key] = type(name, (top, base), fields)
    return _COMBINED[key]


def _reduce(self: nn.Module) -> tuple[Any, ...]:
    cls = type(self)
    state = self.__getstate__()  # type: ignore[no-untyped-call]  # object's own, or the user's
    return _remake, (*vars(cls)[_PARTS], cls.__name__), state


def _remake(top: _Class, base: _Class, name: str) -> nn.Module:
    cls = _combine_classes(top, base, name)
    return cls.__new__(cls)


class _Witness(_BatchNorm):
    """Replaces torch's forward pass and counts its calls."""

    asked = 0

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 (torch's own name)
        self.asked += 1
        return input.clone()


def _calls_super_once(layer: nn.Module, plain: type[_BatchNorm]) -> bool:
    """Return whether a layer's forward pass asks super() once, and leaves the statistics to it."""
    probe = _copy_bare(layer)
    try:
        probe.__class__ = type("Probe", (type(layer), _Witness, plain), {})
    except TypeError:  # classes that cannot be derived from, or not together with others
        return False
    return any(_asks_once(cast("_Witness", probe), x) for x in _make_samples(layer, plain))


def _asks_once(probe: _Witness, x: Tensor) -> bool:
    before = {key: value.clone() for key, value in probe.state_dict().items()}
    for mode in (True, False):
        probe.train(mode)
        probe.asked = 0
        if _call(probe, x) is None or probe.asked != 1:
            return False
    return all(torch.equal(value, before[key]) for key, value in probe.state_dict().items())


def _ends_in_activation(layer: nn.Module, plain: type[_BatchNorm]) -> bool:
    """Return whether a layer is BatchNorm, then its child `drop`, then its child `act`."""
    if {name for name, _ in layer.named_children()} != {"drop", "act"}:
        return False
    probe = _copy_bare(layer)
    probe.drop, probe.act = nn.Tanh(), nn.Softplus()  # their composition reveals their order
    reference = copy.deepcopy(probe)
    reference.__class__ = plain
    x = next(_make_samples(layer, plain))
    # In training, SyncBatchNorm would wait for other processes.
    for mode in (False,) if issubclass(plain, nn.SyncBatchNorm) else (True, False):
        given, expected = _call(probe.train(mode), x), _call(reference.train(mode), x)
        if given is None or expected is None or given.shape != x.shape:
            return False
        if not torch.allclose(given, probe.act(probe.drop(expected))):
            return False
    return True


def _copy_bare(layer: nn.Module) -> nn.Module:
    probe = copy.deepcopy(layer).float()
    drop_hooks(probe)
    for buffer in probe.buffers():
        buffer.add_(1)  # means start at 0, where scaling them would not show
    return probe


def _make_samples(layer: nn.Module, plain: type[_BatchNorm]) -> Iterator[Tensor]:
    """Yield a sample of each number of dimensions that a layer may take."""
    tensor = next(iter([*layer.parameters(), *layer.buffers()]), torch.empty(0))
    channels = cast("_BatchNorm", layer).num_features
    for dimensions in _DIMENSIONS.get(plain, _ANY):
        shape = (_BATCH, channels, *[_SIDE] * (dimensions - 2))
        size = math.prod(shape)
        yield torch.linspace(-2, 3, size, device=tensor.device).reshape(shape)


def _call(layer: nn.Module, x: Tensor) -> Tensor | None:
    """Return the output of a layer, or None if it fails or is not a tensor."""
    try:
        with torch.no_grad(), isolated_rng(None, x.device):
            output = layer(x.clone())
    except Exception:  # noqa: BLE001 (a user's forward pass may fail in any way)
        return None
    return output if isinstance(output, Tensor) else None
