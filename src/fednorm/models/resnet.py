"""A small residual network, after He et al., "Deep Residual Learning" (2016), arXiv:1512.03385.

BatchNorm sits inside nested blocks and in the downsample path, where its name (`downsample.1`) does
not tell what it is: code that looks for layers by name gets this network wrong.
"""

from collections import OrderedDict
from dataclasses import dataclass

from torch import nn

from fednorm.core.registry import param
from fednorm.models.base import image_shape, positive_widths
from fednorm.models.blocks import Block


@dataclass(frozen=True, slots=True)
class ResNet:
    """A stem, one residual block per width, global average pooling, and a linear classifier."""

    widths: tuple[int, ...] = param(
        (16, 32), "channels of each block; each after the first halves the image"
    )

    def __post_init__(self) -> None:
        """Check the widths; a configuration file gives them as a list."""
        widths = positive_widths("widths of model 'resnet'", self.widths)
        if not widths:
            raise ValueError("widths of model 'resnet' must name at least one block, but is empty.")
        object.__setattr__(self, "widths", widths)

    def build(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        """Return the network for images of any size."""
        channels, _, _ = image_shape("resnet", shape)
        first = self.widths[0]
        stem = nn.Conv2d(channels, first, 3, padding=1, bias=False)
        before = (first, *self.widths[:-1])
        blocks = [
            Block(incoming, width, stride=1 if number == 0 else 2)
            for number, (incoming, width) in enumerate(zip(before, self.widths, strict=True))
        ]
        parts: dict[str, nn.Module] = {
            "stem": nn.Sequential(stem, nn.BatchNorm2d(first), nn.ReLU()),
            "blocks": nn.Sequential(*blocks),
            "pool": nn.AdaptiveAvgPool2d(1),
            "flatten": nn.Flatten(),
            "classifier": nn.Linear(self.widths[-1], classes),
        }
        return nn.Sequential(OrderedDict(parts))
