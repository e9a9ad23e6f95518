"""Well-known networks, built by hand with the module structure and names of the originals.

Full width is the original's, so that published numbers of parameters prove the structure; tests
train them with a few channels. Sources: torchvision (ResNet, MobileNet-v2, EfficientNet-B0,
DenseNet-121, R3D-18) and milesial/Pytorch-UNet.
"""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

CLASSES = 4


def conv_bn(channels, width, kernel, *, stride=1, groups=1, act=None):
    """Convolution without bias, BatchNorm and perhaps an activation, as torchvision writes it."""
    padding = (kernel - 1) // 2
    conv = nn.Conv2d(channels, width, kernel, stride, padding, groups=groups, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(width), *([act(inplace=True)] if act else []))


def divisible(value):
    """Round a number of channels to a multiple of 8, but not down by more than 10 %."""
    rounded = max(8, int(value + 4) // 8 * 8)
    return rounded if rounded >= 0.9 * value else rounded + 8


class BasicBlock(nn.Module):
    expansion = 1

    def __init__(self, channels, width, stride, downsample):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.downsample = downsample

    def forward(self, x):
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        out += x if self.downsample is None else self.downsample(x)
        return self.relu(out)


class Bottleneck(nn.Module):
    expansion = 4

    def __init__(self, channels, width, stride, downsample):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, 4 * width, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(4 * width)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = downsample

    def forward(self, x):
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn3(self.conv3(self.relu(self.bn2(self.conv2(out)))))
        out += x if self.downsample is None else self.downsample(x)
        return self.relu(out)


class ResNet(nn.Module):
    def __init__(self, block, depths, width=64, classes=1000):
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        channels = width
        for stage, depth in enumerate(depths):
            out = width * 2**stage
            blocks = []
            for number in range(depth):
                stride = 2 if stage and not number else 1
                downsample = None
                if stride != 1 or channels != out * block.expansion:
                    downsample = conv_bn(channels, out * block.expansion, 1, stride=stride)
                blocks.append(block(channels, out, stride, downsample))
                channels = out * block.expansion
            setattr(self, f"layer{stage + 1}", nn.Sequential(*blocks))
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(channels, classes)

    def forward(self, x):
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(self.avgpool(x).flatten(1))


class InvertedResidual(nn.Module):
    def __init__(self, channels, width, stride, expand):
        super().__init__()
        hidden = channels * expand
        steps = [conv_bn(channels, hidden, 1, act=nn.ReLU6)] if expand != 1 else []
        steps.append(conv_bn(hidden, hidden, 3, stride=stride, groups=hidden, act=nn.ReLU6))
        self.conv = nn.Sequential(*steps, *conv_bn(hidden, width, 1))
        self.residual = stride == 1 and channels == width

    def forward(self, x):
        return x + self.conv(x) if self.residual else self.conv(x)


class MobileNetV2(nn.Module):
    def __init__(self, width=1.0, classes=1000):
        super().__init__()
        channels = divisible(32 * width)
        features = [conv_bn(3, channels, 3, stride=2, act=nn.ReLU6)]
        for expand, out, repeats, stride in [
            *((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2)),
            *((6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1)),
        ]:
            for number in range(repeats):
                step = stride if number == 0 else 1
                after = divisible(out * width)
                features.append(InvertedResidual(channels, after, step, expand))
                channels = after
        last = divisible(1280 * width)
        features.append(conv_bn(channels, last, 1, act=nn.ReLU6))
        self.features = nn.Sequential(*features)
        self.classifier = nn.Sequential(nn.Dropout(0.2), nn.Linear(last, classes))

    def forward(self, x):
        return self.classifier(self.features(x).mean((2, 3)))


class SqueezeExcitation(nn.Module):
    def __init__(self, channels, squeezed):
        super().__init__()
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc1 = nn.Conv2d(channels, squeezed, 1)
        self.fc2 = nn.Conv2d(squeezed, channels, 1)

    def forward(self, x):
        return x * torch.sigmoid(self.fc2(functional.silu(self.fc1(self.avgpool(x)))))


class MBConv(nn.Module):
    def __init__(self, channels, width, kernel, stride, expand):
        super().__init__()
        hidden = channels * expand
        steps = [conv_bn(channels, hidden, 1, act=nn.SiLU)] if expand != 1 else []
        deep = conv_bn(hidden, hidden, kernel, stride=stride, groups=hidden, act=nn.SiLU)
        squeeze = SqueezeExcitation(hidden, max(1, channels // 4))
        self.block = nn.Sequential(*steps, deep, squeeze, conv_bn(hidden, width, 1))
        self.residual = stride == 1 and channels == width

    def forward(self, x):
        return x + self.block(x) if self.residual else self.block(x)


class EfficientNet(nn.Module):
    def __init__(self, width=1.0, classes=1000):
        super().__init__()
        channels = divisible(32 * width)
        features = [conv_bn(3, channels, 3, stride=2, act=nn.SiLU)]
        for expand, kernel, stride, out, repeats in [
            *((1, 3, 1, 16, 1), (6, 3, 2, 24, 2), (6, 5, 2, 40, 2), (6, 3, 2, 80, 3)),
            *((6, 5, 1, 112, 3), (6, 5, 2, 192, 4), (6, 3, 1, 320, 1)),
        ]:
            stage = []
            for number in range(repeats):
                after, step = divisible(out * width), stride if number == 0 else 1
                stage.append(MBConv(channels, after, kernel, step, expand))
                channels = after
            features.append(nn.Sequential(*stage))
        features.append(conv_bn(channels, 4 * channels, 1, act=nn.SiLU))
        self.features = nn.Sequential(*features)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.classifier = nn.Sequential(
            nn.Dropout(0.2, inplace=True), nn.Linear(4 * channels, classes)
        )

    def forward(self, x):
        return self.classifier(self.avgpool(self.features(x)).flatten(1))


class DenseLayer(nn.Module):
    def __init__(self, channels, growth):
        super().__init__()
        self.norm1 = nn.BatchNorm2d(channels)
        self.relu1 = nn.ReLU(inplace=True)
        self.conv1 = nn.Conv2d(channels, 4 * growth, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(4 * growth)
        self.relu2 = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False)

    def forward(self, features):
        x = self.conv1(self.relu1(self.norm1(torch.cat(features, 1))))
        return self.conv2(self.relu2(self.norm2(x)))


class DenseBlock(nn.ModuleDict):
    def __init__(self, depth, channels, growth):
        super().__init__()
        for i in range(depth):
            self.add_module(f"denselayer{i + 1}", DenseLayer(channels + i * growth, growth))

    def forward(self, x):
        features = [x]
        for layer in self.values():
            features.append(layer(features))
        return torch.cat(features, 1)


class DenseNet(nn.Module):
    def __init__(self, depths=(6, 12, 24, 16), growth=32, classes=1000):
        super().__init__()
        channels = 2 * growth
        features = nn.Sequential()
        features.add_module("conv0", nn.Conv2d(3, channels, 7, 2, 3, bias=False))
        features.add_module("norm0", nn.BatchNorm2d(channels))
        features.add_module("relu0", nn.ReLU(inplace=True))
        features.add_module("pool0", nn.MaxPool2d(3, 2, 1))
        for number, depth in enumerate(depths, 1):
            features.add_module(f"denseblock{number}", DenseBlock(depth, channels, growth))
            channels += depth * growth
            if number < len(depths):
                transition = OrderedDict(
                    norm=nn.BatchNorm2d(channels),
                    relu=nn.ReLU(inplace=True),
                    conv=nn.Conv2d(channels, channels // 2, 1, bias=False),
                    pool=nn.AvgPool2d(2, 2),
                )
                features.add_module(f"transition{number}", nn.Sequential(transition))
                channels //= 2
        features.add_module("norm5", nn.BatchNorm2d(channels))
        self.features = features
        self.classifier = nn.Linear(channels, classes)

    def forward(self, x):
        x = functional.relu(self.features(x), inplace=True)
        return self.classifier(functional.adaptive_avg_pool2d(x, 1).flatten(1))


class DoubleConv(nn.Module):
    def __init__(self, channels, width):
        super().__init__()
        first = conv_bn(channels, width, 3, act=nn.ReLU)
        self.double_conv = nn.Sequential(*first, *conv_bn(width, width, 3, act=nn.ReLU))

    def forward(self, x):
        return self.double_conv(x)


class Down(nn.Module):
    def __init__(self, channels, width):
        super().__init__()
        self.maxpool_conv = nn.Sequential(nn.MaxPool2d(2), DoubleConv(channels, width))

    def forward(self, x):
        return self.maxpool_conv(x)


class Up(nn.Module):
    def __init__(self, channels, width):
        super().__init__()
        self.up = nn.ConvTranspose2d(channels, channels // 2, 2, stride=2)
        self.conv = DoubleConv(channels, width)

    def forward(self, below, across):
        return self.conv(torch.cat([across, self.up(below)], 1))


class OutConv(nn.Module):
    def __init__(self, channels, classes):
        super().__init__()
        self.conv = nn.Conv2d(channels, classes, 1)

    def forward(self, x):
        return self.conv(x)


class UNet(nn.Module):
    def __init__(self, width=64, classes=1):
        super().__init__()
        self.inc = DoubleConv(3, width)
        for i in range(1, 5):
            setattr(self, f"down{i}", Down(width * 2 ** (i - 1), width * 2**i))
        for i in range(1, 5):
            setattr(self, f"up{i}", Up(width * 2 ** (5 - i), width * 2 ** (4 - i)))
        self.outc = OutConv(width, classes)

    def forward(self, x):
        x1 = self.inc(x)
        x2 = self.down1(x1)
        x3 = self.down2(x2)
        x4 = self.down3(x3)
        x = self.up1(self.down4(x4), x4)
        return self.outc(self.up4(self.up3(self.up2(x, x3), x2), x1))


def conv3d_bn(channels, width, stride=1, *, relu):
    conv = nn.Conv3d(channels, width, 3, stride, 1, bias=False)
    return nn.Sequential(conv, nn.BatchNorm3d(width), *([nn.ReLU(inplace=True)] if relu else []))


class VideoBlock(nn.Module):
    def __init__(self, channels, width, stride):
        super().__init__()
        self.conv1 = conv3d_bn(channels, width, stride, relu=True)
        self.conv2 = conv3d_bn(width, width, relu=False)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = None
        if stride != 1 or channels != width:
            conv = nn.Conv3d(channels, width, 1, stride, bias=False)
            self.downsample = nn.Sequential(conv, nn.BatchNorm3d(width))

    def forward(self, x):
        out = self.conv2(self.conv1(x))
        out += x if self.downsample is None else self.downsample(x)
        return self.relu(out)


class VideoResNet(nn.Module):
    def __init__(self, width=64, classes=400):
        super().__init__()
        conv = nn.Conv3d(3, width, (3, 7, 7), (1, 2, 2), (1, 3, 3), bias=False)
        self.stem = nn.Sequential(conv, nn.BatchNorm3d(width), nn.ReLU(inplace=True))
        for i in range(4):
            out, into = width * 2**i, width * 2 ** max(0, i - 1)
            first = VideoBlock(into, out, 2 if i else 1)
            setattr(self, f"layer{i + 1}", nn.Sequential(first, VideoBlock(out, out, 1)))
        self.avgpool = nn.AdaptiveAvgPool3d(1)
        self.fc = nn.Linear(8 * width, classes)

    def forward(self, x):
        x = self.layer4(self.layer3(self.layer2(self.layer1(self.stem(x)))))
        return self.fc(self.avgpool(x).flatten(1))


class Transformer(nn.Module):
    """An encoder over patches; it has LayerNorm and no BatchNorm."""

    def __init__(self, width=64, classes=10):
        super().__init__()
        self.patches = nn.Conv2d(3, width, 8, stride=8)
        layer = nn.TransformerEncoderLayer(width, 2, 2 * width, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, x):
        tokens = self.patches(x).flatten(2).transpose(1, 2)
        return self.head(self.norm(self.encoder(tokens).mean(1)))


@dataclass(frozen=True)
class Architecture:
    """A network in full and in small."""

    full: Callable[[], nn.Module]
    small: Callable[[], nn.Module]
    parameters: int | None  # of the original, as published
    norms: int  # BatchNorm layers of the original
    shape: tuple[int, ...] = (3, 64, 64)  # of an input that leaves more than one pixel at the end
    dense: bool = False  # whether every pixel has a label
    torchvision: str = ""


ARCHITECTURES = {
    "resnet18": Architecture(
        lambda: ResNet(BasicBlock, (2, 2, 2, 2)),
        lambda: ResNet(BasicBlock, (2, 2, 2, 2), 4, CLASSES),
        parameters=11_689_512,
        norms=20,
        torchvision="resnet18",
    ),
    "resnet50": Architecture(
        lambda: ResNet(Bottleneck, (3, 4, 6, 3)),
        lambda: ResNet(Bottleneck, (3, 4, 6, 3), 4, CLASSES),
        parameters=25_557_032,
        norms=53,
        torchvision="resnet50",
    ),
    "mobilenet_v2": Architecture(
        MobileNetV2,
        lambda: MobileNetV2(0.1, CLASSES),
        parameters=3_504_872,
        norms=52,
        torchvision="mobilenet_v2",
    ),
    "efficientnet_b0": Architecture(
        EfficientNet,
        lambda: EfficientNet(0.1, CLASSES),
        parameters=5_288_548,
        norms=49,
        torchvision="efficientnet_b0",
    ),
    "densenet121": Architecture(
        DenseNet,
        lambda: DenseNet(growth=4, classes=CLASSES),
        parameters=7_978_856,
        norms=121,
        torchvision="densenet121",
    ),
    "unet": Architecture(
        UNet,
        lambda: UNet(4, CLASSES),
        parameters=31_037_633,
        norms=18,
        shape=(3, 32, 32),
        dense=True,
    ),
    "r3d_18": Architecture(
        VideoResNet,
        lambda: VideoResNet(4, CLASSES),
        parameters=33_371_472,
        norms=20,
        shape=(3, 8, 32, 32),
        torchvision="video.r3d_18",
    ),
    "transformer": Architecture(
        Transformer, lambda: Transformer(8, CLASSES), parameters=None, norms=0
    ),
}
