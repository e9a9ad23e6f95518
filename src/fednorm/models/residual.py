"""Residual networks for images, put together of blocks; modules named as in torchvision."""

from collections import OrderedDict
from collections.abc import Callable

from torch import nn

from fednorm.models.blocks import conv, he_initialise

WIDTHS = (64, 128, 256, 512)


def stem(channels: int, width: int, *, small: bool) -> dict[str, nn.Module]:
    """Return the first layers: for small images 3x3 with stride 1, else 7x7 and pooling (by 4)."""
    first = conv(channels, width, 3) if small else conv(channels, width, 7, 2)
    layers: dict[str, nn.Module] = {"conv1": first, "bn1": nn.BatchNorm2d(width), "relu": nn.ReLU()}
    return layers if small else {**layers, "maxpool": nn.MaxPool2d(3, 2, 1)}


def stages(
    block: Callable[[int, int, int], nn.Module],
    widths: tuple[int, ...],
    depths: tuple[int, ...],
    expansion: int = 1,
) -> dict[str, nn.Module]:
    """Return "layer1", "layer2" and so on; each after the first halves the image.

    Args:
        block: makes a block for so many channels, of that width, with that stride.
        widths: of the blocks of each stage; the stem has the width of the first.
        depths: blocks in each stage.
        expansion: channels that leave a block, in widths.
    """
    layers: dict[str, nn.Module] = {}
    channels = widths[0]
    for number, (width, depth) in enumerate(zip(widths, depths, strict=True), 1):
        first = block(channels, width, 1 if number == 1 else 2)
        channels = expansion * width
        rest = [block(channels, width, 1) for _ in range(depth - 1)]
        layers[f"layer{number}"] = nn.Sequential(first, *rest)
    return layers


def classified(layers: dict[str, nn.Module], features: int, classes: int) -> nn.Sequential:
    """Return the network: the layers, global average pooling, and a linear classifier."""
    head = {
        "avgpool": nn.AdaptiveAvgPool2d(1),
        "flatten": nn.Flatten(),
        "fc": nn.Linear(features, classes),
    }
    model = nn.Sequential(OrderedDict({**layers, **head}))
    he_initialise(model)
    return model
