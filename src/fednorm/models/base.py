"""What models share: checks of their settings, residual blocks, and parts of these.

Modules are named as in torchvision, so that its state_dicts load.

He, Zhang, Ren and Sun, "Deep Residual Learning for Image Recognition" (2016), arXiv:1512.03385.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Literal, Protocol, TypeAlias

from torch import Tensor, nn

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


# Residual blocks.


def conv(channels: int, width: int, kernel: int, stride: int = 1, dilation: int = 1) -> nn.Conv2d:
    """Return a convolution without bias, padded to keep height and width at stride 1."""
    padding = dilation * (kernel // 2)
    return nn.Conv2d(channels, width, kernel, stride, padding, dilation, bias=False)


def add_norm(layer: nn.Conv2d, *activation: nn.Module) -> nn.Sequential:
    """Return a convolution with its BatchNorm and, if given, its activation."""
    return nn.Sequential(layer, nn.BatchNorm2d(layer.out_channels), *activation)


def build_projection(channels: int, width: int, stride: int) -> nn.Module:
    """Return the shortcut that changes the shape, He et al.'s option B: a convolution."""
    return add_norm(conv(channels, width, 1, stride))


class BasicBlock(nn.Module):
    """Convolution, BatchNorm, ReLU, convolution, BatchNorm, plus the shortcut, then ReLU."""

    def __init__(
        self,
        channels: int,
        width: int,
        stride: int,
        shortcut: Callable[[int, int, int], nn.Module] = build_projection,
    ) -> None:
        super().__init__()
        self.conv1 = conv(channels, width, 3, stride)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU()
        self.conv2 = conv(width, width, 3)
        self.bn2 = nn.BatchNorm2d(width)
        same = stride == 1 and channels == width
        self.downsample = nn.Identity() if same else shortcut(channels, width, stride)

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output."""
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        added: Tensor = self.relu(out + self.downsample(x))
        return added


class Bottleneck(nn.Module):
    """Convolutions of 1x1, 3x3 and 1x1, each with BatchNorm, plus the shortcut, then ReLU.

    The last has `expansion` times the width; the stride is the second's, as in torchvision.
    """

    expansion = 4

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        wide = self.expansion * width
        self.conv1 = conv(channels, width, 1)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = conv(width, width, 3, stride)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = conv(width, wide, 1)
        self.bn3 = nn.BatchNorm2d(wide)
        self.relu = nn.ReLU()
        same = stride == 1 and channels == wide
        self.downsample = nn.Identity() if same else build_projection(channels, wide, stride)

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output."""
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn3(self.conv3(self.relu(self.bn2(self.conv2(out)))))
        added: Tensor = self.relu(out + self.downsample(x))
        return added


def build_stem(channels: int, width: int, *, small: bool) -> dict[str, nn.Module]:
    """Return the first layers: for small images 3x3 with stride 1, else 7x7 and pooling (by 4)."""
    first = conv(channels, width, 3) if small else conv(channels, width, 7, 2)
    layers: dict[str, nn.Module] = {"conv1": first, "bn1": nn.BatchNorm2d(width), "relu": nn.ReLU()}
    return layers if small else {**layers, "maxpool": nn.MaxPool2d(3, 2, 1)}


def build_stages(
    block: Callable[[int, int, int], nn.Module],
    widths: tuple[int, ...],
    depths: tuple[int, ...],
    expansion: int = 1,
) -> dict[str, nn.Module]:
    """Return the stages "layer1", "layer2", …; each after the first halves the image.

    Args:
        block: makes a block from its input channels, its width and its stride.
        widths: of the blocks of each stage; the stem has the width of the first.
        depths: blocks in each stage.
        expansion: output channels of a block, as a multiple of its width.
    """
    layers: dict[str, nn.Module] = {}
    channels = widths[0]
    for number, (width, depth) in enumerate(zip(widths, depths, strict=True), 1):
        first = block(channels, width, 1 if number == 1 else 2)
        channels = expansion * width
        rest = [block(channels, width, 1) for _ in range(depth - 1)]
        layers[f"layer{number}"] = nn.Sequential(first, *rest)
    return layers


def add_classifier(layers: dict[str, nn.Module], features: int, classes: int) -> nn.Sequential:
    """Join the layers, global average pooling and a linear classifier into a network."""
    head = {
        "avgpool": nn.AdaptiveAvgPool2d(1),
        "flatten": nn.Flatten(),
        "fc": nn.Linear(features, classes),
    }
    model = nn.Sequential(OrderedDict({**layers, **head}))
    initialize_he(model)
    return model


def dilate(layers: Iterable[nn.Module]) -> None:
    """Replace the stride of a stage of 1x1 and 3x3 kernels by dilation.

    `layers` are its blocks. Those after the first are dilated, so that their receptive field stays.
    """
    dilation = 1
    for layer in layers:
        for part in layer.modules():
            if not isinstance(part, nn.Conv2d):
                continue
            part.stride = (1, 1)
            if part.kernel_size != (1, 1):
                part.dilation = part.padding = (dilation, dilation)
        dilation = 2


def initialize_he(model: nn.Module) -> None:
    """Draw the convolutions' weights from N(0, 2/fan_out), as He et al. (arXiv:1502.01852)."""
    for layer in model.modules():
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
