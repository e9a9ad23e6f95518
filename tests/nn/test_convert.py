"""Conversion works on a copy, keeps what a layer has, and refuses by name what it cannot keep."""

import copy

import pytest
import torch
from torch import nn

from fednorm import strategy
from fednorm.nn.batch_norm import FedBatchNorm
from fednorm.nn.convert import ConversionError, federate
from fednorm.nn.sample_norm import SampleNorm
from fednorm.strategies import STRATEGIES
from support import nested_model

INPUTS = {
    nn.BatchNorm1d: (6, 4),
    nn.BatchNorm2d: (3, 4, 5, 5),
    nn.BatchNorm3d: (3, 4, 2, 3, 2),
    nn.SyncBatchNorm: (3, 4, 5),
}


class MyNorm(nn.BatchNorm2d):
    """A subclass that changes nothing of the forward pass."""


class Activated(nn.BatchNorm2d):
    def forward(self, input):  # noqa: A002
        return torch.relu(super().forward(input))


def layer_of(cls, **fields):
    layer = cls(4, **fields).double()
    with torch.no_grad():
        for tensor in layer.state_dict().values():
            if tensor.is_floating_point():
                tensor.uniform_(0.5, 2.0)
    return layer


@pytest.mark.parametrize("cls", INPUTS)
@pytest.mark.parametrize("fields", [{}, {"affine": False}, {"eps": 0.1, "momentum": None}])
def test_a_converted_layer_is_the_layer(cls, fields):
    layer = layer_of(cls, **fields)
    converted = federate(layer).model
    assert isinstance(converted, FedBatchNorm)
    assert isinstance(converted, cls)
    x = torch.randn(INPUTS[cls], dtype=torch.float64)
    plain = nn.SyncBatchNorm if cls is nn.SyncBatchNorm else cls
    reference = copy.deepcopy(layer)
    if plain is nn.SyncBatchNorm:  # its own forward pass wants a process group
        reference.__class__ = nn.BatchNorm1d
    for mode in (True, False):
        reference.train(mode)
        converted.train(mode)
        assert torch.equal(converted(x), reference(x))
    for key, value in reference.state_dict().items():
        assert torch.equal(converted.state_dict()[key], value)


def test_works_on_a_copy():
    model = nested_model()
    before = copy.deepcopy(model.state_dict())
    converted = federate(model).model
    for parameter in converted.parameters():
        parameter.data.zero_()
    assert not any(isinstance(m, FedBatchNorm) for m in model.modules())
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key])


def test_checkpoints_move_both_ways():
    model = nested_model()
    converted = federate(model).model
    assert list(converted.state_dict()) == list(model.state_dict())
    converted.load_state_dict(nested_model(1).state_dict(), strict=True)
    plain = nested_model(2)
    plain.load_state_dict(converted.state_dict(), strict=True)
    x = torch.randn(4, 1, 8, 8, dtype=torch.float64)
    assert torch.equal(plain.eval()(x), converted.eval()(x))
    assert torch.equal(plain(x), nested_model(1).eval()(x))


def test_finds_every_layer_whatever_its_name_and_place():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.x = nn.ModuleList([nn.ModuleDict({"y": nn.Sequential(nn.BatchNorm1d(2))})])
            self.tail = MyNorm(3)

    replaced = federate(Odd()).replaced
    assert {(r.path, r.before, r.after) for r in replaced} == {
        ("tail", "MyNorm", "FedBatchNorm2d"),
        ("x.0.y.0", "BatchNorm1d", "FedBatchNorm1d"),
    }
    paths = {r.path for r in federate(nested_model()).replaced}
    assert "blocks.1.downsample.1" in paths
    assert len(paths) == 6


def test_a_layer_in_two_places_is_converted_once_and_stays_shared():
    norm = nn.BatchNorm1d(3)
    conversion = federate(nn.Sequential(norm, nn.Linear(3, 3), norm))
    assert len(conversion.replaced) == 1
    assert conversion.model[0] is conversion.model[2]
    assert isinstance(conversion.model[2], FedBatchNorm)


def test_keeps_training_flag_gradient_flag_dtype_and_hooks():
    layer = nn.BatchNorm1d(3).half().eval()
    layer.weight.requires_grad_(requires_grad=False)
    calls = []
    layer.register_forward_hook(lambda *_: calls.append(1))
    converted = federate(layer).model
    assert not converted.training
    assert not converted.weight.requires_grad
    assert converted.weight.dtype is torch.float16
    converted.float()(torch.zeros(2, 3))
    assert calls == [1]


@pytest.mark.parametrize("name", ["gn", "ln", "in"])
def test_replacements_keep_affine_flag_and_dtype(name):
    model = nn.Sequential(layer_of(nn.BatchNorm2d, eps=0.2)).eval()
    norm = strategy(name).convert(model).model[0]
    assert isinstance(norm, SampleNorm)
    assert norm.num_groups == {"gn": 2, "ln": 1, "in": 4}[name]
    assert torch.equal(norm.weight, model[0].weight)
    assert torch.equal(norm.bias, model[0].bias)
    assert norm.weight is not model[0].weight
    assert norm.eps == 0.2
    assert not norm.training
    assert norm.weight.dtype is torch.float64


def test_replacements_are_the_norms_they_say():
    x = torch.randn(3, 4, 5, 5, dtype=torch.float64)
    bare = nn.Sequential(nn.BatchNorm2d(4)).double()
    functional = nn.functional
    expected = {
        "gn": functional.group_norm(x, 2),
        "ln": functional.layer_norm(x, x.shape[1:]),
        "in": functional.instance_norm(x),
        "none": x,
    }
    for name, value in expected.items():
        torch.testing.assert_close(strategy(name).convert(bare).model(x), value)


def test_groups_must_divide_the_channels():
    with pytest.raises(ConversionError, match=r"'0' has 6 channels, which 4 groups"):
        strategy("gn", groups=4).convert(nn.Sequential(nn.BatchNorm2d(6)))


@pytest.mark.parametrize(("name", "fields"), [("in", {}), ("gn", {"groups": 4})])
def test_one_value_per_group_is_refused_not_erased(name, fields):
    model = strategy(name, **fields).convert(nn.Sequential(nn.BatchNorm1d(4))).model
    with pytest.raises(ValueError, match="one value per group"):
        model(torch.randn(5, 4))


@pytest.mark.parametrize("name", sorted(set(STRATEGIES)))
def test_a_layer_with_its_own_forward_pass_is_refused_by_name(name):
    model = nn.Sequential(nn.Conv2d(1, 2, 1), nn.Sequential(Activated(2)))
    with pytest.raises(ConversionError, match=r"'1\.0' \(Activated\)"):
        strategy(name).convert(model)


def test_a_lazy_layer_is_refused_by_name():
    with pytest.raises(ConversionError, match=r"'0' \(LazyBatchNorm1d\) has no shape yet"):
        federate(nn.Sequential(nn.LazyBatchNorm1d()))


@pytest.mark.parametrize("name", ["fbn", "fixbn", "fedtan"])
def test_a_layer_without_statistics_is_refused_by_strategies_that_share_them(name):
    model = nn.Sequential(nn.BatchNorm1d(2, track_running_stats=False))
    with pytest.raises(ConversionError, match=r"'0' .* tracks no running statistics"):
        strategy(name).convert(model)


@pytest.mark.parametrize("name", sorted(set(STRATEGIES) - {"none"}))
def test_a_model_without_batch_norm_is_refused(name):
    with pytest.raises(ValueError, match="needs BatchNorm layers, but Sequential has none"):
        strategy(name).convert(nn.Sequential(nn.Linear(2, 2)))


def test_none_takes_a_model_without_batch_norm():
    assert strategy("none").convert(nn.Sequential(nn.Linear(2, 2))).replaced == ()


def test_momentum_of_the_layers_is_kept_unless_the_strategy_sets_it():
    model = nn.Sequential(nn.BatchNorm1d(2, momentum=0.3))
    assert strategy("fbn").convert(model).model[0].momentum == 0.3
    assert strategy("fbn", momentum=0.01).convert(model).model[0].momentum == 0.01
    assert strategy("fbn", momentum=None).convert(model).model[0].momentum is None


@pytest.mark.parametrize("momentum", [0, -0.1, 1.5])
def test_momentum_outside_its_range_is_refused(momentum):
    with pytest.raises(ValueError, match="momentum must be in"):
        strategy("fbn", momentum=momentum)
