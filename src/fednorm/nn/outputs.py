"""How many values pass through a model."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.hooks import RemovableHandle


def values(model: nn.Module, x: Tensor) -> int:
    """Return how many values the layers of a model put out for a batch.

    >>> values(nn.Sequential(nn.Linear(3, 5), nn.ReLU()), torch.zeros(2, 3))
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


@contextmanager
def single_values(model: nn.Module) -> Iterator[list[str]]:
    """Note the BatchNorm layers that are given one value per channel while they train.

    >>> model = nn.Sequential(nn.BatchNorm1d(3, affine=False))
    >>> with single_values(model) as noted:
    ...     _ = model(torch.ones(1, 3, 2))
    >>> noted
    []
    """
    noted: list[str] = []

    def note(path: str, layer: nn.Module, x: Tensor) -> None:
        if layer.training and x.numel() == x.shape[1]:
            noted.append(path)

    def watch(path: str, layer: nn.Module) -> RemovableHandle:
        return layer.register_forward_pre_hook(lambda layer, given: note(path, layer, given[0]))

    layers = [(path, m) for path, m in model.named_modules() if isinstance(m, _BatchNorm)]
    handles = [watch(path, layer) for path, layer in layers]
    try:
        yield noted
    finally:
        for handle in handles:
            handle.remove()
