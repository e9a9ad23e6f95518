"""Where a layer stands: what made the tensor that it is given.

One forward pass tells. Hooks see which modules run and what they return; below them, every
operation is seen as well, so that `functional.relu` counts as an activation like `nn.ReLU`. What
returns its input as it is (views, Identity, Dropout in evaluation) makes nothing.
"""

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import activation
from torch.nn.modules.conv import _ConvNd
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fednorm.doctor.findings import Place

_ACTIVATIONS = tuple(
    getattr(activation, name) for name in activation.__all__ if name != "MultiheadAttention"
)
_TYPES: tuple[tuple[tuple[type[nn.Module], ...], Place], ...] = (
    ((_ConvNd,), "convolution"),
    ((nn.Linear, nn.Bilinear), "linear"),
    (_ACTIVATIONS, "activation"),
)
_aten = torch.ops.aten
_OPERATIONS: Mapping[Any, Place] = {
    _aten.convolution: "convolution",
    **dict.fromkeys((_aten.addmm, _aten.mm, _aten.linear), "linear"),
    **dict.fromkeys(
        (
            *(_aten.relu, _aten.relu_, _aten.hardtanh, _aten.hardtanh_, _aten.leaky_relu),
            *(_aten.leaky_relu_, _aten.elu, _aten.elu_, _aten.gelu, _aten.silu, _aten.silu_),
            *(_aten.mish, _aten.mish_, _aten.hardswish, _aten.hardswish_, _aten.softplus),
            *(_aten.sigmoid, _aten.sigmoid_, _aten.tanh, _aten.tanh_, _aten._prelu_kernel),  # noqa: SLF001 (torch's own name of it)
        ),
        "activation",
    ),
}


@dataclass(frozen=True, slots=True)
class Made:
    """By what a tensor was made."""

    place: Place
    by: str


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a layer."""

    made: Made
    shape: tuple[int, ...]  # of its input


_INPUT = Made("other", "the input")


@dataclass(slots=True)
class _Trace:
    """What made each tensor, by the address of its memory."""

    made: dict[int, Made] = field(default_factory=dict)
    alive: list[Tensor] = field(default_factory=list)  # so that no address is used again
    calls: dict[nn.Module, list[Call]] = field(default_factory=dict)

    def of(self, tensor: Tensor) -> Made:
        return self.made.get(_address(tensor), _INPUT)

    def note(self, tensor: Tensor, made: Made) -> None:
        self.made[_address(tensor)] = made
        self.alive.append(tensor)


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own
    """Notes what every operation makes."""

    def __init__(self, trace: _Trace) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own
        self.trace = trace

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        del types
        given = {_address(tensor) for tensor in _tensors((args, kwargs))}
        result = func(*args, **(kwargs or {}))
        made = Made(_OPERATIONS.get(func.overloadpacket, "other"), str(func.overloadpacket))
        for tensor in _tensors(result):
            if func._schema.is_mutable or _address(tensor) not in given:  # noqa: SLF001 (torch has no other way)
                self.trace.note(tensor, made)
        return result


def calls(model: nn.Module, x: Tensor) -> dict[str, list[Call]]:
    """Return the calls of every module in one forward pass, by the module's first path."""
    model = copy.deepcopy(model).eval()
    trace = _Trace()
    with _hooks(model, trace), torch.no_grad(), torch.random.fork_rng(), _Operations(trace):
        model(x)
    return {path: trace.calls.get(module, []) for path, module in model.named_modules()}


@contextmanager
def _hooks(model: nn.Module, trace: _Trace) -> Iterator[None]:
    entered: dict[nn.Module, list[Made]] = {}

    def before(module: nn.Module, given: tuple[Any, ...]) -> None:
        for tensor in _tensors(given)[:1]:
            call = Call(trace.of(tensor), tuple(tensor.shape))
            trace.calls.setdefault(module, []).append(call)
            entered.setdefault(module, []).append(call.made)

    def after(module: nn.Module, given: tuple[Any, ...], result: Any) -> None:
        del given
        start = entered[module].pop() if entered.get(module) else None
        place = next((p for types, p in _TYPES if isinstance(module, types)), None)
        for tensor in _tensors(result):
            if trace.of(tensor) is not start and (place or not list(module.children())):
                made = Made(place or trace.of(tensor).place, type(module).__name__)
                trace.note(tensor, made)

    handles = [m.register_forward_pre_hook(before) for m in model.modules()]
    handles += [m.register_forward_hook(after) for m in model.modules()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
