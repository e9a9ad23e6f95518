"""ResNet-18, which FixBN trains on Tiny-ImageNet and ImageNet.

He, Zhang, Ren and Sun, "Deep Residual Learning for Image Recognition" (2016), arXiv:1512.03385,
Table 1; used by Zhong et al. (FixBN, arXiv:2303.06530). 11 689 512 parameters for 1000 classes, 20
BatchNorm layers. Modules are named as in torchvision, whose state_dicts load.

Small images would be 1 pixel before the end, so they get the usual stem of CIFAR: a convolution of
3x3 with stride 1 and no pooling, instead of 7x7 with stride 2 and max pooling. The image is then
divided by 8 in all, not by 32. FixBN does not say which stem it has for Tiny-ImageNet (64x64).
"""

from dataclasses import dataclass

from torch import nn

from fednorm.core.registry import param
from fednorm.models.blocks import Block
from fednorm.models.residual import WIDTHS, classified, stages, stem
from fednorm.models.stems import HELP, Stem, check_stem, sized


@dataclass(frozen=True, slots=True)
class ResNet18:
    """ResNet-18 as in torchvision, with CIFAR's stem for small images."""

    stem: Stem = param("auto", HELP)

    def __post_init__(self) -> None:
        """Check the stem."""
        check_stem("resnet18", self.stem)

    def build(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        """Return the network for images of at least 8x8 pixels, or 32x32 with ImageNet's stem."""
        channels, small = sized("resnet18", shape, self.stem)
        layers = stem(channels, WIDTHS[0], small=small) | stages(Block, WIDTHS, (2, 2, 2, 2))
        return classified(layers, WIDTHS[-1], classes)
