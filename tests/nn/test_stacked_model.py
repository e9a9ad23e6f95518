"""Stacked models: what is changed about their layers changes no number."""

import torch
from torch import nn

from fednorm.nn.stacked_model import count_activations, widen


def network(*layers):
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), *layers).double()


def outputs(model, x):
    x = x.clone().requires_grad_()
    y = model(x)
    weights = torch.linspace(1, 2, y.numel(), dtype=y.dtype).view(y.shape)
    return y, *torch.autograd.grad((y * weights).sum(), [x, *model.parameters()])


def test_pooling_before_relu_gives_the_same_values_and_gradients():
    model = network(nn.ReLU(), nn.MaxPool2d(2))
    model[0].weight.data.round_(decimals=0)  # whole numbers: many maxima are shared, many are 0
    model[0].weight.data[0] = 1.0
    model[0].bias.data.zero_()
    swapped = widen(model, 1)
    assert [type(layer) for layer in swapped] == [nn.Conv2d, nn.MaxPool2d, nn.ReLU]
    x = torch.randint(-1, 2, (5, 2, 8, 8), generator=torch.Generator().manual_seed(1)).double()
    before = model[:2](x)
    assert (before == 0).any()
    assert all(
        torch.equal(a, b) for a, b in zip(outputs(model, x), outputs(swapped, x), strict=True)
    )


def test_layers_with_hooks_or_that_do_not_commute_stay():
    watched = network(nn.ReLU(), nn.MaxPool2d(2))
    watched[1].register_forward_hook(lambda *_: None)
    for model in (
        watched,
        network(nn.ReLU(), nn.AvgPool2d(2)),
        network(nn.GELU(), nn.MaxPool2d(2)),
    ):
        assert [type(a) for a in widen(model, 2)] == [type(a) for a in model]


def test_counting_activations_leaves_modes_and_hooks():
    model = nn.Sequential(nn.Linear(3, 5), nn.Dropout(), nn.BatchNorm1d(5)).train()
    model[1].eval()
    assert count_activations(model, torch.ones(4, 3)) == 60
    assert [layer.training for layer in model] == [True, False, True]
    assert not any(layer._forward_hooks for layer in model)
    assert int(model[2].num_batches_tracked) == 0
