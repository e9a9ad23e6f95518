"""Residual blocks and their parts, named as in torchvision, so that its state_dicts load.

He, Zhang, Ren and Sun, "Deep Residual Learning for Image Recognition" (2016), arXiv:1512.03385.
"""

from collections.abc import Callable, Iterable

from torch import Tensor, nn


def conv(channels: int, width: int, kernel: int, stride: int = 1, dilation: int = 1) -> nn.Conv2d:
    """Return a convolution without bias that keeps height and width, apart from its stride."""
    padding = dilation * (kernel // 2)
    return nn.Conv2d(channels, width, kernel, stride, padding, dilation, bias=False)


def normalised(layer: nn.Conv2d, *activation: nn.Module) -> nn.Sequential:
    """Return a convolution with its BatchNorm and, if given, its activation."""
    return nn.Sequential(layer, nn.BatchNorm2d(layer.out_channels), *activation)


def projection(channels: int, width: int, stride: int) -> nn.Module:
    """Return He et al.'s option B of a shortcut that changes the shape: a convolution."""
    return normalised(conv(channels, width, 1, stride))


class Block(nn.Module):
    """Convolution, BatchNorm, ReLU, convolution, BatchNorm, plus the shortcut, then ReLU."""

    def __init__(
        self,
        channels: int,
        width: int,
        stride: int,
        shortcut: Callable[[int, int, int], nn.Module] = projection,
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
        self.downsample = nn.Identity() if same else projection(channels, wide, stride)

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output."""
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn3(self.conv3(self.relu(self.bn2(self.conv2(out)))))
        added: Tensor = self.relu(out + self.downsample(x))
        return added


def dilate(layers: Iterable[nn.Module]) -> None:
    """Take the stride out of a stage of 1x1 and 3x3 kernels, given block by block.

    The blocks after the first see as far as before by dilation.
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


def he_initialise(model: nn.Module) -> None:
    """Draw the convolutions' weights from N(0, 2/fan_out), as He et al. (arXiv:1502.01852)."""
    for layer in model.modules():
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
