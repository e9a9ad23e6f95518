"""Every strategy converts the papers' networks, or says why it does not."""

import functools

import pytest
import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from fednorm.errors import ConversionError
from fednorm.models import create_model
from fednorm.strategies import STRATEGIES, create_strategy
from fednorm.strategies.fixup import ScalarAffine, find_residual_branches

# The large ones are converted by those strategies that look at more than BatchNorm layers.
FEW = ["fbn", "dualbn", "in", "gn_ws", "fixup", "fedwon", "fedfn"]
NETWORKS = {
    "lenet": ((3, 16, 16), STRATEGIES),
    "resnet20": ((3, 8, 8), STRATEGIES),
    "mobilenet_v2": ((3, 16, 16), STRATEGIES),
    "resnet18": ((3, 16, 16), FEW),
    "resnet50": ((3, 16, 16), FEW),
    "deeplabv3plus": ((3, 32, 32), [*FEW, "gn", "fedtan"]),
}
REFUSED = {
    ("lenet", "fixup"): "Fixup needs residual branches",
    ("deeplabv3plus", "fixup"): "Fixup needs a linear classifier",
    ("deeplabv3plus", "fedfn"): "DeepLab has no linear layer that could be its classifier",
    ("deeplabv3plus", "in"): r"shape \(2, 256, 1, 1\) leave one value per group",
}
CASES = [(network, name) for network, (_, names) in NETWORKS.items() for name in names]


@functools.cache
def plain(network):
    return create_model(network, NETWORKS[network][0], classes=3, seed=0)


def paths(model, types):
    return {path for path, module in model.named_modules() if isinstance(module, types)}


def convert_and_run(network, name):
    conversion = create_strategy(name).convert(plain(network))
    return conversion, conversion.model(torch.randn(2, *NETWORKS[network][0]))


@pytest.mark.parametrize(("network", "name"), [c for c in CASES if c not in REFUSED])
def test_converts_and_runs(network, name):
    conversion, logits = convert_and_run(network, name)
    assert paths(plain(network), _BatchNorm) <= {r.path for r in conversion.replaced}
    assert logits.shape[:2] == (2, 3)
    assert torch.isfinite(logits).all()


@pytest.mark.parametrize(("network", "name"), REFUSED)
def test_a_model_that_cannot_be_converted_is_refused(network, name):
    with pytest.raises((ValueError, ConversionError), match=REFUSED[network, name]):
        convert_and_run(network, name)


@pytest.mark.parametrize("name", ["gn_ws", "fedwon", "dualbn"])
def test_all_convolutions_of_resnet20_are_standardized(name):
    conversion = create_strategy(name).convert(plain("resnet20"))
    expected = paths(plain("resnet20"), _BatchNorm | nn.Conv2d)
    assert len(expected) == 19 + 19
    assert {r.path for r in conversion.replaced} == expected


@pytest.mark.parametrize(
    ("network", "blocks"),
    [("resnet20", 9), ("resnet18", 8), ("resnet50", 16), ("mobilenet_v2", 10)],
)
def test_fixup_finds_every_residual_branch(network, blocks):
    model = create_strategy("fixup").convert(plain(network)).model
    assert len(find_residual_branches(model)) == blocks
    scaled = [m for m in model.modules() if isinstance(m, ScalarAffine) and m.scale is not None]
    assert len(scaled) == blocks


def test_fixup_starts_resnet20_as_its_shortcuts():
    model = create_strategy("fixup").convert(plain("resnet20")).model
    x = model.relu(model.bn1(model.conv1(torch.randn(2, 3, 8, 8))))
    for stage in (model.layer1, model.layer2, model.layer3):
        expected = x if stage is model.layer1 else x[:, :, ::2, ::2]
        x = stage(x)
        assert torch.equal(x[:, : expected.shape[1]], expected)
        assert not x[:, expected.shape[1] :].any()
    assert x.any()
