"""A folded model computes what the converted one does in evaluation, with torch's layers."""

import copy
import pickle
import threading

import pytest
import torch
from torch import nn

from fednorm.algorithms import create_algorithm
from fednorm.core.layer import NormLayer
from fednorm.core.task import export
from fednorm.nn.folding import fold
from fednorm.nn.weight_std import StandardizedConv, standardize
from fednorm.strategies import STRATEGIES
from nn.test_users_layers import BatchNormAct2d, Flexible, Positive, model_with
from support import ToyClients, last, nested_model, task_of

LOCAL = create_algorithm("fedavg", lr=0.05)
OTHER_KEYS = {"gn", "ln", "in", "gn_ws", "none", "fedwon", "fixup", "switchnorm", "fedfn"}
CONVS = [nn.Conv1d, nn.Conv2d, nn.Conv3d]
OTHER_LAYERS = {"fixup", "switchnorm", "none", "fedwon", "fedfn"}


def biased_model():
    """The nested model with a bias in every convolution, which is not 0."""
    model = nested_model()
    for layer in model.modules():
        if isinstance(layer, nn.Conv2d):
            layer.bias = nn.Parameter(torch.linspace(-1, 1, layer.out_channels).double())
    return model


def train(name, model, **fields):
    """Return the workspace after two rounds, and a batch."""
    task = task_of(name, LOCAL, model=model, count=2, **fields)
    clients = ToyClients(sizes=(5, 3, 8), steps=2, absent={2: (1,)})
    result = last(task, clients, 2)
    return export(task, result.state, result.client_states.get(2)), clients.test(2)[0][0]


def is_ours(layer):
    return type(layer).__module__.startswith("fednorm") and not list(layer.children())


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(STRATEGIES))
@pytest.mark.parametrize("make", [nested_model, biased_model])
def test_outputs_are_the_same(name, make):
    plain = make()
    model, x = train(name, make())
    before = copy.deepcopy(model.state_dict())
    expected, folded = model(x), fold(model)
    torch.testing.assert_close(folded(x), expected, rtol=0, atol=1e-12)
    assert not any(part.training for part in folded.modules())
    assert any(is_ours(layer) for layer in folded.modules()) == (name in OTHER_LAYERS)
    assert (set(folded.state_dict()) == set(plain.state_dict())) == (name not in OTHER_KEYS)
    # The model that was folded is what it was.
    assert all(torch.equal(tensor, before[key]) for key, tensor in model.state_dict().items())
    assert torch.equal(model(x), expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["naive", "fbn", "fixbn", "dualbn", "brn", "switchnorm"])
def test_standardized_weights_become_plain_ones(name):
    model, x = train(name, biased_model(), weight_standardization=True)
    assert sum(isinstance(layer, StandardizedConv) for layer in model.modules()) > 3
    folded = fold(model)
    assert not any(isinstance(layer, StandardizedConv) for layer in folded.modules())
    torch.testing.assert_close(folded(x), model(x), rtol=0, atol=1e-12)
    if name != "switchnorm":
        plain = biased_model().eval()
        plain.load_state_dict(folded.state_dict())
        torch.testing.assert_close(plain(x), model(x), rtol=0, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fbn", "hbn", "alignbn", "dualbn", "gn_ws", "fedfn"])
def test_folding_twice_changes_nothing(name):
    once = fold(train(name, biased_model())[0])
    again = fold(once)
    assert [type(m) for m in again.modules()] == [type(m) for m in once.modules()]
    assert list(again.state_dict()) == list(once.state_dict())
    assert all(torch.equal(t, once.state_dict()[k]) for k, t in again.state_dict().items())


@pytest.mark.slow
@pytest.mark.parametrize("layer", [BatchNormAct2d(4), Positive(4), Flexible(4)])
@pytest.mark.parametrize("name", ["fbn", "hbn", "alignbn", "dualbn"])
def test_users_classes_come_back(name, layer):
    plain = model_with(layer)
    model, x = train(name, plain)
    folded = fold(model)
    torch.testing.assert_close(folded(x), model(x), rtol=0, atol=1e-12)
    assert not any(isinstance(part, NormLayer) for part in folded.modules())
    assert isinstance(folded[1], nn.modules.batchnorm._BatchNorm)
    assert type(folded[1]) is type(layer) or isinstance(layer, BatchNormAct2d)
    plain.load_state_dict(folded.state_dict())
    torch.testing.assert_close(plain.eval()(x), model(x), rtol=0, atol=1e-12)
    torch.testing.assert_close(
        pickle.loads(pickle.dumps(folded))(x),  # noqa: S301 (its own)
        model(x),
    )


def test_a_layer_that_activates_keeps_its_activation_over_group_norm():
    model, x = train("gn", model_with(BatchNormAct2d(4)))
    folded = fold(model)
    assert isinstance(folded[1], nn.GroupNorm)
    assert folded[1].act is not model[1].act
    assert torch.equal(folded(x), model(x))


@pytest.mark.parametrize("cls", CONVS)
def test_a_convolution_becomes_torch_s_with_the_same_tensors(cls):
    settings = {"scale_by_fan_in": True, "eps": 1e-4, "gain": True, "bias": True}
    conv = cls(4, 6, 3, groups=2, padding=1, padding_mode="reflect").double()
    conv.weight.requires_grad_(requires_grad=False)
    converted = standardize(nn.Sequential(conv), **settings).model.eval()
    with torch.no_grad():
        converted[0].gain.copy_(torch.rand(6) + 1)
    folded = fold(converted)
    assert type(folded[0]) is cls
    assert list(folded.state_dict()) == ["0.weight", "0.bias"]
    assert not folded[0].weight.requires_grad
    assert folded[0].bias.requires_grad
    x = torch.randn(2, 4, *[7] * (CONVS.index(cls) + 1), dtype=torch.float64)
    assert torch.equal(folded(x), converted(x))


def test_a_kernel_of_two_layers_is_folded_in_each():
    settings = {"scale_by_fan_in": False, "eps": 1e-6, "gain": False, "bias": False}
    first, second = nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 3)
    second.weight = first.weight
    converted = standardize(nn.Sequential(first, second).double(), **settings).model.eval()
    x = torch.randn(2, 4, 7, 7, dtype=torch.float64)
    torch.testing.assert_close(fold(converted)(x), converted(x), rtol=0, atol=1e-12)


def test_what_a_layer_refers_to_in_a_round_is_not_copied():
    model, x = train("fbn", nested_model())
    for layer in model.modules():
        if isinstance(layer, NormLayer):
            layer.recorder.context.exchange = threading.Lock()  # as an engine's barrier has
    folded = fold(model)
    assert torch.equal(folded(x), model(x))
    assert not any("recorder" in vars(layer) for layer in folded.modules())


def test_a_plain_model_is_copied():
    plain = nested_model()
    folded = fold(plain)
    assert folded is not plain
    assert plain.training
    assert not folded.training
    x = torch.randn(2, 1, 8, 8, dtype=torch.float64)
    assert torch.equal(folded(x), plain.eval()(x))
