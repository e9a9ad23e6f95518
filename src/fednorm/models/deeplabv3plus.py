"""DeepLabv3+, a network for segmentation, and MobileNet-v2, the smaller of its backbones.

Chen, Zhu, Papandreou, Schroff and Adam, "Encoder-Decoder with Atrous Separable Convolution for
Semantic Image Segmentation" (2018), arXiv:1802.02611. With both backbones, Zhong et al. (FixBN,
arXiv:2303.06530) train it on Cityscapes, at output stride 16 as here.

Encoder: the backbone without its classifier, with dilation instead of the stride of its last stage;
atrous spatial pyramid pooling (1x1, 3x3 at rates 6, 12 and 18, the mean of the image) to 256
channels. Decoder: features of a quarter of the image's size in 48 channels join the encoder's, two
convolutions of 3x3 (256 channels) and one of 1x1 follow, and bilinear upsampling to the input's
size. Differences: plain instead of separable convolutions, no dropout, and both backbones have the
same decoder. Backbones have torchvision's names: `model.backbone.load_state_dict(weights,
strict=False)` takes those of its ResNet-50, or of its MobileNet-v2's `features`.

BatchNorm of the image's mean (`aspp.pool`) sees one value per sample and channel: in training torch
refuses a batch of one sample, and a batch of two gives each channel +1 and -1 in some order. On
images of up to 96 pixels the dilated kernels reach beyond the 6x6 features and see only their
centre.
"""

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate

from fednorm.models.base import (
    STEM_HELP,
    Stem,
    add_norm,
    check_choice,
    check_dropout,
    check_image_shape,
    check_stem,
    choose_stem,
    conv,
    dilate,
    initialize_he,
)
from fednorm.models.resnet import build_resnet50_trunk
from fednorm.registry import param

WIDTH = 256
LOW_WIDTH = 48
RATES = (6, 12, 18)


@dataclass(frozen=True, slots=True)
class Backbone:
    """Layers in order, their output channels, and the layer of low-level features."""

    layers: nn.Sequential
    channels: int
    low: str
    low_channels: int


class Pyramid(nn.Module):
    """Atrous spatial pyramid pooling: convolutions of several dilations, and the mean."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        views = [conv(channels, WIDTH, 1)]
        views += [conv(channels, WIDTH, 3, dilation=rate) for rate in RATES]
        self.views = nn.ModuleList(add_norm(view, nn.ReLU()) for view in views)
        mean = add_norm(conv(channels, WIDTH, 1), nn.ReLU())
        self.pool = nn.Sequential(nn.AdaptiveAvgPool2d(1), *mean)
        self.project = add_norm(conv((len(views) + 1) * WIDTH, WIDTH, 1), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        """Return all views, projected to one."""
        views = [view(x) for view in self.views]
        mean = self.pool(x).expand_as(views[0])
        joined: Tensor = self.project(torch.cat([*views, mean], 1))
        return joined


class DeepLab(nn.Module):
    """A backbone, the pyramid on its last features, and the decoder."""

    def __init__(self, backbone: Backbone, classes: int) -> None:
        super().__init__()
        self.low = backbone.low
        self.backbone = backbone.layers
        self.aspp = Pyramid(backbone.channels)
        self.reduce = add_norm(conv(backbone.low_channels, LOW_WIDTH, 1), nn.ReLU())
        self.decoder = nn.Sequential(
            add_norm(conv(LOW_WIDTH + WIDTH, WIDTH, 3), nn.ReLU()),
            add_norm(conv(WIDTH, WIDTH, 3), nn.ReLU()),
        )
        initialize_he(self)
        self.classifier = nn.Conv2d(WIDTH, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of every pixel: [samples, classes, height, width]."""
        features = low = x
        for name, layer in self.backbone.named_children():
            features = layer(features)
            low = features if name == self.low else low
        low = self.reduce(low)
        joined = torch.cat([low, _resize(self.aspp(features), low)], 1)
        return _resize(self.classifier(self.decoder(joined)), x)


def _resize(features: Tensor, like: Tensor) -> Tensor:
    return interpolate(features, like.shape[-2:], mode="bilinear", align_corners=False)


def build_mobilenet(channels: int) -> Backbone:
    """Build MobileNet-v2 up to its 320 channels; its last stride is in block 14."""
    layers = list(build_mobilenet_features(channels, small=False).children())[:-1]
    dilate(layers[14:])
    return Backbone(nn.Sequential(*layers), 320, low="3", low_channels=24)


def build_resnet(channels: int) -> Backbone:
    """Build ResNet-50 up to its 2048 channels."""
    layers = build_resnet50_trunk(channels, small=False)
    dilate(layers["layer4"].children())
    return Backbone(nn.Sequential(OrderedDict(layers)), 2048, low="layer1", low_channels=256)


BACKBONES: Mapping[str, Callable[[int], Backbone]] = {
    "mobilenet_v2": build_mobilenet,
    "resnet50": build_resnet,
}


@dataclass(frozen=True, slots=True)
class DeepLabV3Plus:
    """DeepLabv3+ for segmentation: one score per class for every pixel."""

    backbone: Literal["mobilenet_v2", "resnet50"] = param(
        "mobilenet_v2", "the feature extractor: 'mobilenet_v2' or 'resnet50'"
    )

    def __post_init__(self) -> None:
        check_choice("backbone of model 'deeplabv3plus'", self.backbone, tuple(BACKBONES))

    def build(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        """Build the network for images of at least 16x16 pixels."""
        channels, _, _ = check_image_shape("deeplabv3plus", shape, least=16)
        return DeepLab(BACKBONES[self.backbone](channels), classes)


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
    """MobileNet-v2 as in torchvision, with fewer strides for small images.

    Sandler, Howard, Zhu, Zhmoginov and Chen, "MobileNetV2: Inverted Residuals and Linear
    Bottlenecks" (2018), arXiv:1801.04381, Table 2, at width 1. 3 504 872 parameters for 1000
    classes, 52 BatchNorm layers. Modules are named and initialized as in torchvision, whose
    state_dicts load.

    For small images, the stem "cifar" has stride 1 instead of 2 in the first convolution and in the
    stage of 24 channels, as in kuangliu/pytorch-cifar. The image is then divided by 8 in all, not
    by 32: 32x32 pixels are 4x4 at the end.
    """

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
