"""Standardised convolutions against loops over their kernels, in float64."""

import copy
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils import parametrizations

from fednorm.models import create_model
from fednorm.nn.convert import ConversionError, to_fed_batch_norm
from fednorm.nn.folding import fold
from fednorm.nn.weight_std import RELU_GAMMA, StandardizedConv, StandardizedConv2d, standardize
from fednorm.strategies import create_strategy
from support import nested_model

CONVS = [nn.Conv1d, nn.Conv2d, nn.Conv3d]
GN_WS = {"scale_by_fan_in": False, "eps": 1e-6, "gain": False, "bias": True}
FEDWON = {"scale_by_fan_in": True, "eps": 1e-4, "gain": True, "bias": True}
DUALBN = {"scale_by_fan_in": True, "eps": 1e-6, "gain": False, "bias": False}
VARIANTS = [GN_WS, FEDWON, DUALBN]


def explicit(weight, gain, settings):
    """The formula, one output channel after the other."""
    kernels = []
    for channel, kernel in enumerate(weight):
        fan_in = kernel.numel()
        mean = kernel.sum() / fan_in
        var = ((kernel - mean) ** 2).sum() / fan_in
        scale = fan_in if settings["scale_by_fan_in"] else 1
        made = (kernel - mean) / torch.sqrt(var * scale + settings["eps"])
        kernels.append(
            made if gain is None else math.sqrt(2 / (1 - 1 / math.pi)) * gain[channel] * made
        )
    return torch.stack(kernels)


def conv_of(cls, **fields):
    torch.manual_seed(0)
    return cls(4, 6, 3, **fields).double()


def sample(cls, channels=4):
    return torch.randn(2, channels, *[7] * (CONVS.index(cls) + 1), dtype=torch.float64)


def compute(cls, x, weight, bias, **fields):
    """Torch's own convolution with an explicit weight."""
    plain = cls(x.shape[1], len(weight), 3, bias=bias is not None, **fields).double()
    tensors = {"weight": weight} if bias is None else {"weight": weight, "bias": bias}
    return torch.func.functional_call(plain, tensors, x)


@pytest.mark.slow
@pytest.mark.parametrize("cls", CONVS)
@pytest.mark.parametrize("settings", VARIANTS)
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"bias": False},
        {"groups": 2, "stride": 2},
        {"padding": 2, "padding_mode": "circular"},
        {"padding": "same", "padding_mode": "replicate", "dilation": 2},
    ],
)
def test_output_and_gradients_are_those_of_the_formula(cls, settings, fields):
    layer = standardize(conv_of(cls, **fields), **settings).model
    gain = layer.gain if settings["gain"] else None
    if gain is not None:
        with torch.no_grad():
            gain.uniform_(0.5, 2.0)
    bias = layer.bias if settings["bias"] else None
    x, learned = (
        sample(cls).requires_grad_(),
        [p for p in (layer.weight, gain, bias) if p is not None],
    )
    kernels = explicit(layer.weight, gain, settings)
    expected = compute(cls, x, kernels, bias, **{k: v for k, v in fields.items() if k != "bias"})
    y = layer(x)
    torch.testing.assert_close(layer.standardize_weight(), kernels, rtol=0, atol=1e-12)
    torch.testing.assert_close(y, expected, rtol=0, atol=1e-12)
    weights = torch.randn_like(y)
    ours = torch.autograd.grad((y * weights).sum(), [x, *learned])
    theirs = torch.autograd.grad((expected * weights).sum(), [x, *learned])
    for one, two in zip(ours, theirs, strict=True):
        assert two.abs().max() > 1e-3
        torch.testing.assert_close(one, two, rtol=1e-9, atol=1e-10)


@given(
    channels=st.integers(1, 5),
    groups=st.sampled_from([1, 2]),
    kernel=st.integers(1, 3),
    seed=st.integers(0, 9),
)
def test_kernels_have_mean_0_and_variance_1_or_norm_1(channels, groups, kernel, seed):
    torch.manual_seed(seed)
    conv = nn.Conv2d(channels * groups, 3 * groups, kernel, groups=groups).double()
    if channels * kernel == 1:
        with pytest.raises(ConversionError, match="one weight per output channel"):
            standardize(conv, **GN_WS)
        return
    tight = {"eps": 1e-14, "gain": False, "bias": True}
    for scale, of in (
        (False, lambda k: k.var(dim=1, correction=0)),
        (True, lambda k: k.norm(dim=1)),
    ):
        kernels = standardize(conv, scale_by_fan_in=scale, **tight).model.standardize_weight()
        kernels = kernels.flatten(1)
        torch.testing.assert_close(
            kernels.mean(1), torch.zeros_like(kernels[:, 0]), rtol=0, atol=1e-7
        )
        torch.testing.assert_close(of(kernels), torch.ones_like(kernels[:, 0]), rtol=0, atol=1e-7)


def test_gamma_keeps_the_variance_through_a_relu():
    x = torch.randn(1_000_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert float((RELU_GAMMA * x.relu()).var()) == pytest.approx(1, abs=5e-3)


@pytest.mark.parametrize("settings", VARIANTS)
def test_works_on_a_copy_and_keeps_what_is_there(settings):
    model = nested_model().eval()
    model.stem[0].weight.requires_grad_(requires_grad=False)
    calls = []
    model.stem[0].register_forward_hook(lambda *_: calls.append(1))
    before = copy.deepcopy(model.state_dict())
    conversion = standardize(model, **settings)
    convs = {path for path, m in model.named_modules() if isinstance(m, nn.Conv2d)}
    assert len(convs) == 6
    assert {(r.path, r.before, r.after) for r in conversion.replaced} == {
        (path, "Conv2d", "StandardizedConv2d") for path in convs
    }
    converted = conversion.model
    converted(torch.zeros(2, 1, 8, 8, dtype=torch.float64))
    assert calls == [1]
    assert not converted.training
    gains = {f"{path}.gain" for path in convs} if settings["gain"] else set()
    state = converted.state_dict()
    marks = {key for key, value in state.items() if not value.numel()}
    assert marks == {f"{path}.standardizes_its_weight_save_fednorm_fold" for path in convs}
    assert set(state) == set(before) | gains | marks
    assert all(torch.equal(state[key], value) for key, value in before.items())
    assert all(state[key].dtype is torch.float64 and bool((state[key] == 1).all()) for key in gains)
    trained = [p.requires_grad for p in converted.stem[0].parameters()]
    assert trained == [False] * len(trained)
    for parameter in converted.parameters():
        parameter.data.zero_()
    assert all(torch.equal(model.state_dict()[key], value) for key, value in before.items())
    assert not any(isinstance(m, StandardizedConv) for m in model.modules())


@pytest.mark.parametrize("strategy", [{"name": "fbn", "weight_standardization": True}, "dualbn"])
def test_the_state_of_a_converted_model_is_refused_by_the_plain_one(strategy):
    fields = {"name": strategy} if isinstance(strategy, str) else dict(strategy)
    plain = nested_model()
    converted = create_strategy(fields.pop("name"), **fields).convert(plain).model
    with pytest.raises(
        RuntimeError, match=r"Unexpected .*standardizes_its_weight_save_fednorm_fold"
    ):
        plain.load_state_dict(converted.state_dict())
    plain.load_state_dict(fold(converted).state_dict())
    converted.load_state_dict(plain.state_dict())  # plain weights are a start
    converted.load_state_dict(converted.state_dict())


def test_comes_after_another_conversion():
    converted = standardize(to_fed_batch_norm(nested_model()).model, **DUALBN).model
    assert type(converted.stem[0]) is StandardizedConv2d
    assert type(converted.stem[1]).__name__ == "FedBatchNorm2d"
    x = torch.randn(3, 1, 8, 8, dtype=torch.float64)
    assert torch.isfinite(converted(x)).all()


def test_a_layer_in_two_places_is_converted_once_and_stays_shared():
    conv = nn.Conv2d(2, 2, 3)
    conversion = standardize(nn.Sequential(conv, nn.ReLU(), conv), **FEDWON)
    assert [r.path for r in conversion.replaced] == ["0"]
    assert conversion.model[0] is conversion.model[2]
    assert len(list(conversion.model.parameters())) == 3


def test_a_transposed_convolution_is_left_alone():
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.ConvTranspose2d(4, 2, 3))
    conversion = standardize(model, **GN_WS)
    assert [r.path for r in conversion.replaced] == ["0"]
    assert type(conversion.model[1]) is nn.ConvTranspose2d


class Gated(nn.Conv2d):
    def forward(self, input):  # noqa: A002
        return torch.sigmoid(super().forward(input))


class Doubled(nn.Conv2d):
    def _conv_forward(self, input, weight, bias):  # noqa: A002
        return super()._conv_forward(input, 2 * weight, bias)


class Renamed(nn.Conv2d):
    """A subclass that changes nothing of the forward pass."""


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (Gated(2, 2, 3), r"'0\.0' \(Gated\) is a convolution with a custom forward pass"),
        (Doubled(2, 2, 3), r"'0\.0' \(Doubled\) is a convolution with a custom forward pass"),
        (
            parametrizations.weight_norm(nn.Conv2d(2, 2, 3)),
            r"'0\.0' .* a parametrization, which a conversion",
        ),
        (standardize(nn.Conv2d(2, 2, 3), **GN_WS).model, r"'0\.0' \(StandardizedConv2d\)"),
        (nn.LazyConv2d(2, 3), r"'0\.0' \(LazyConv2d\) has no shape yet"),
        (nn.Conv2d(4, 4, 1, groups=4), r"'0\.0' \(Conv2d\) has one weight per output channel"),
    ],
)
def test_what_would_be_lost_is_refused_by_name(layer, message):
    with pytest.raises(ConversionError, match=message):
        standardize(nn.Sequential(nn.Sequential(layer)), **GN_WS)


def test_a_subclass_that_only_has_another_name_is_taken():
    assert standardize(Renamed(2, 2, 3), **GN_WS).replaced[0].before == "Renamed"


def head_behind_norms():
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 3, 1), nn.Flatten()
    )


@pytest.mark.parametrize(
    ("name", "fields"),
    [("gn_ws", {}), ("dualbn", {}), ("naive", {"weight_standardization": True})],
)
def test_convolutions_behind_the_last_norm_stay_as_they_are(name, fields):
    """Nothing would undo their scale, nor take their bias out."""
    plain = head_behind_norms()
    converted = create_strategy(name, **fields).convert(plain).model
    assert isinstance(converted[0], StandardizedConv)
    assert type(converted[3]) is nn.Conv2d
    x = torch.randn(2, 4, 5, 5)
    torch.testing.assert_close(converted[3](x), plain[3](x))


def test_a_segmentation_networks_classifier_is_not_standardised():
    model = create_model("deeplabv3plus", (3, 32, 32), 5, 0)
    convs = [(p, m) for p, m in model.named_modules() if isinstance(m, nn.Conv2d)]
    path, _ = convs[-1]
    assert type(create_strategy("gn_ws").convert(model).model.get_submodule(path)) is nn.Conv2d
