"""MobileNet-v2, the smaller backbone of FixBN's DeepLabv3+, as a classifier.

Sandler, Howard, Zhu, Zhmoginov and Chen, "MobileNetV2: Inverted Residuals and Linear Bottlenecks"
(2018), arXiv:1801.04381, Table 2, at width 1. 3 504 872 parameters for 1000 classes, 52 BatchNorm
layers. Modules are named and initialized as in torchvision, whose state_dicts load.

For small images, the stem "cifar" has stride 1 instead of 2 in the first convolution and in the
stage of 24 channels, as in kuangliu/pytorch-cifar. The image is then divided by 8 in
all, not by 32: 32x32 pixels are 4x4 at the end.
"""

from collections import OrderedDict
from dataclasses import dataclass

from torch import Tensor, nn

from fednorm.models.base import STEM_HELP, Stem, check_dropout, check_stem, choose_stem
from fednorm.models.blocks import add_norm, conv, initialize_he
from fednorm.registry import param

# Expansion of a block, its output channels, blocks in the stage, stride of the first.
STAGES = (
    *((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2)),
    *((6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1)),
)
LAST = 1280


class InvertedResidual(nn.Module):
    """A block that widens, convolves each channel, and narrows; plus its input if shapes agree."""

    def __init__(self, channels: int, width: int, stride: int, expansion: int) -> None:
        super().__init__()
        wide = channels * expansion
        widen = [add_norm(conv(channels, wide, 1), nn.ReLU6())] if expansion > 1 else []
        each = nn.Conv2d(wide, wide, 3, stride, padding=1, groups=wide, bias=False)
        narrow = add_norm(conv(wide, width, 1))
        self.conv = nn.Sequential(*widen, add_norm(each, nn.ReLU6()), *narrow)
        self.adds = stride == 1 and channels == width

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output."""
        out: Tensor = self.conv(x)
        return x + out if self.adds else out


@dataclass(frozen=True, slots=True)
class MobileNetV2:
    """MobileNet-v2 as in torchvision, with fewer strides for small images."""

    dropout: float = param(0.2, "dropout rate before the classifier")
    stem: Stem = param("auto", STEM_HELP)

    def __post_init__(self) -> None:
        check_stem("mobilenet_v2", self.stem)
        check_dropout("mobilenet_v2", self.dropout)

    def build(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        """Build the network for images of at least 8x8 pixels, or 32x32 with ImageNet's stem."""
        channels, small = choose_stem("mobilenet_v2", shape, self.stem)
        linear = nn.Linear(LAST, classes)
        parts: dict[str, nn.Module] = {
            "features": build_mobilenet_features(channels, small=small),
            "pool": nn.AdaptiveAvgPool2d(1),
            "flatten": nn.Flatten(),
            "classifier": nn.Sequential(nn.Dropout(self.dropout), linear),
        }
        model = nn.Sequential(OrderedDict(parts))
        initialize_he(model)
        nn.init.normal_(linear.weight, std=0.01)
        nn.init.zeros_(linear.bias)
        return model


def build_mobilenet_features(channels: int, *, small: bool) -> nn.Sequential:
    """Build the layers before the classifier: a convolution, 17 blocks, a convolution."""
    width = 32
    layers: list[nn.Module] = [add_norm(conv(channels, width, 3, 1 if small else 2), nn.ReLU6())]
    for number, (expansion, following, depth, stride) in enumerate(STAGES):
        step = 1 if small and number == 1 else stride
        for place in range(depth):
            layers.append(InvertedResidual(width, following, 1 if place else step, expansion))
            width = following
    return nn.Sequential(*layers, add_norm(conv(width, LAST, 1), nn.ReLU6()))
