"""LeNet-5 with BatchNorm, for FixBN's "LeNet-like CNN", which its paper does not specify.

LeCun, Bottou, Bengio and Haffner, "Gradient-Based Learning Applied to Document Recognition" (1998),
doi:10.1109/5.726791. Zhong, Chen and Chao, "Making Batch Normalization Great in Federated Deep
Learning" (2023), arXiv:2303.06530, train their network on CIFAR-10.

Two convolutions of 5x5 without padding (6 and 16 channels), each followed by BatchNorm, ReLU and
max pooling by 2; then linear layers of 120 and 84 with ReLU, and the classifier. On 32x32 pixels
the first linear layer has 16x5x5 inputs. Unlike in 1998 there are ReLUs instead of tangents, max
pooling instead of a learned average, convolutions over all channels, and logits instead of radial
basis functions. The convolutions keep their bias, which remains if a strategy removes BatchNorm.
"""

from dataclasses import dataclass

from torch import nn

from fednorm.models.base import check_image_shape


@dataclass(frozen=True, slots=True)
class LeNet:
    """LeNet-5 with ReLU, max pooling, and BatchNorm after both convolutions."""

    def build(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        """Build the network for images of at least 16x16 pixels."""
        channels, height, width = check_image_shape("lenet", shape, least=16)
        return nn.Sequential(
            *_build_layer(channels, 6),
            *_build_layer(6, 16),
            nn.Flatten(),
            nn.Linear(16 * _count_pixels(height) * _count_pixels(width), 120),
            nn.ReLU(),
            nn.Linear(120, 84),
            nn.ReLU(),
            nn.Linear(84, classes),
        )


def _build_layer(channels: int, width: int) -> list[nn.Module]:
    """Return a convolution, its BatchNorm, its ReLU and its pooling."""
    conv = nn.Conv2d(channels, width, kernel_size=5)
    return [conv, nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(2)]


def _count_pixels(pixels: int) -> int:
    """Return the side of the image after both layers.

    >>> _count_pixels(32), _count_pixels(16)
    (5, 1)
    """
    return ((pixels - 4) // 2 - 4) // 2
