"""Stack several clients in one wide model: one set of tensor operations for all of them.

Every activation is `[batch, clients × channels, ...]`, the channels of a client next to each other.
Layers that act on each channel by itself (BatchNorm, pooling, ReLU) need only more channels, a
convolution needs more groups, GroupNorm as well; a linear layer becomes a batched product. Whatever
else a model does with its channels shows when a wide model is compared with single ones.
`count_activations` tells how large a model's step is, and so how many clients to stack.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from fednorm.nn.aligned_norm import Placement
from fednorm.nn.batch_norm import FedBatchNorm1d, FedBatchNorm2d, FedBatchNorm3d
from fednorm.nn.convert import SampleNorm
from fednorm.nn.copies import copy_model, list_hooks
from fednorm.nn.dual_norm import BackwardMeans
from fednorm.nn.hybrid_norm import Mixing
from fednorm.nn.weight_std import StandardizedConv1d, StandardizedConv2d, StandardizedConv3d

_CONVOLUTION = ("in_channels", "out_channels", "groups")
_BATCH_NORM = ("num_features",)
_GROUP_NORM = ("num_groups", "num_channels")
_MAX_POOLS = (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d)

# The layers that can be widened, and which of their numbers grow with the clients.
_COUNTS: Mapping[type[nn.Module], tuple[str, ...]] = {
    nn.Linear: ("out_features",),
    nn.Conv1d: _CONVOLUTION,
    nn.Conv2d: _CONVOLUTION,
    nn.Conv3d: _CONVOLUTION,
    StandardizedConv1d: _CONVOLUTION,
    StandardizedConv2d: _CONVOLUTION,
    StandardizedConv3d: _CONVOLUTION,
    FedBatchNorm1d: _BATCH_NORM,
    FedBatchNorm2d: _BATCH_NORM,
    FedBatchNorm3d: _BATCH_NORM,
    nn.GroupNorm: _GROUP_NORM,
    SampleNorm: _GROUP_NORM,
    BackwardMeans: (),
    Mixing: (),
    Placement: (),
}


class WideLinear(nn.Linear):
    """The linear layers of several clients, their weights below each other."""

    clients = 1

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 (torch's own name)
        """Multiply each client's features by its own weights."""
        if input.dim() != 2:  # noqa: PLR2004
            raise ValueError(f"a wide linear layer needs [batch, features], not {input.shape}.")
        x = input.view(len(input), self.clients, self.in_features).transpose(0, 1)
        weight = self.weight.view(self.clients, -1, self.in_features).transpose(1, 2)
        if self.bias is None:
            y = torch.bmm(x, weight)
        else:
            y = torch.baddbmm(self.bias.view(self.clients, 1, -1), x, weight)
        return y.transpose(0, 1).reshape(len(input), -1)


def repeat_for_clients(tensor: Tensor, count: int, axis: int = 0) -> Tensor:
    """Repeat the tensor of one client for `count` that agree; a single number stays single."""
    return torch.cat([tensor] * count, axis) if tensor.dim() else tensor.clone()


def widen(model: nn.Module, count: int) -> nn.Module:
    """Return a model for `count` clients that start with the same weights.

    Raises ValueError for a model with a layer that cannot be widened.

    >>> widen(nn.Sequential(nn.Conv2d(3, 8, 5), nn.ReLU()), 4)[0].weight.shape
    torch.Size([32, 3, 5, 5])
    """
    wide = copy_model(model)
    for path, layer in list(wide.named_modules()):
        if _list_tensors(layer):
            _widen_layer(path, layer, count)
    for layer in wide.modules():
        if type(layer) is nn.Sequential:
            _pool_first(layer)
    return wide


def _pool_first(layers: nn.Sequential) -> None:
    """Swap ReLU and the max-pooling behind it, so that ReLU sees a quarter of the values.

    Maximum and ReLU commute, in values and in gradients: where a window's maximum is not positive,
    no gradient passes either way.
    """
    for i in range(len(layers) - 1):
        first, second = layers[i], layers[i + 1]
        pools = type(second) in _MAX_POOLS and not second.return_indices
        hooked = any([*list_hooks(first).values(), *list_hooks(second).values()])
        if type(first) is nn.ReLU and pools and not hooked:
            layers[i], layers[i + 1] = second, first


def _list_tensors(layer: nn.Module) -> list[tuple[str, Tensor]]:
    return [*layer.named_parameters(recurse=False), *layer.named_buffers(recurse=False)]


def _widen_layer(path: str, layer: nn.Module, count: int) -> None:
    if type(layer) not in _COUNTS:
        raise ValueError(f"layer {path!r} ({type(layer).__name__}) cannot hold several clients.")
    for name in _COUNTS[type(layer)]:
        setattr(layer, name, count * getattr(layer, name))
    axis = -1 if isinstance(layer, BackwardMeans) else 0
    for name, tensor in _list_tensors(layer):
        wide = repeat_for_clients(tensor.detach(), count, axis)
        learns = isinstance(tensor, nn.Parameter)
        setattr(layer, name, nn.Parameter(wide, tensor.requires_grad) if learns else wide)
    if isinstance(layer, nn.Linear):
        layer.__class__ = WideLinear
        layer.clients = count  # type: ignore[assignment]


def count_activations(model: nn.Module, x: Tensor) -> int:
    """Return how many values the layers of a model put out for a batch, the activations.

    >>> count_activations(nn.Sequential(nn.Linear(3, 5), nn.ReLU()), torch.zeros(2, 3))
    20
    """
    count = 0

    def add(_module: nn.Module, _input: object, output: object) -> None:
        nonlocal count
        count += output.numel() if isinstance(output, Tensor) else 0

    leaves = [m for m in model.modules() if not any(True for _ in m.children())]
    handles = [leaf.register_forward_hook(add) for leaf in leaves]
    modes = {module: module.training for module in model.modules()}
    try:
        with torch.no_grad():
            model.eval()(x)
    finally:
        for module, training in modes.items():
            module.training = training
        for handle in handles:
            handle.remove()
    return count
