"""What strategies find in the papers' networks: convolutions and residual branches."""

import functools

import pytest
import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from fednorm.models import create_model
from fednorm.strategies import create_strategy
from fednorm.strategies.fixup import ScalarAffine, find_residual_branches


@functools.cache
def plain(network):
    side = 8 if network == "resnet20" else 16
    return create_model(network, (3, side, side), classes=3, seed=0)


def paths(model, types):
    return {path for path, module in model.named_modules() if isinstance(module, types)}


@pytest.mark.parametrize("name", ["gn_ws", "fedwon", "dualbn"])
def test_all_convolutions_of_resnet20_are_standardized(name):
    conversion = create_strategy(name).convert(plain("resnet20"))
    expected = paths(plain("resnet20"), _BatchNorm | nn.Conv2d)
    assert len(expected) == 19 + 19
    assert {r.path for r in conversion.replaced} == expected


@pytest.mark.slow
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
