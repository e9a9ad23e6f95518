"""The role of every tensor of a model, decided by the type of the module that owns it.

Never by a name: torchvision's ResNet-18 has 20 BatchNorm layers, and three of them have no "bn" in
their path.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from fednorm.core.layer import NormLayer
from fednorm.core.types import Kind, Role

NORM_LAYERS = (_NormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)


@dataclass(frozen=True, slots=True)
class Layout:
    """The live tensors of a model, by what happens to them in a round."""

    roles: Mapping[str, Role]  # of every entry of the state_dict
    shared: Mapping[str, nn.Parameter]
    personal_parameters: Mapping[str, nn.Parameter]
    personal: Mapping[str, Tensor]  # parameters and buffers
    buffers: Mapping[str, Tensor]  # shared, outside normalization layers
    norms: Mapping[str, NormLayer]
    sharing: Mapping[str, NormLayer]  # those of them whose statistics are shared
    affine: tuple[nn.Parameter, ...]  # of BatchNorm layers


def _list_owned(model: nn.Module) -> Iterator[tuple[str, nn.Module, Tensor]]:
    """Yield every entry of the state_dict with the module that owns it."""
    saved = model.state_dict(keep_vars=True)
    for path, module in model.named_modules(remove_duplicate=False):
        own = dict(module.named_parameters(recurse=False))
        own.update(module.named_buffers(recurse=False))
        for name, tensor in own.items():
            key = f"{path}.{name}" if path else name
            if key in saved:  # buffers may be marked as not persistent
                yield key, module, tensor


def find_kind(module: nn.Module, tensor: Tensor) -> Kind:
    """Return what a tensor is, from the module that owns it."""
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return Kind.COUNTER
    if not isinstance(module, NORM_LAYERS):
        return Kind.WEIGHT
    return Kind.AFFINE if isinstance(tensor, nn.Parameter) else Kind.STATISTIC


def find_kinds(model: nn.Module) -> dict[str, Kind]:
    """Return what every entry of a model's state_dict is.

    >>> [kind.value for kind in find_kinds(nn.BatchNorm1d(3)).values()]
    ['affine', 'affine', 'statistic', 'statistic', 'counter']
    """
    return {key: find_kind(module, tensor) for key, module, tensor in _list_owned(model)}


RoleOf: TypeAlias = Callable[[nn.Module, Kind], Role]


def find_roles(model: nn.Module, role: RoleOf) -> dict[str, Role]:
    """Return the role of every entry of a model's state_dict."""
    return {
        key: role(module, find_kind(module, tensor)) for key, module, tensor in _list_owned(model)
    }


def find_layout(model: nn.Module, role: RoleOf) -> Layout:
    """Sort the tensors of a converted model by role; a tied tensor appears once."""
    _refuse_foreign_statistics(model)
    by_role = find_roles(model, role)
    parameters = dict(model.named_parameters())
    buffers = {name: b for name, b in model.named_buffers() if name in by_role}
    personal = {n: p for n, p in parameters.items() if by_role[n] is Role.PERSONAL}
    norms = {path: m for path, m in model.named_modules() if isinstance(m, NormLayer)}
    tracking = {path: m for path, m in norms.items() if m.read_running() is not None}
    return Layout(
        roles=by_role,
        shared={n: p for n, p in parameters.items() if by_role[n] is Role.SHARED},
        personal_parameters=personal,
        personal=personal | {n: b for n, b in buffers.items() if by_role[n] is Role.PERSONAL},
        buffers={n: b for n, b in buffers.items() if by_role[n] is Role.SHARED},
        norms=norms,
        sharing={
            path: m for path, m in tracking.items() if role(m, Kind.STATISTIC) is Role.STATISTIC
        },
        affine=tuple(p for m in norms.values() for p in m.parameters(recurse=False)),
    )


def _refuse_foreign_statistics(model: nn.Module) -> None:
    for path, module in model.named_modules():
        # InstanceNorm's statistics are buffers: averaged like others, or a client's in fedbn.
        foreign = isinstance(module, _BatchNorm) and not isinstance(module, NormLayer)
        if foreign and module.running_mean is not None:
            raise ValueError(
                f"layer {path!r} ({type(module).__name__}) tracks running statistics that no "
                "strategy shares; convert the model with a strategy, or build the layer with "
                "track_running_stats=False."
            )
