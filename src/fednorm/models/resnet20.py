"""ResNet-20 for CIFAR-10, the network of the experiments of FixBN and FedTAN.

He, Zhang, Ren and Sun, "Deep Residual Learning for Image Recognition" (2016), arXiv:1512.03385,
section 4.2: a convolution of 3x3, three stages of three blocks (16, 32 and 64 channels), global
average pooling, a linear classifier. 269 722 parameters for 3 channels and 10 classes; 19 BatchNorm
layers. Used by Zhong et al. (FixBN, arXiv:2303.06530) and Wang et al. (FedTAN, arXiv:2301.02982).

Shortcuts are option A: every second pixel of the input, and zeros for the missing channels. The
paper does not say where the zeros go; as in its authors' Torch code (fb.resnet.torch) they follow
the input's channels.
"""

from dataclasses import dataclass
from functools import partial

from torch import Tensor, nn
from torch.nn import functional

from fednorm.models.base import image_shape
from fednorm.models.blocks import Block
from fednorm.models.residual import classified, stages, stem

WIDTHS = (16, 32, 64)


class Padded(nn.Module):
    """A shortcut without parameters: pixels are left out by the stride, channels are zeros."""

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
    """CIFAR's ResNet-20: widths 16, 32, 64, three blocks each, shortcuts without parameters."""

    def build(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        """Return the network for images of at least 4x4 pixels."""
        channels, _, _ = image_shape("resnet20", shape, least=4)
        block = partial(Block, shortcut=Padded)
        first = stem(channels, WIDTHS[0], small=True)
        return classified(first | stages(block, WIDTHS, depths=(3, 3, 3)), WIDTHS[-1], classes)
