"""Find the normalization layers of a model by type, and the operation before each.

A layer's place is the kind of module or operation that produced its input. One forward pass finds
it: hooks record the outputs of modules, and a dispatch mode those of operations, so that
`functional.relu` counts as an activation like `nn.ReLU`. Operations that return their input
unchanged (views, Identity, Dropout in evaluation) do not count.
"""

import copy
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import activation
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.modules.conv import _ConvNd
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fednorm.core.layout import NORM_LAYERS, find_kinds
from fednorm.core.task import isolated_rng
from fednorm.core.types import Kind
from fednorm.doctor.findings import Layer, Place, State

_CHANNEL = 2  # dimensions of [samples, channels]
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


def find_layers(model: nn.Module, x: Tensor) -> tuple[Layer, ...]:
    """Return the normalization layers in the order of the model, with their places."""
    calls = trace_calls(model, x)
    everywhere = [m for _, m in model.named_modules(remove_duplicate=False)]
    return tuple(
        _describe_layer(path, module, calls[path], everywhere.count(module))
        for path, module in model.named_modules()
        if isinstance(module, NORM_LAYERS)
    )


def measure_state(model: nn.Module) -> State:
    """Return the size of a model's tensors, by kind; a tied tensor counts once."""
    kind_of = find_kinds(model)
    seen: set[int] = set()
    sizes = dict.fromkeys(Kind, 0)
    statistics = []
    for key, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) in seen or key not in kind_of:  # an extra state is no tensor of a layer
            continue
        seen.add(id(tensor))
        sizes[kind_of[key]] += tensor.nbytes
        if kind_of[key] is Kind.STATISTIC:
            statistics.append(key)
    return State(
        total=sum(sizes.values()),
        weights=sizes[Kind.WEIGHT],
        affine=sizes[Kind.AFFINE],
        statistics=sizes[Kind.STATISTIC],
        counters=sizes[Kind.COUNTER],
        statistic_tensors=tuple(statistics),
    )


@dataclass(frozen=True, slots=True)
class Origin:
    """The module or operation that produced a tensor."""

    place: Place
    by: str


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a layer."""

    origin: Origin  # of its input
    shape: tuple[int, ...]  # of its input


_INPUT = Origin("other", "the input")


def trace_calls(model: nn.Module, x: Tensor) -> dict[str, list[Call]]:
    """Return the calls of every module in one forward pass, by the module's first path."""
    model = copy.deepcopy(model).eval()
    trace = _Trace()
    with _install_hooks(model, trace), torch.no_grad(), isolated_rng(), _Operations(trace):
        model(x)
    return {path: trace.calls.get(module, []) for path, module in model.named_modules()}


def _describe_layer(path: str, module: nn.Module, calls: list[Call], paths: int) -> Layer:
    first = calls[0] if calls else None
    return Layer(
        path=path,
        paths=paths,
        type=type(module).__name__,
        batch_norm=isinstance(module, _BatchNorm),
        channels=_count_channels(module),
        place=first.origin.place if first else "not reached",
        after=first.origin.by if first else "",
        calls=len(calls),
        values=math.prod(first.shape[_CHANNEL:]) if first else 0,
        tracks=isinstance(module, _NormBase) and module.running_mean is not None,
    )


def _count_channels(module: nn.Module) -> int:
    if isinstance(module, _NormBase):
        return module.num_features
    if isinstance(module, nn.GroupNorm):
        return module.num_channels
    shape = module.normalized_shape
    return math.prod(shape) if isinstance(shape, tuple) else 0


@dataclass(slots=True)
class _Trace:
    """The origin of each tensor, by the address of its memory."""

    origins: dict[int, Origin] = field(default_factory=dict)
    alive: list[Tensor] = field(default_factory=list)  # keeps addresses from being reused
    calls: dict[nn.Module, list[Call]] = field(default_factory=dict)

    def find(self, tensor: Tensor) -> Origin:
        return self.origins.get(_find_address(tensor), _INPUT)

    def note(self, tensor: Tensor, origin: Origin) -> None:
        self.origins[_find_address(tensor)] = origin
        self.alive.append(tensor)


def _find_address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _list_tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own
    """Records which operation produced each tensor."""

    def __init__(self, trace: _Trace) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own
        self.trace = trace

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Let torch not load its compiler, which takes seconds: nothing is compiled here."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        del types
        given = {_find_address(tensor) for tensor in _list_tensors((args, kwargs))}
        result = func(*args, **(kwargs or {}))
        origin = Origin(_OPERATIONS.get(func.overloadpacket, "other"), str(func.overloadpacket))
        for tensor in _list_tensors(result):
            if func._schema.is_mutable or _find_address(tensor) not in given:  # noqa: SLF001 (torch has no other way)
                self.trace.note(tensor, origin)
        return result


@contextmanager
def _install_hooks(model: nn.Module, trace: _Trace) -> Iterator[None]:
    entered: dict[nn.Module, list[Origin]] = {}

    def before(module: nn.Module, given: tuple[Any, ...]) -> None:
        for tensor in _list_tensors(given)[:1]:
            call = Call(trace.find(tensor), tuple(tensor.shape))
            trace.calls.setdefault(module, []).append(call)
            entered.setdefault(module, []).append(call.origin)

    def after(module: nn.Module, given: tuple[Any, ...], result: Any) -> None:
        del given
        start = entered[module].pop() if entered.get(module) else None
        place = next((p for types, p in _TYPES if isinstance(module, types)), None)
        for tensor in _list_tensors(result):
            if trace.find(tensor) is not start and (place or not list(module.children())):
                origin = Origin(place or trace.find(tensor).place, type(module).__name__)
                trace.note(tensor, origin)

    handles = [m.register_forward_pre_hook(before) for m in model.modules()]
    handles += [m.register_forward_hook(after) for m in model.modules()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
