"""A multilayer perceptron with BatchNorm: for points and for small images."""

import math
from dataclasses import dataclass

from torch import nn

from fednorm.core.registry import param
from fednorm.models.base import positive_widths


@dataclass(frozen=True, slots=True)
class Mlp:
    """Linear, ReLU and BatchNorm for each hidden width, then a linear classifier."""

    hidden: tuple[int, ...] = param((128, 64), "width of each hidden layer")

    def __post_init__(self) -> None:
        """Check the widths; a configuration file gives them as a list."""
        widths = positive_widths("hidden of model 'mlp'", self.hidden)
        object.__setattr__(self, "hidden", widths)

    def build(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        """Return the network for flattened samples."""
        layers: list[nn.Module] = [nn.Flatten()]
        width = math.prod(shape)
        for following in self.hidden:
            layers += [nn.Linear(width, following), nn.ReLU(), nn.BatchNorm1d(following)]
            width = following
        return nn.Sequential(*layers, nn.Linear(width, classes))
