"""ResNet-50, the larger backbone of FixBN's DeepLabv3+, as a classifier.

He, Zhang, Ren and Sun, "Deep Residual Learning for Image Recognition" (2016), arXiv:1512.03385,
Table 1, with the stride in the 3x3 convolution of a block, as in torchvision, whose state_dicts
load. 25 557 032 parameters for 1000 classes, 53 BatchNorm layers. The stems are those of resnet18.
"""

from dataclasses import dataclass

from torch import nn

from fednorm.core.registry import param
from fednorm.models.blocks import Bottleneck
from fednorm.models.residual import WIDTHS, classified, stages, stem
from fednorm.models.stems import HELP, Stem, check_stem, sized


@dataclass(frozen=True, slots=True)
class ResNet50:
    """ResNet-50 as in torchvision, with CIFAR's stem for small images."""

    stem: Stem = param("auto", HELP)

    def __post_init__(self) -> None:
        """Check the stem."""
        check_stem("resnet50", self.stem)

    def build(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        """Return the network for images of at least 8x8 pixels, or 32x32 with ImageNet's stem."""
        channels, small = sized("resnet50", shape, self.stem)
        return classified(trunk(channels, small=small), WIDTHS[-1] * Bottleneck.expansion, classes)


def trunk(channels: int, *, small: bool) -> dict[str, nn.Module]:
    """Return the layers before the classifier."""
    layers = stages(Bottleneck, WIDTHS, (3, 4, 6, 3), Bottleneck.expansion)
    return stem(channels, WIDTHS[0], small=small) | layers
