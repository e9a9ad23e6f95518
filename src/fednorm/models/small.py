"""Networks without shortcuts: a perceptron and four small convolutional ones."""

import math
from dataclasses import dataclass

from torch import Tensor, nn

from fednorm.models.base import check_dropout, check_image_shape, check_widths
from fednorm.registry import param


@dataclass(frozen=True, slots=True)
class Mlp:
    """Linear, ReLU and BatchNorm for each hidden width, then a linear classifier.

    A multilayer perceptron with BatchNorm: for points and for small images.
    """

    hidden: tuple[int, ...] = param((128, 64), "width of each hidden layer")

    def __post_init__(self) -> None:
        """Check the widths; a configuration file gives them as a list."""
        widths = check_widths("hidden of model 'mlp'", self.hidden)
        object.__setattr__(self, "hidden", widths)

    def build(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        """Build the network for flattened samples."""
        layers: list[nn.Module] = [nn.Flatten()]
        width = math.prod(shape)
        for following in self.hidden:
            layers += [nn.Linear(width, following), nn.ReLU(), nn.BatchNorm1d(following)]
            width = following
        return nn.Sequential(*layers, nn.Linear(width, classes))


@dataclass(frozen=True, slots=True)
class Cnn:
    """Two blocks of convolution, BatchNorm, ReLU and pooling, then a linear classifier.

    A small convolutional network with BatchNorm, fast enough for 8x8 digits on a CPU.
    """

    width: int = param(16, "channels of the first convolution; the second has twice as many")

    def __post_init__(self) -> None:
        if self.width < 1:
            raise ValueError(f"width of model 'cnn' must be at least 1, but is {self.width}.")

    def build(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        """Build the network for images of at least 4x4 pixels."""
        channels, height, width = check_image_shape("cnn", shape, least=4)
        return nn.Sequential(
            *_build_block(channels, self.width),
            *_build_block(self.width, 2 * self.width),
            nn.Flatten(),
            nn.Linear(2 * self.width * (height // 4) * (width // 4), classes),
        )


def _build_block(
    channels: int, width: int, kernel_size: int = 3, padding: int = 1
) -> list[nn.Module]:
    """Return the layers of one block, which halves height and width."""
    conv = nn.Conv2d(channels, width, kernel_size, padding=padding)
    return [conv, nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(2)]


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
    """The tutorial's network: 32 and 64 channels, each with BatchNorm, ReLU and pooling.

    The network of Unbitrium's tutorial 091 ("FL Batch Normalization", class NormalizedCNN) with
    BatchNorm, and its modules have the same names. Height and width may differ, from 4 on.
    """

    hidden_channels: int = param(32, "channels of the first convolution; the second has twice")

    def __post_init__(self) -> None:
        if self.hidden_channels < 1:
            raise ValueError(
                "hidden_channels of model 'tutorial_cnn' must be at least 1, but is "
                f"{self.hidden_channels}."
            )

    def build(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        """Build the network for images of at least 4x4 pixels."""
        image = check_image_shape("tutorial_cnn", shape, least=4)
        return NormalizedCNN(image, self.hidden_channels, classes)


@dataclass(frozen=True, slots=True)
class LeNet:
    """LeNet-5 with ReLU, max pooling, and BatchNorm after both convolutions.

    Used for FixBN's "LeNet-like CNN", which its paper does not specify.

    LeCun, Bottou, Bengio and Haffner, "Gradient-Based Learning Applied to Document Recognition"
    (1998), doi:10.1109/5.726791. Zhong, Chen and Chao, "Making Batch Normalization Great in
    Federated Deep Learning" (2023), arXiv:2303.06530, train their network on CIFAR-10.

    Two convolutions of 5x5 without padding (6 and 16 channels), each followed by BatchNorm, ReLU
    and max pooling by 2; then linear layers of 120 and 84 with ReLU, and the classifier. On 32x32
    pixels the first linear layer has 16x5x5 inputs. Unlike in 1998 there are ReLUs instead of
    tangents, max pooling instead of a learned average, convolutions over all channels, and logits
    instead of radial basis functions. The convolutions keep their bias, which remains if a strategy
    removes BatchNorm.
    """

    def build(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        """Build the network for images of at least 16x16 pixels."""
        channels, *sides = check_image_shape("lenet", shape, least=16)
        height, width = (((side - 4) // 2 - 4) // 2 for side in sides)  # after both blocks
        return nn.Sequential(
            *_build_block(channels, 6, kernel_size=5, padding=0),
            *_build_block(6, 16, kernel_size=5, padding=0),
            nn.Flatten(),
            nn.Linear(16 * height * width, 120),
            nn.ReLU(),
            nn.Linear(120, 84),
            nn.ReLU(),
            nn.Linear(84, classes),
        )


@dataclass(frozen=True, slots=True)
class FbnCnn:
    """FBN's CNN: four convolutions (64, 64, 128, 128), each with ReLU and BatchNorm, two linear.

    Guerraoui, Pinot, Rizk, Stephan and Taiani, "Overcoming the Challenges of Batch Normalization in
    Federated Learning" (2024), arXiv:2405.14670, appendix C, Table 1: BatchNorm after the ReLU,
    8192 features on CIFAR-10. The table ends in a log softmax and the paper trains with the
    negative log likelihood; here the outputs are logits, for cross entropy, which is the same loss.
    """

    dropout: float = param(0.25, "dropout rate after each pooling")

    def __post_init__(self) -> None:
        check_dropout("fbn_cnn", self.dropout)

    def build(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        """Build the network for images of at least 4x4 pixels."""
        channels, height, width = check_image_shape("fbn_cnn", shape, least=4)
        return nn.Sequential(
            *_build_layer(channels, 64),
            *_build_layer(64, 64),
            *(nn.MaxPool2d(2, 2), nn.Dropout(self.dropout)),
            *_build_layer(64, 128),
            *_build_layer(128, 128),
            *(nn.MaxPool2d(2, 2), nn.Dropout(self.dropout)),
            nn.Flatten(),
            nn.Linear(128 * (height // 4) * (width // 4), 128),
            nn.ReLU(),
            nn.Linear(128, classes),
        )


def _build_layer(channels: int, width: int) -> list[nn.Module]:
    """Return a convolution, its ReLU and its BatchNorm, in the table's order."""
    conv = nn.Conv2d(channels, width, kernel_size=3, padding=1)
    return [conv, nn.ReLU(), nn.BatchNorm2d(width)]
