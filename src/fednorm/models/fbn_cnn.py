"""The network of FBN's experiments.

Guerraoui, Pinot, Rizk, Stephan and Taiani, "Overcoming the Challenges of Batch Normalization in
Federated Learning" (2024), arXiv:2405.14670, appendix C, Table 1: BatchNorm after the ReLU, 8192
features on CIFAR-10. The table ends in a log softmax and the paper trains with the negative log
likelihood; here the outputs are logits, for cross entropy, which is the same loss.
"""

from dataclasses import dataclass

from torch import nn

from fednorm.models.base import check_image_shape
from fednorm.registry import param


@dataclass(frozen=True, slots=True)
class FbnCnn:
    """FBN's CNN: four convolutions (64, 64, 128, 128), each with ReLU and BatchNorm, two linear."""

    dropout: float = param(0.25, "dropout rate after each pooling")

    def __post_init__(self) -> None:
        """Check the share."""
        if not 0 <= self.dropout < 1:
            raise ValueError(
                f"dropout of model 'fbn_cnn' must be from 0 to below 1, but is {self.dropout}."
            )

    def build(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        """Build the network for images of at least 4x4 pixels."""
        channels, height, width = check_image_shape("fbn_cnn", shape, least=4)
        return nn.Sequential(
            *_build_layer(channels, 64),
            *_build_layer(64, 64),
            nn.MaxPool2d(2, 2),
            nn.Dropout(self.dropout),
            *_build_layer(64, 128),
            *_build_layer(128, 128),
            nn.MaxPool2d(2, 2),
            nn.Dropout(self.dropout),
            nn.Flatten(),
            nn.Linear(128 * (height // 4) * (width // 4), 128),
            nn.ReLU(),
            nn.Linear(128, classes),
        )


def _build_layer(channels: int, width: int) -> list[nn.Module]:
    """Return a convolution, its ReLU and its BatchNorm, in the table's order."""
    conv = nn.Conv2d(channels, width, kernel_size=3, padding=1)
    return [conv, nn.ReLU(), nn.BatchNorm2d(width)]
