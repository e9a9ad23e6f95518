"""Conversion works on a copy, keeps what a layer has, and refuses by name what it cannot keep."""

import copy
import pickle
import warnings

import pytest
import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from fednorm import create_strategy
from fednorm.algorithms import create_algorithm
from fednorm.core.layer import NormLayer
from fednorm.core.task import Task
from fednorm.nn.batch_norm import FedBatchNorm, FedBatchNorm2d
from fednorm.nn.convert import ConversionError, SampleNorm, replace, to_fed_batch_norm
from fednorm.nn.folding import fold
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


every = pytest.mark.parametrize("name", sorted(STRATEGIES))


def converted_or_refused(name, model):
    """Convert a model; only strategies that look for more than BatchNorm may refuse it."""
    try:
        return create_strategy(name).convert(model)
    except (ConversionError, ValueError):
        if name not in {"fixup", "fedfn"}:
            raise
        return None


def layer_of(cls, **fields):
    layer = cls(4, **fields).double()
    with torch.no_grad():
        for tensor in layer.state_dict().values():
            if tensor.is_floating_point():
                tensor.uniform_(0.5, 2.0)
    return layer


@pytest.mark.parametrize("cls", INPUTS)
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"affine": False},
        {"track_running_stats": False},
        {"affine": False, "track_running_stats": False},
        {"eps": 0.1, "momentum": None},
    ],
)
def test_a_converted_layer_is_the_layer(cls, fields):
    layer = layer_of(cls, **fields)
    converted = to_fed_batch_norm(layer).model
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
    converted = to_fed_batch_norm(model).model
    for parameter in converted.parameters():
        parameter.data.zero_()
    assert not any(isinstance(m, FedBatchNorm) for m in model.modules())
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key])


def test_checkpoints_move_both_ways():
    model = nested_model()
    converted = to_fed_batch_norm(model).model
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

    replaced = to_fed_batch_norm(Odd()).replaced
    assert {(r.path, r.before, r.after) for r in replaced} == {
        ("tail", "MyNorm", "FedMyNorm"),
        ("x.0.y.0", "BatchNorm1d", "FedBatchNorm1d"),
    }
    paths = {r.path for r in to_fed_batch_norm(nested_model()).replaced}
    assert "blocks.1.downsample.1" in paths
    assert len(paths) == 6


def is_converted(module):
    return isinstance(module, NormLayer) or not isinstance(module, _BatchNorm)


@every
def test_a_layer_in_two_places_is_converted_once_and_stays_shared(name):
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.fc = nn.BatchNorm2d(4), nn.Linear(4, 4)
            self.parts = nn.Sequential(nn.Conv2d(3, 4, 3), self.norm, nn.ReLU(), self.norm)

        def forward(self, x):
            return self.fc(self.parts(x).mean((2, 3)))

    conversion = converted_or_refused(name, Twice())
    if conversion is not None:
        model = conversion.model
        assert [r.path for r in conversion.replaced].count("norm") == 1
        assert "parts.1" not in [r.path for r in conversion.replaced]
        assert model.norm is model.parts[1] is model.parts[3]
        assert is_converted(model.norm)


@every
def test_layers_in_plain_lists_beside_the_registered_ones_follow(name):
    class Legacy(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.fc = nn.Conv2d(3, 4, 3), nn.Linear(4, 4)
            self.norms, self.by_name = [], {"pair": ()}
            for i in range(2):
                norm = nn.BatchNorm2d(4)
                self.add_module(f"norm{i}", norm)
                self.norms.append(norm)
            self.by_name["pair"] = tuple(self.norms)

        def forward(self, x):
            return self.fc(self.norms[1](self.norms[0](self.conv(x))).mean((2, 3)))

    conversion = converted_or_refused(name, Legacy())
    if conversion is not None:
        model = conversion.model
        assert model.norms == [model.norm0, model.norm1] == list(model.by_name["pair"])
        assert all(is_converted(norm) for norm in model.norms)
        assert conversion.skipped == ()


def test_a_layer_that_torch_does_not_know_is_kept_and_reported():
    class Hiding(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(2)
            self.teacher = [nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))]

    conversion = to_fed_batch_norm(Hiding())
    (kept,) = conversion.skipped
    assert (kept.path, kept.type) == ("teacher", "BatchNorm1d")
    assert "not registered" in kept.reason
    assert [r.path for r in conversion.replaced] == ["norm"]


def test_keeps_training_flag_gradient_flag_dtype_and_hooks():
    layer = nn.BatchNorm1d(3).half().eval()
    layer.weight.requires_grad_(requires_grad=False)
    calls = []
    layer.register_forward_hook(lambda *_: calls.append(1))
    converted = to_fed_batch_norm(layer).model
    assert not converted.training
    assert not converted.weight.requires_grad
    assert converted.weight.dtype is torch.float16
    converted.float()(torch.zeros(2, 3))
    assert calls == [1]


@every
def test_hooks_and_flags_of_every_module_are_kept(name):
    model = nested_model()
    calls = []
    norm = model.get_submodule("blocks.1.downsample.1")
    norm.register_forward_hook(lambda *_: calls.append("after"))
    norm.register_forward_pre_hook(lambda *_: calls.append("before"))
    norm.weight.requires_grad_(requires_grad=False)
    model.blocks[0].eval()
    model.stem[0].requires_grad_(requires_grad=False)
    converted = create_strategy(name).convert(model).model
    for path, module in model.named_modules():
        assert converted.get_submodule(path).training == module.training, path
    learning = dict(converted.named_parameters())
    for path, parameter in model.named_parameters():
        if path in learning:
            assert learning[path].requires_grad == parameter.requires_grad, path
    assert all(p.dtype is torch.float64 for p in learning.values())
    converted.eval()(torch.randn(2, 1, 8, 8, dtype=torch.float64))
    assert calls == ["before", "after"]


@pytest.mark.parametrize("name", ["gn", "ln", "in"])
def test_replacements_keep_affine_flag_and_dtype(name):
    model = nn.Sequential(layer_of(nn.BatchNorm2d, eps=0.2)).eval()
    norm = create_strategy(name).convert(model).model[0]
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
        torch.testing.assert_close(create_strategy(name).convert(bare).model(x), value)


def test_groups_must_divide_the_channels():
    with pytest.raises(
        ConversionError, match=r"'0' has 6 channels, which 4 groups .* round_down=True"
    ):
        create_strategy("gn", groups=4).convert(nn.Sequential(nn.BatchNorm2d(6)))


@pytest.mark.parametrize(
    ("channels", "groups", "taken"), [(6, 4, 3), (7, 4, 1), (8, 4, 4), (3, 8, 3), (1, 2, 1)]
)
def test_groups_may_be_fitted_and_the_report_says_so(channels, groups, taken):
    model = nn.Sequential(nn.BatchNorm2d(channels))
    conversion = create_strategy("gn", groups=groups, round_down=True).convert(model)
    assert conversion.model[0].num_groups == taken
    (replacement,) = conversion.replaced
    said = "" if taken == groups else f"{groups} groups do not divide {channels} channels"
    assert said in replacement.note
    assert bool(said) == bool(replacement.note)


def test_the_report_says_where_gamma_and_beta_are_lost():
    layers = [layer_of(nn.BatchNorm2d), nn.BatchNorm2d(4, affine=False), layer_of(nn.BatchNorm2d)]
    layers[2].bias = None
    model = nn.Sequential(*layers)
    notes = [r.note for r in create_strategy("none").convert(model).replaced]
    assert notes == ["γ and β are dropped", "", "γ is dropped"]
    for name in ("naive", "gn", "ln", "in"):
        assert [r.note for r in create_strategy(name).convert(model).replaced] == ["", "", ""]


@pytest.mark.parametrize(("name", "fields"), [("in", {}), ("gn", {"groups": 4})])
def test_one_value_per_group_is_refused_not_erased(name, fields):
    model = create_strategy(name, **fields).convert(nn.Sequential(nn.BatchNorm1d(4))).model
    with pytest.raises(ValueError, match="one value per group"):
        model(torch.randn(5, 4))


class Doubled(FedBatchNorm2d):
    """A plug-in's layer, with the tensors of torch's."""

    def forward(self, input):  # noqa: A002 (torch's own name)
        return 2 * super().forward(input)


def test_a_layer_of_another_kind_with_the_same_keys_is_marked():
    def make(_, layer):
        layer.__class__ = Doubled
        return layer

    plain = nested_model()
    converted = replace(plain, make).model
    for model in (converted, pickle.loads(pickle.dumps(fold(converted)))):  # noqa: S301 (its own)
        with pytest.raises(RuntimeError, match=r"Unexpected key.*is_no_batch_norm"):
            plain.load_state_dict(model.state_dict())
        model.load_state_dict(model.state_dict())
        model.load_state_dict(plain.state_dict())  # plain weights are a start


def test_a_lazy_layer_is_refused_by_name():
    with pytest.raises(ConversionError, match=r"'0' \(LazyBatchNorm1d\) has no shape yet"):
        to_fed_batch_norm(nn.Sequential(nn.LazyBatchNorm1d()))


def test_a_lazy_layer_without_tensors_is_refused_too():
    lazy = nn.LazyBatchNorm1d(affine=False, track_running_stats=False)
    with pytest.raises(ConversionError, match="no shape yet"):
        to_fed_batch_norm(nn.Sequential(lazy))


def test_a_lazy_layer_that_has_run_is_converted():
    model = nn.Sequential(nn.LazyBatchNorm1d())
    model(torch.randn(3, 2))
    assert isinstance(to_fed_batch_norm(model).model[0], FedBatchNorm)


def test_a_scripted_model_is_refused():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        model = nn.Sequential(torch.jit.script(nn.Sequential(nn.BatchNorm1d(2))))
    with pytest.raises(ConversionError, match=r"'0' \(RecursiveScriptModule\) is compiled"):
        to_fed_batch_norm(model)


def test_a_model_that_cannot_be_copied_is_refused():
    model = nn.Sequential(nn.BatchNorm1d(2))
    model.cached = model[0].weight * 2
    with pytest.raises(ConversionError, match="Sequential cannot be copied"):
        to_fed_batch_norm(model)


@pytest.mark.parametrize("name", ["fbn", "fixbn", "fedtan"])
def test_a_layer_without_statistics_is_refused_by_strategies_that_share_them(name):
    model = nn.Sequential(nn.BatchNorm1d(2, track_running_stats=False))
    with pytest.raises(ConversionError, match=r"'0' .* tracks no running statistics"):
        create_strategy(name).convert(model)


PLAIN = {"none", "naive", "fedfn"}  # strategies that need no normalization layers


@pytest.mark.parametrize("name", sorted(set(STRATEGIES) - PLAIN))
def test_a_model_without_batch_norm_is_refused(name):
    with pytest.raises(ValueError, match="needs BatchNorm layers, but Sequential has none"):
        create_strategy(name).convert(nn.Sequential(nn.Linear(2, 2)))


@pytest.mark.parametrize("name", ["none", "naive"])
def test_a_model_without_batch_norm_is_trained_as_it_is(name):
    assert create_strategy(name).convert(nn.Sequential(nn.Linear(2, 2))).replaced == ()


def test_fedbn_takes_a_model_with_other_normalization_layers():
    create_strategy("fedbn").convert(nn.Sequential(nn.Linear(2, 2), nn.RMSNorm(2)))
    with pytest.raises(ValueError, match="FedBN needs BatchNorm layers, but Sequential has none"):
        create_strategy("fedbn").convert(nn.Sequential(nn.LayerNorm(2, elementwise_affine=False)))


def test_the_error_says_which_layers_fedbn_would_keep():
    with pytest.raises(ValueError, match=r"'naive'.*'fedbn', whose clients keep LayerNorm, or"):
        create_strategy("fbn").convert(nn.Sequential(nn.LayerNorm(2)))


def test_momentum_of_the_layers_is_kept_unless_the_strategy_sets_it():
    model = nn.Sequential(nn.BatchNorm1d(2, momentum=0.3))
    assert create_strategy("fbn").convert(model).model[0].momentum == 0.3
    assert create_strategy("fbn", stats_momentum=0.01).convert(model).model[0].momentum == 0.01
    assert create_strategy("fbn", stats_momentum=None).convert(model).model[0].momentum is None


@pytest.mark.parametrize("momentum", [0, -0.1, 1.5])
def test_momentum_outside_its_range_is_refused(momentum):
    with pytest.raises(ValueError, match="momentum must be in"):
        create_strategy("fbn", stats_momentum=momentum)


def test_a_conversion_tells_in_words_what_it_did():
    def describe(name, **fields):
        layers = [
            nn.Linear(64, 6),
            nn.BatchNorm1d(6),
            nn.InstanceNorm1d(6, track_running_stats=True),
        ]
        model = nn.Sequential(nn.Flatten(), *layers, nn.BatchNorm1d(6), nn.Linear(6, 4))
        chosen = create_strategy(name, **fields)
        *told, skipped = Task.build(model, chosen, create_algorithm("dsgd")).conversion_notes
        assert skipped.startswith("skipped '3' (InstanceNorm1d): it is not a BatchNorm layer")
        return told

    assert describe("fbn") == ["2 layers BatchNorm1d → FedBatchNorm1d"]
    assert describe("gn") == ["2 layers BatchNorm1d → GroupNorm(2 groups)"]
    assert describe("ln") == ["2 layers BatchNorm1d → LayerNorm"]
    assert describe("in") == ["2 layers BatchNorm1d → InstanceNorm"]
    assert describe("gn", groups=4, round_down=True) == [
        "2 layers BatchNorm1d → GroupNorm(3 groups)",
        "2 layers: 4 groups do not divide 6 channels",
    ]
    assert describe("none") == ["2 layers BatchNorm1d → Removed", "2 layers: γ and β are dropped"]
    assert describe("fedfn", base="ln") == [
        "2 layers BatchNorm1d → LayerNorm",
        "1 layer Linear → DirectionLinear",
    ]
