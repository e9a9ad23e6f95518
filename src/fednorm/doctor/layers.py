"""The normalization layers of a model, found by type, and what its tensors are."""

import math

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from fednorm.core.layout import kinds
from fednorm.core.types import Kind
from fednorm.doctor.findings import Layer, State
from fednorm.doctor.places import Call, calls

_NORMS = (_NormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)
_CHANNEL = 2  # dimensions of [samples, channels]


def layers(model: nn.Module, x: Tensor) -> tuple[Layer, ...]:
    """Return the normalization layers, in the order of the model, and where they stand."""
    called = calls(model, x)
    everywhere = [m for _, m in model.named_modules(remove_duplicate=False)]
    return tuple(
        _layer(path, module, called[path], everywhere.count(module))
        for path, module in model.named_modules()
        if isinstance(module, _NORMS)
    )


def _layer(path: str, module: nn.Module, called: list[Call], paths: int) -> Layer:
    first = called[0] if called else None
    return Layer(
        path=path,
        paths=paths,
        type=type(module).__name__,
        batch_norm=isinstance(module, _BatchNorm),
        channels=_channels(module),
        place=first.made.place if first else "not reached",
        after=first.made.by if first else "",
        calls=len(called),
        values=math.prod(first.shape[_CHANNEL:]) if first else 0,
        tracks=isinstance(module, _NormBase) and module.running_mean is not None,
    )


def _channels(module: nn.Module) -> int:
    if isinstance(module, _NormBase):
        return module.num_features
    if isinstance(module, nn.GroupNorm):
        return module.num_channels
    shape = module.normalized_shape
    return math.prod(shape) if isinstance(shape, tuple) else 0


def state(model: nn.Module) -> State:
    """Return the size of a model's tensors, by kind; a tied tensor counts once."""
    kind_of = kinds(model)
    seen: set[int] = set()
    sizes = dict.fromkeys(Kind, 0)
    statistics = []
    for key, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) in seen:
            continue
        seen.add(id(tensor))
        sizes[kind_of[key]] += tensor.numel() * tensor.element_size()
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
