"""The network of Unbitrium's tutorial 091 ("FL Batch Normalization", class NormalizedCNN).

With BatchNorm, and its modules named as there. Height and width may differ and be any from 4 on.
"""

from dataclasses import dataclass

from torch import Tensor, nn

from fednorm.core.registry import param
from fednorm.models.base import image_shape


class NormalizedCNN(nn.Module):
    """Two blocks of convolution, BatchNorm, ReLU and pooling, then a linear classifier."""

    def __init__(self, shape: tuple[int, int, int], hidden: int, classes: int) -> None:
        super().__init__()
        channels, height, width = shape
        self.conv1 = nn.Conv2d(channels, hidden, kernel_size=3, padding=1)
        self.norm1 = nn.BatchNorm2d(hidden)
        self.conv2 = nn.Conv2d(hidden, 2 * hidden, kernel_size=3, padding=1)
        self.norm2 = nn.BatchNorm2d(2 * hidden)
        self.fc = nn.Linear(2 * hidden * (height // 4) * (width // 4), classes)
        self.pool = nn.MaxPool2d(2)
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of a batch of images."""
        x = self.pool(self.relu(self.norm1(self.conv1(x))))
        x = self.pool(self.relu(self.norm2(self.conv2(x))))
        logits: Tensor = self.fc(x.flatten(1))
        return logits


@dataclass(frozen=True, slots=True)
class TutorialCnn:
    """The tutorial's network: 32 and 64 channels, each with BatchNorm, ReLU and pooling."""

    hidden_channels: int = param(32, "channels of the first convolution; the second has twice")

    def __post_init__(self) -> None:
        """Check the width."""
        if self.hidden_channels < 1:
            raise ValueError(
                "hidden_channels of model 'tutorial_cnn' must be at least 1, but is "
                f"{self.hidden_channels}."
            )

    def build(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        """Return the network for images of at least 4x4 pixels."""
        image = image_shape("tutorial_cnn", shape, least=4)
        return NormalizedCNN(image, self.hidden_channels, classes)
