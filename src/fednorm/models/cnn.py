"""A small convolutional network with BatchNorm, quick enough for 8x8 digits on a CPU."""

from dataclasses import dataclass

from torch import nn

from fednorm.core.registry import param
from fednorm.models.base import image_shape


@dataclass(frozen=True, slots=True)
class Cnn:
    """Two blocks of convolution, BatchNorm, ReLU and pooling, then a linear classifier."""

    width: int = param(16, "channels of the first convolution; the second has twice as many")

    def __post_init__(self) -> None:
        """Check the width."""
        if self.width < 1:
            raise ValueError(f"width of model 'cnn' must be at least 1, but is {self.width}.")

    def build(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        """Return the network for images of at least 4x4 pixels."""
        channels, height, width = image_shape("cnn", shape, least=4)
        return nn.Sequential(
            *block(channels, self.width),
            *block(self.width, 2 * self.width),
            nn.Flatten(),
            nn.Linear(2 * self.width * (height // 4) * (width // 4), classes),
        )


def block(channels: int, width: int) -> list[nn.Module]:
    """Return the layers of one block, which halves height and width."""
    conv = nn.Conv2d(channels, width, kernel_size=3, padding=1)
    return [conv, nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(2)]
