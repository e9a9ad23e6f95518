"""Residual networks: ResNet-18, -20 and -50, and a small one for tests and demonstrations.

He, Zhang, Ren and Sun, "Deep Residual Learning for Image Recognition" (2016), arXiv:1512.03385.
"""

from collections import OrderedDict
from dataclasses import dataclass
from functools import partial

from torch import Tensor, nn
from torch.nn import functional

from fednorm.models.base import (
    STEM_HELP,
    BasicBlock,
    Bottleneck,
    Stem,
    add_classifier,
    build_stages,
    build_stem,
    check_image_shape,
    check_stem,
    check_widths,
    choose_stem,
)
from fednorm.registry import param

IMAGENET_WIDTHS = (64, 128, 256, 512)
CIFAR_WIDTHS = (16, 32, 64)


@dataclass(frozen=True, slots=True)
class ResNet:
    """A stem, one residual block per width, global average pooling, and a linear classifier.

    A small residual network, after He et al., "Deep Residual Learning" (2016), arXiv:1512.03385.

    BatchNorm sits inside nested blocks and in the downsample path, where its name (`downsample.1`)
    does not say what it is: code that finds layers by name gets this network wrong.
    """

    widths: tuple[int, ...] = param(
        (16, 32), "channels of each block; each after the first halves the image"
    )

    def __post_init__(self) -> None:
        """Check the widths; a configuration file gives them as a list."""
        widths = check_widths("widths of model 'resnet'", self.widths)
        if not widths:
            raise ValueError("widths of model 'resnet' must name at least one block, but is empty.")
        object.__setattr__(self, "widths", widths)

    def build(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        """Build the network for images of any size."""
        channels, _, _ = check_image_shape("resnet", shape)
        first = self.widths[0]
        stem = nn.Conv2d(channels, first, 3, padding=1, bias=False)
        before = (first, *self.widths[:-1])
        blocks = [
            BasicBlock(incoming, width, stride=1 if number == 0 else 2)
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


class PaddedShortcut(nn.Module):
    """A shortcut without parameters: strided pixels, and zeros for new channels."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.missing = width - channels
        self.stride = stride

    def forward(self, x: Tensor) -> Tensor:
        """Return the input in the shape of the block's output."""
        kept = x[:, :, :: self.stride, :: self.stride]
        return functional.pad(kept, (0, 0, 0, 0, 0, self.missing))


@dataclass(frozen=True, slots=True)
class ResNet20:
    """CIFAR's ResNet-20: widths 16, 32, 64, three blocks each, shortcuts without parameters.

    The network of the experiments of FixBN and FedTAN on CIFAR-10.

    He, Zhang, Ren and Sun, "Deep Residual Learning for Image Recognition" (2016), arXiv:1512.03385,
    section 4.2: a convolution of 3x3, three stages of three blocks (16, 32 and 64 channels), global
    average pooling, a linear classifier. 269 722 parameters for 3 channels and 10 classes; 19
    BatchNorm layers. Used by Zhong et al. (FixBN, arXiv:2303.06530) and Wang et al. (FedTAN,
    arXiv:2301.02982).

    Shortcuts are option A: every second pixel of the input, and zeros for the missing channels. The
    paper does not say where the zeros go; as in its authors' Torch code (fb.resnet.torch) they
    follow the input's channels.
    """

    def build(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        """Build the network for images of at least 4x4 pixels."""
        channels, _, _ = check_image_shape("resnet20", shape, least=4)
        block = partial(BasicBlock, shortcut=PaddedShortcut)
        stem = build_stem(channels, CIFAR_WIDTHS[0], small=True)
        stages = build_stages(block, CIFAR_WIDTHS, depths=(3, 3, 3))
        return add_classifier(stem | stages, CIFAR_WIDTHS[-1], classes)


@dataclass(frozen=True, slots=True)
class ResNet18:
    """ResNet-18 as in torchvision, with CIFAR's stem for small images.

    FixBN trains it on Tiny-ImageNet and ImageNet.

    He, Zhang, Ren and Sun, "Deep Residual Learning for Image Recognition" (2016), arXiv:1512.03385,
    Table 1; used by Zhong et al. (FixBN, arXiv:2303.06530). 11 689 512 parameters for 1000 classes,
    20 BatchNorm layers. Modules are named as in torchvision, whose state_dicts load.

    Small images would be 1 pixel before the end, so they get the usual stem of CIFAR: a convolution
    of 3x3 with stride 1 and no pooling, instead of 7x7 with stride 2 and max pooling. The image is
    then divided by 8 in all, not by 32. FixBN does not say which stem it has for Tiny-ImageNet
    (64x64).
    """

    stem: Stem = param("auto", STEM_HELP)

    def __post_init__(self) -> None:
        check_stem("resnet18", self.stem)

    def build(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        """Build the network for images of at least 8x8 pixels, or 32x32 with ImageNet's stem."""
        channels, small = choose_stem("resnet18", shape, self.stem)
        stem = build_stem(channels, IMAGENET_WIDTHS[0], small=small)
        stages = build_stages(BasicBlock, IMAGENET_WIDTHS, depths=(2, 2, 2, 2))
        return add_classifier(stem | stages, IMAGENET_WIDTHS[-1], classes)


@dataclass(frozen=True, slots=True)
class ResNet50:
    """ResNet-50 as in torchvision, with CIFAR's stem for small images.

    The larger backbone of FixBN's DeepLabv3+, as a classifier.

    He, Zhang, Ren and Sun, "Deep Residual Learning for Image Recognition" (2016), arXiv:1512.03385,
    Table 1, with the stride in the 3x3 convolution of a block, as in torchvision, whose state_dicts
    load. 25 557 032 parameters for 1000 classes, 53 BatchNorm layers. The stems are those of
    resnet18.
    """

    stem: Stem = param("auto", STEM_HELP)

    def __post_init__(self) -> None:
        check_stem("resnet50", self.stem)

    def build(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        """Build the network for images of at least 8x8 pixels, or 32x32 with ImageNet's stem."""
        channels, small = choose_stem("resnet50", shape, self.stem)
        features = IMAGENET_WIDTHS[-1] * Bottleneck.expansion
        return add_classifier(build_resnet50_trunk(channels, small=small), features, classes)


def build_resnet50_trunk(channels: int, *, small: bool) -> dict[str, nn.Module]:
    """Build the layers of ResNet-50 before its classifier."""
    # Build the stages first: the order decides which random numbers each layer draws.
    stages = build_stages(Bottleneck, IMAGENET_WIDTHS, (3, 4, 6, 3), Bottleneck.expansion)
    return build_stem(channels, IMAGENET_WIDTHS[0], small=small) | stages
