"""How much a model puts out."""

import torch
from torch import Tensor, nn


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
