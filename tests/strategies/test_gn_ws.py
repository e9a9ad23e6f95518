"""GN+WS: GroupNorm and standardised kernels together, and one machine's gradient."""

import pytest
import torch
from torch import nn

from fednorm import create_strategy
from fednorm.algorithms import create_algorithm
from fednorm.engines.merged_batch import MergedClients
from fednorm.nn.convert import SampleNorm
from fednorm.nn.weight_std import StandardizedConv2d
from support import ToyClients, last, nested_model, task_of


def test_is_group_norm_of_a_convolution_with_standardised_kernels():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).double()
    nn.init.uniform_(model[1].weight, 0.5, 2)
    x = torch.randn(2, 3, 6, 6, dtype=torch.float64)
    weight, bias = model[0].weight, model[0].bias
    kernels = torch.stack([(k - k.mean()) / (k.var(correction=0) + 1e-6).sqrt() for k in weight])
    convolved = nn.functional.conv2d(x, kernels, bias)
    expected = nn.functional.group_norm(convolved, 2, model[1].weight, model[1].bias, model[1].eps)
    torch.testing.assert_close(create_strategy("gn_ws").convert(model).model(x), expected)
    other = create_strategy("gn_ws", groups=4).convert(model).model(x)
    assert not torch.allclose(other, expected)


def test_replaces_every_norm_and_every_convolution():
    conversion = create_strategy("gn_ws").convert(nested_model())
    types = [type(m) for m in conversion.model.modules()]
    assert types.count(SampleNorm) == types.count(StandardizedConv2d) == 6
    assert not {nn.BatchNorm2d, nn.Conv2d} & set(types)
    assert len(conversion.replaced) == 12


def test_kernels_of_the_trained_model_stay_standardised():
    task = task_of("gn_ws", create_algorithm("dsgd", lr=0.5))
    last(task, ToyClients(), 5)
    for layer in task.model.modules():
        if isinstance(layer, StandardizedConv2d):
            kernels = layer.standardize_weight().flatten(1)
            assert torch.allclose(kernels.mean(1), torch.zeros_like(kernels[:, 0]), atol=1e-6)
            assert torch.allclose(
                kernels.var(1, correction=0), torch.ones_like(kernels[:, 0]), atol=1e-3
            )


def test_federated_equals_one_machine():
    clients, step = ToyClients(sizes=(2, 7, 1)), create_algorithm("dsgd", lr=0.05)
    federated, central = (
        last(task_of("gn_ws", step), c).state for c in (clients, MergedClients(clients))
    )
    for name, value in federated.weights.items():
        torch.testing.assert_close(value, central.weights[name], rtol=0, atol=1e-10)


def test_a_model_without_convolutions_is_refused():
    with pytest.raises(ValueError, match="GnWs needs convolutions, but Sequential has none"):
        create_strategy("gn_ws").convert(nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4)))


def test_groups_must_be_positive():
    with pytest.raises(ValueError, match="groups must be at least 1, not 0"):
        create_strategy("gn_ws", groups=0)
