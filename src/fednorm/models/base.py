"""The interface of registered models, and checks of their settings."""

from typing import Literal, Protocol, TypeAlias

from torch import nn

Stem: TypeAlias = Literal["auto", "cifar", "imagenet"]
STEM_HELP = (
    "'imagenet' is the original stem, 'cifar' that for small images; 'auto' is 'cifar' if height "
    "or width is under 96 pixels"
)
_SMALL = 96  # pixels: CIFAR-10 has 32, Tiny-ImageNet 64, ImageNet 224


class ModelConfig(Protocol):
    """The settings of a model: a frozen dataclass that builds the network."""

    def build(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        """Build a network that maps samples to one score (logit) per class."""
        ...


def check_image_shape(
    model: str, shape: tuple[int, ...], *, least: int = 1
) -> tuple[int, int, int]:
    """Return (channels, height, width); raise ValueError if the model cannot take the shape.

    >>> check_image_shape("cnn", (1, 8, 8), least=4)
    (1, 8, 8)
    """
    needs = f"model {model!r} needs images of shape (channels, height, width)"
    try:
        channels, height, width = shape
    except ValueError:
        raise ValueError(
            f"{needs}, but a sample has shape {tuple(shape)}; choose 'mlp' or an image data set."
        ) from None
    if min(height, width) < least:
        raise ValueError(
            f"{needs} of at least {least}x{least} pixels, because it halves them, but "
            f"a sample has shape {tuple(shape)}; choose 'mlp', 'resnet' or larger images."
        )
    return channels, height, width


def check_choice(owner: str, value: object, known: tuple[str, ...]) -> None:
    """Raise ValueError unless `value` is one of the known ones.

    >>> check_choice("stem of model 'resnet18'", "cifar", ("cifar", "imagenet"))
    """
    if value not in known:
        choices = " or ".join(map(repr, known))
        raise ValueError(f"{owner} must be {choices}, but is {value!r}.")


def check_widths(owner: str, widths: object) -> tuple[int, ...]:
    """Return layer widths as a tuple; raise ValueError unless all are positive integers.

    >>> check_widths("hidden of model 'mlp'", [128, 64])
    (128, 64)
    """
    if isinstance(widths, list | tuple) and all(isinstance(w, int) and w >= 1 for w in widths):
        return tuple(widths)
    raise ValueError(
        f"{owner} must be a list of positive whole numbers such as [128, 64], but is {widths!r}."
    )


def check_dropout(model: str, rate: float) -> None:
    """Raise ValueError unless a dropout rate is valid."""
    if not 0 <= rate < 1:
        raise ValueError(f"dropout of model {model!r} must be from 0 to below 1, but is {rate}.")


def check_stem(model: str, stem: object) -> None:
    """Raise ValueError unless the stem is a known one."""
    check_choice(f"stem of model {model!r}", stem, ("auto", "cifar", "imagenet"))


def choose_stem(model: str, shape: tuple[int, ...], stem: Stem) -> tuple[int, bool]:
    """Return the number of channels, and whether to use the stem for small images.

    Images smaller than one pixel after the last stage are refused: CIFAR's stem leaves an eighth of
    each side, ImageNet's a 32nd.

    >>> choose_stem("resnet18", (3, 64, 64), "auto"), choose_stem("resnet18", (1, 96, 200), "auto")
    ((3, True), (1, False))
    """
    _, height, width = check_image_shape(model, shape)
    small = stem == "cifar" or (stem == "auto" and min(height, width) < _SMALL)
    channels, _, _ = check_image_shape(model, shape, least=8 if small else 32)
    return channels, small
