"""Which first layers a network of ImageNet has: the original ones, or those for small images."""

from typing import Literal, TypeAlias

from fednorm.models.base import image_shape, one_of

Stem: TypeAlias = Literal["auto", "cifar", "imagenet"]
HELP = (
    "'imagenet' is the original, 'cifar' that for small images; 'auto' takes 'cifar' if height or "
    "width is under 96 pixels"
)
SMALL = 96  # pixels: CIFAR-10 has 32, Tiny-ImageNet 64, ImageNet 224


def check_stem(model: str, stem: object) -> None:
    """Refuse a stem that is none."""
    one_of(f"stem of model {model!r}", stem, ("auto", "cifar", "imagenet"))


def sized(model: str, shape: tuple[int, ...], stem: Stem) -> tuple[int, bool]:
    """Return the number of channels, and whether the stem is the one for small images.

    Images that would not fill one pixel at the end are refused: CIFAR's stem leaves an eighth of
    each side, ImageNet's a 32nd.

    >>> sized("resnet18", (3, 64, 64), "auto"), sized("resnet18", (1, 96, 200), "auto")
    ((3, True), (1, False))
    """
    _, height, width = image_shape(model, shape)
    small = stem == "cifar" or (stem == "auto" and min(height, width) < SMALL)
    channels, _, _ = image_shape(model, shape, least=8 if small else 32)
    return channels, small
