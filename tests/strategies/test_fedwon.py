"""FedWon: the formula of its kernels, and clipping against a literal loop in both algorithms."""

import math

import pytest
import torch
from torch import nn

from fednorm import Memory, broadcast, client_round, strategy
from fednorm.algorithms import algorithm
from fednorm.data import load
from fednorm.data.batches import Plan
from fednorm.data.federation import federation
from fednorm.engines import lockstep
from fednorm.engines.centralized import Merged
from fednorm.nn.weight_std import StandardizedConv2d
from fednorm.strategies.fedwon import agc
from support import Toy, last, nested_model, task_of

LR = 0.05
BOTH = pytest.mark.parametrize("kind", ["dsgd", "fedavg"])


def two_headed():
    """Two linear layers, so that one of them is not the classifier."""
    torch.manual_seed(0)
    body = [nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(108, 5)]
    return nn.Sequential(*body, nn.ReLU(), nn.Linear(5, 4)).double()


def clipped_by_loop(gradient, weight, clip):
    """Section 4.1 of the AGC paper, unit after unit."""
    rows = []
    for g, w in zip(gradient, weight, strict=True):
        most = max(math.hypot(*w.flatten().tolist()), 1e-3)
        norm = math.hypot(*g.flatten().tolist())
        rows.append(clip * most / norm * g if norm / most > clip else g)
    return torch.stack(rows)


def gradients_of_first_round(kind, clip):
    task = task_of("fedwon", algorithm(kind, lr=LR), model=two_headed(), clip=clip)
    received = broadcast(task, task.initial_state)
    update = client_round(task, received, Memory(), Toy().batches(1, 1))[0].update
    scale = 1 if kind == "dsgd" else -1 / LR
    return {name: scale * value for name, value in update.items()}, received.weights


def test_kernels_follow_the_formula():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()).double()
    converted = strategy("fedwon").convert(model).model
    with torch.no_grad():
        converted[0].gain.uniform_(0.5, 2)
    x = torch.randn(2, 3, 6, 6, dtype=torch.float64)
    gamma = math.sqrt(2 / (1 - 1 / math.pi))
    kernels = torch.stack(
        [
            gamma * gain * (k - k.mean()) / (k.var(correction=0) * 27 + 1e-4).sqrt()
            for gain, k in zip(converted[0].gain, model[0].weight, strict=True)
        ]
    )
    expected = nn.functional.conv2d(x, kernels, model[0].bias).relu()
    torch.testing.assert_close(converted(x), expected)


def test_no_norm_is_left_and_every_convolution_has_a_gain():
    conversion = strategy("fedwon").convert(nested_model())
    convs = [m for m in conversion.model.modules() if isinstance(m, nn.Conv2d)]
    assert [type(m) for m in convs] == [StandardizedConv2d] * 6
    assert all(m.gain.shape == (m.out_channels,) for m in convs)
    assert not any(isinstance(m, nn.BatchNorm2d) for m in conversion.model.modules())
    assert len(conversion.replaced) == 12


def test_agc_is_the_literal_loop():
    generator = torch.Generator().manual_seed(0)
    for shape in ((5, 3), (4, 2, 3, 3), (1, 1)):
        g, w = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))
        g[0] *= 1e-3  # a unit that needs no clipping
        w[-1] *= 1e-9  # a unit whose own norm is too small to count
        for clip in (0.01, 0.5, 100.0):
            result = agc(g, w, clip)
            torch.testing.assert_close(result, clipped_by_loop(g, w, clip), rtol=1e-12, atol=0)
    assert torch.equal(agc(torch.zeros(2, 3), torch.zeros(2, 3), 0.1), torch.zeros(2, 3))


@BOTH
def test_clipping_acts_on_weights_of_convolutions_and_hidden_layers(kind):
    clip = 0.01
    plain, weights = gradients_of_first_round(kind, None)
    clipped, _ = gradients_of_first_round(kind, clip)
    for name in ("0.weight", "4.weight"):
        expected = clipped_by_loop(plain[name], weights[name], clip)
        assert not torch.allclose(expected, plain[name])
        torch.testing.assert_close(clipped[name], expected, rtol=0, atol=1e-11)
    for name in ("0.gain", "0.bias", "4.bias", "6.weight", "6.bias"):
        torch.testing.assert_close(clipped[name], plain[name], rtol=0, atol=1e-11)


@BOTH
def test_a_generous_clip_changes_nothing(kind):
    plain, _ = gradients_of_first_round(kind, None)
    clipped, _ = gradients_of_first_round(kind, 1e6)
    for name, value in plain.items():
        assert torch.equal(clipped[name], value)


def test_later_steps_clip_by_the_weights_of_that_step():
    """A by-hand run of local SGD; the hook must not remember the weights of the conversion."""
    clip, clients = 0.05, Toy(steps=3)
    task = task_of("fedwon", algorithm("fedavg", lr=LR), model=two_headed(), clip=clip)
    received = broadcast(task, task.initial_state)
    update = client_round(task, received, Memory(), clients.batches(0, 1))[0].update
    model = strategy("fedwon").convert(two_headed()).model
    for x, y in clients.batches(0, 1).steps:
        model.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                g = parameter.grad
                if name in ("0.weight", "4.weight"):
                    g = clipped_by_loop(g, parameter, clip)
                parameter.sub_(LR * g)
    for name, parameter in model.named_parameters():
        moved = parameter.detach() - received.weights[name]
        torch.testing.assert_close(update[name], moved, rtol=0, atol=1e-12)


def test_a_layer_in_two_places_is_clipped_once_by_its_whole_gradient():
    torch.manual_seed(0)
    conv = nn.Conv2d(1, 1, 3, padding=1)
    model = nn.Sequential(conv, nn.BatchNorm2d(1), conv, nn.Flatten(), nn.Linear(64, 4)).double()
    ((x, y),) = Toy().test(0)
    grads = []
    for clip in (None, 0.01):
        converted = strategy("fedwon", clip=clip).convert(model).model
        loss = nn.functional.cross_entropy(converted(x), y)
        grads.append(torch.autograd.grad(loss, converted[0].weight)[0])
    expected = clipped_by_loop(grads[0], model[0].weight, 0.01)
    torch.testing.assert_close(grads[1], expected, rtol=1e-10, atol=0)


def test_a_frozen_layer_stays_frozen():
    model = two_headed()
    model[0].requires_grad_(requires_grad=False)
    task = task_of("fedwon", algorithm("dsgd", lr=LR), model=model, clip=0.01)
    state = last(task, Toy(), 2).state
    for name in ("0.weight", "0.gain", "0.bias"):
        assert torch.equal(state.weights[name], task.initial_state.weights[name])


def test_federated_equals_one_machine():
    clients, step = Toy(sizes=(2, 7, 1)), algorithm("dsgd", lr=LR)
    federated, central = (
        last(task_of("fedwon", step), c).state for c in (clients, Merged(clients))
    )
    for name, value in federated.weights.items():
        torch.testing.assert_close(value, central.weights[name], rtol=0, atol=1e-10)


def test_lockstep_only_without_clipping():
    """Each client clips its own gradient; the mean of clipped gradients is another thing."""
    data = federation(load("digits", 0), "iid", Plan(20), clients=4, seed=0, participation=1.0)
    step = algorithm("dsgd", lr=LR)
    assert lockstep.fits(task_of("fedwon", step), data)
    assert not lockstep.fits(task_of("fedwon", step, clip=0.01), data)


@pytest.mark.parametrize("clip", [0, -0.1, float("nan")])
def test_clip_must_be_positive(clip):
    with pytest.raises(ValueError, match="clip must be positive"):
        strategy("fedwon", clip=clip)


def test_a_model_without_convolutions_is_refused():
    with pytest.raises(ValueError, match="FedWon needs convolutions, but Sequential has none"):
        strategy("fedwon").convert(nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4)))
