"""The papers' networks have the published sizes and structure, and train in any memory format."""

import re

import pytest
import torch
from rich.console import Console
from torch import nn
from torch.nn import functional

from fednorm.cli.listing import describe_entry
from fednorm.models import MODELS, create_model

IMAGENET = (3, 224, 224)
PUBLISHED = [
    ("lenet", (1, 32, 32), 10, 61_706 + 2 * (6 + 16)),  # LeNet-5 with all connections, and BN
    ("resnet20", (3, 32, 32), 10, 269_722),
    ("resnet18", (3, 32, 32), 10, 11_173_962),
    ("resnet18", IMAGENET, 1000, 11_689_512),
    ("resnet50", IMAGENET, 1000, 25_557_032),
    ("mobilenet_v2", IMAGENET, 1000, 3_504_872),
]
SMALL = {
    "lenet": ((3, 16, 16), {}),
    "resnet20": ((3, 16, 16), {}),
    "resnet18": ((3, 16, 16), {}),
    "resnet50": ((3, 16, 16), {}),
    "mobilenet_v2": ((3, 16, 16), {"dropout": 0}),
    "deeplab_mobilenet": ((3, 32, 112), {"backbone": "mobilenet_v2"}),
    "deeplab_resnet": ((3, 32, 112), {"backbone": "resnet50"}),
}
networks = pytest.mark.parametrize("network", SMALL)
backbones = pytest.mark.parametrize("backbone", ["mobilenet_v2", "resnet50"])


def small(network):
    shape, fields = SMALL[network]
    name = "deeplabv3plus" if "backbone" in fields else network
    return create_model(name, shape, classes=5, seed=0, **fields), torch.randn(4, *shape)


def on_paper(name, shape, classes=10, **fields):
    """Return a network without numbers, which takes no time."""
    with torch.device("meta"):
        return create_model(name, shape, classes, seed=0, **fields), torch.empty(2, *shape)


def convolutions(model):
    return [m for m in model.modules() if isinstance(m, nn.Conv2d)]


@pytest.mark.parametrize("name", ["lenet", *list(MODELS)[list(MODELS).index("lenet") + 1 :]])
def test_names_its_paper(name):
    console = Console(width=1000)
    with console.capture() as shown:
        console.print(describe_entry("models", name))
    assert re.search(r"arXiv:\d{4}\.\d{5}|doi:10\.\d+/\S+", shown.get())


@pytest.mark.slow
@pytest.mark.parametrize(("name", "shape", "classes", "count"), PUBLISHED)
def test_has_as_many_parameters_as_published(name, shape, classes, count):
    model, images = on_paper(name, shape, classes)
    assert sum(p.numel() for p in model.parameters()) == count
    assert model(images).shape == (2, classes)


# A constant per channel that BatchNorm subtracts again, at once or behind a 1x1 convolution.
CANCELLED = {
    "lenet": r"[04]\.bias",
    "mobilenet_v2": r"features\.(1\.conv\.2|\d+\.conv\.3)\.bias",
    "deeplab_mobilenet": r"backbone\.(1\.conv\.2|(?!17)\d+\.conv\.3)\.bias",
}


@pytest.mark.slow
@networks
def test_gradients_reach_every_parameter(network):
    model, x = small(network)
    logits = model.double()(x.double())
    assert torch.isfinite(logits).all()
    (logits * torch.randn_like(logits)).sum().backward()
    without = CANCELLED.get(network, "none")
    for key, parameter in model.named_parameters():
        learns = bool(parameter.grad.abs().max() > 1e-9)
        assert learns == (not re.fullmatch(without, key)), key


@pytest.mark.slow
@networks
def test_the_memory_format_does_not_matter(network):
    model, x = small(network)
    model, x = model.double(), x.double()
    expected = model(x)
    model.to(memory_format=torch.channels_last)
    assert any(not c.weight.is_contiguous() for c in convolutions(model))
    torch.testing.assert_close(model(x.to(memory_format=torch.channels_last)), expected)


def test_lenet_is_as_described():
    model, images = on_paper("lenet", (3, 32, 32))
    assert model[:8](images).shape == (2, 16, 5, 5)
    assert [type(m).__name__ for m in model[:4]] == ["Conv2d", "BatchNorm2d", "ReLU", "MaxPool2d"]
    sizes = [(m.in_features, m.out_features) for m in model if isinstance(m, nn.Linear)]
    assert sizes == [(400, 120), (120, 84), (84, 10)]


def test_resnet20_has_three_stages_of_three_blocks():
    model, images = on_paper("resnet20", (3, 32, 32))
    shapes = []
    for name, part in model.named_children():
        images = part(images)
        if name.startswith("layer"):
            assert len(part) == 3
            shapes.append(images.shape[1:])
    assert shapes == [(16, 32, 32), (32, 16, 16), (64, 8, 8)]


@pytest.mark.parametrize("size", [8, 7])
def test_resnet20_shortcuts_are_every_second_pixel_and_zeros(size):
    block = create_model("resnet20", (3, 32, 32), 10, seed=0).layer2[0].eval()
    assert list(block.downsample.parameters()) == []
    nn.init.zeros_(block.bn2.weight)
    x = torch.randn(2, 16, size, size)
    zeros = torch.zeros(2, 16, (size + 1) // 2, (size + 1) // 2)
    assert torch.equal(block(x), torch.cat([x[:, :, ::2, ::2], zeros], 1).relu())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["resnet20", "resnet18", "resnet50"])
def test_residual_networks_start_as_he_et_al(name):
    for layer in convolutions(create_model(name, (3, 32, 32), 10, seed=0)):
        fan_out = layer.out_channels * layer.kernel_size[0] ** 2
        torch.testing.assert_close(
            layer.weight.std() * (fan_out / 2) ** 0.5, torch.tensor(1.0), rtol=0.1, atol=0
        )


def test_bottleneck_is_its_formula():
    block = create_model("resnet50", (3, 32, 32), 10, seed=0).layer2[0].eval()
    x = torch.randn(2, 256, 8, 8)
    narrow = block.bn1(functional.conv2d(x, block.conv1.weight)).relu()
    halved = block.bn2(functional.conv2d(narrow, block.conv2.weight, stride=2, padding=1)).relu()
    wide = block.bn3(functional.conv2d(halved, block.conv3.weight))
    shortcut = block.downsample[1](functional.conv2d(x, block.downsample[0].weight, stride=2))
    torch.testing.assert_close(block(x), (wide + shortcut).relu())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "stem", "kernel", "left"),
    [
        ((3, 95, 200), "auto", 3, (12, 25)),
        ((3, 96, 96), "auto", 7, (3, 3)),
        ((1, 32, 32), "auto", 3, (4, 4)),
        ((3, 32, 32), "imagenet", 7, (1, 1)),
        ((3, 224, 224), "cifar", 3, (28, 28)),
    ],
)
@pytest.mark.parametrize("name", ["resnet18", "resnet50"])
def test_resnet_stems(name, shape, stem, kernel, left):
    model, images = on_paper(name, shape, stem=stem)
    assert model.conv1.kernel_size == (kernel, kernel)
    assert ("maxpool" in dict(model.named_children())) == (kernel == 7)
    last = [n for n, _ in model.named_children()].index("layer4") + 1
    assert model[:last](images).shape[2:] == left


@pytest.mark.parametrize("name", ["resnet18", "resnet50", "mobilenet_v2"])
def test_the_stem_of_imagenet_needs_larger_images(name):
    with pytest.raises(ValueError, match=r"at least 32x32 pixels.* shape \(3, 64, 31\)"):
        create_model(name, (3, 64, 31), 10, seed=0, stem="imagenet")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pixels", "halving", "left"), [(32, (4, 7, 14), 4), (224, (0, 2, 4, 7, 14), 7)]
)
def test_mobilenet_strides(pixels, halving, left):
    model, images = on_paper("mobilenet_v2", (3, pixels, pixels))
    found = []
    for number, part in enumerate(model.features):
        before, images = images, part(images)
        if images.shape[-1] < before.shape[-1]:
            found.append(number)
    assert tuple(found) == halving
    assert images.shape == (2, 1280, left, left)


def test_mobilenet_adds_the_input_where_it_can():
    model = create_model("mobilenet_v2", (3, 32, 32), 10, seed=0).eval()
    adding = []
    for number, block in enumerate(model.features[1:-1], 1):
        nn.init.zeros_(block.conv[-1].weight)
        x = torch.randn(1, next(block.parameters()).shape[1 if number > 1 else 0], 4, 4)
        adding += [number] if torch.equal(block(x), x) else []
    assert adding == [3, 5, 6, 8, 9, 10, 12, 13, 15, 16]


def test_mobilenet_drops_features():
    assert create_model("mobilenet_v2", (3, 8, 8), 2, seed=0).classifier[0].p == 0.2
    assert create_model("mobilenet_v2", (3, 8, 8), 2, seed=0, dropout=0.5).classifier[0].p == 0.5


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(3, 64, 128), (1, 50, 71)])
@backbones
def test_deeplab_gives_scores_of_the_inputs_size(backbone, shape):
    model, images = on_paper("deeplabv3plus", shape, 19, backbone=backbone)
    assert model(images).shape == (2, 19, *shape[1:])
    channels = {"mobilenet_v2": 320, "resnet50": 2048}[backbone]
    left = [-(-side // 16) for side in shape[1:]]
    assert model.backbone(images).shape == (2, channels, *left)


@pytest.mark.slow
@backbones
def test_deeplab_is_as_described(backbone):
    model, images = on_paper("deeplabv3plus", (3, 64, 128), 19, backbone=backbone)
    rates = [c.dilation[0] for c in convolutions(model.aspp.views) if c.kernel_size == (3, 3)]
    assert rates == [6, 12, 18]
    last, low = {"mobilenet_v2": ("3", 24), "resnet50": ("layer1", 256)}[
        backbone
    ]  # before a stride
    seen = []
    for part in (model.backbone.get_submodule(last), model.reduce):
        part.register_forward_hook(lambda _, given, out: seen.append((given[0], out)))
    model(images)
    assert seen[1][0] is seen[0][1]
    assert [t.shape for t in seen[1]] == [(2, low, 16, 32), (2, 48, 16, 32)]
    widths = [(c.in_channels, c.out_channels) for c in convolutions(model.decoder)]
    assert widths == [(48 + 256, 256), (256, 256)]


@pytest.mark.slow
@backbones
def test_deeplab_sees_what_its_backbone_sees_with_a_stride(backbone):
    """Every second pixel of the dilated features is the original's."""
    dense = create_model("deeplabv3plus", (3, 64, 96), 4, seed=0, backbone=backbone).double().eval()
    plain = create_model(backbone, (3, 64, 96), 4, seed=1, stem="imagenet").double().eval()
    features = plain.features[:-1] if backbone == "mobilenet_v2" else plain[:-3]
    features.load_state_dict(dense.backbone.state_dict())
    x = torch.randn(2, 3, 64, 96, dtype=torch.float64)
    kept, expected = dense.backbone(x)[:, :, ::2, ::2], features(x)
    torch.testing.assert_close(kept, expected, rtol=1e-9, atol=1e-9)


def test_deeplabs_mean_of_the_image_reaches_every_pixel():
    model = create_model("deeplabv3plus", (3, 32, 32), 4, seed=0).eval()
    x = torch.randn(2, 320, 3, 5)
    views = [view(x) for view in model.aspp.views]
    mean = model.aspp.pool[1:](x.mean((2, 3), keepdim=True)).repeat(1, 1, 3, 5)
    torch.testing.assert_close(model.aspp(x), model.aspp.project(torch.cat([*views, mean], 1)))


def test_deeplab_cannot_train_on_one_sample_but_predicts_it():
    model = create_model("deeplabv3plus", (3, 32, 32), 4, seed=0)
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        model(torch.randn(1, 3, 32, 32))
    assert model.eval()(torch.randn(1, 3, 32, 32)).shape == (1, 4, 32, 32)


KEYS = {
    "resnet18": [
        *("conv1.weight", "bn1.running_var", "layer1.0.conv1.weight", "layer1.1.bn2.bias"),
        *("layer2.0.downsample.0.weight", "layer4.0.downsample.1.running_mean", "fc.bias"),
    ],
    "resnet50": [
        *("conv1.weight", "layer1.0.downsample.0.weight", "layer1.2.conv3.weight"),
        *("layer3.5.bn3.num_batches_tracked", "layer4.2.bn2.weight", "fc.weight"),
    ],
    "mobilenet_v2": [
        *("features.0.0.weight", "features.0.1.bias", "features.1.conv.0.0.weight"),
        *("features.1.conv.1.weight", "features.1.conv.2.running_mean", "classifier.1.weight"),
        *("features.17.conv.1.1.weight", "features.17.conv.2.weight", "features.17.conv.3.bias"),
        *("features.18.0.weight", "features.18.1.num_batches_tracked", "classifier.1.bias"),
    ],
}
LENGTHS = {"resnet18": 122, "resnet50": 320, "mobilenet_v2": 314}


@pytest.mark.parametrize("name", KEYS)
def test_tensors_are_named_as_in_torchvision(name):
    state = on_paper(name, IMAGENET, 1000)[0].state_dict()
    assert set(KEYS[name]) <= set(state)
    assert len(state) == LENGTHS[name]


@pytest.mark.parametrize("name", KEYS)
def test_torchvisions_weights_load_and_give_its_results(name):
    models = pytest.importorskip("torchvision.models", reason="needs torchvision's own networks")
    real = getattr(models, name)(weights=None, num_classes=3).eval()
    ours = create_model(name, IMAGENET, 3, seed=0).eval()
    assert list(ours.state_dict()) == list(real.state_dict())
    ours.load_state_dict(real.state_dict())
    x = torch.randn(2, 3, 64, 64)
    torch.testing.assert_close(ours(x), real(x))
