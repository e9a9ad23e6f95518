"""A small residual network, after He et al., "Deep Residual Learning" (2016), arXiv:1512.03385.

BatchNorm sits inside nested blocks and in the downsample path, where its name (`downsample.1`) does
not tell what it is: code that looks for layers by name gets this network wrong.
"""

from collections import OrderedDict
from dataclasses import dataclass

from torch import Tensor, nn

from fednorm.core.registry import param
from fednorm.models.base import image_shape, positive_widths


class Block(nn.Module):
    """Convolution, BatchNorm, ReLU, convolution, BatchNorm, plus the input, then ReLU."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU()
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.downsample: nn.Module = nn.Identity()
        if stride != 1 or channels != width:
            conv = nn.Conv2d(channels, width, 1, stride=stride, bias=False)
            self.downsample = nn.Sequential(conv, nn.BatchNorm2d(width))

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output."""
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        added: Tensor = self.relu(out + self.downsample(x))
        return added


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
