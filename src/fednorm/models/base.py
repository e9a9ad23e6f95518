"""What a registered model is, and the shapes that convolutional ones can take."""

from typing import Protocol

from torch import nn


class Model(Protocol):
    """A frozen dataclass that makes a network for samples of a shape."""

    def build(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        """Return a new network that maps samples to one score (logit) per class."""
        ...


def image_shape(model: str, shape: tuple[int, ...], *, least: int = 1) -> tuple[int, int, int]:
    """Return (channels, height, width), or say why the model cannot take such samples.

    >>> image_shape("cnn", (1, 8, 8), least=4)
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
            f"{needs} of at least {least}x{least} pixels, because it halves them on the way, but "
            f"a sample has shape {tuple(shape)}; choose 'mlp', 'resnet' or larger images."
        )
    return channels, height, width


def one_of(owner: str, value: object, known: tuple[str, ...]) -> None:
    """Refuse a setting that is none of the known ones.

    >>> one_of("stem of model 'resnet18'", "cifar", ("cifar", "imagenet"))
    """
    if value not in known:
        choices = " or ".join(map(repr, known))
        raise ValueError(f"{owner} must be {choices}, but is {value!r}.")


def positive_widths(owner: str, widths: object) -> tuple[int, ...]:
    """Return a list or tuple of layer widths as a tuple of positive whole numbers.

    >>> positive_widths("hidden of model 'mlp'", [128, 64])
    (128, 64)
    """
    if isinstance(widths, list | tuple) and all(isinstance(w, int) and w >= 1 for w in widths):
        return tuple(widths)
    raise ValueError(
        f"{owner} must be a list of positive whole numbers such as [128, 64], but is {widths!r}."
    )
