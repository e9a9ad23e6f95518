"""heterofl, hbn and fedfn."""

import pytest
import torch
from torch import nn
from torch.nn import functional

import fednorm
from fednorm import create_strategy
from fednorm.algorithms import create_algorithm
from fednorm.core.task import export
from fednorm.engines.evaluation import calibrate_for_test
from fednorm.nn.batch_norm import FedBatchNorm
from fednorm.nn.hybrid_norm import add_mixing, normalize_hybrid
from support import ToyClients, last, nested_model, task_of

STEP = create_algorithm("dsgd", lr=0.05)


def test_heterofl_statistics_are_torchs_cumulative_average_over_all_batches():
    clients = ToyClients(sizes=(3, 6, 4))
    task = task_of("heterofl", STEP)
    result = last(task, clients, 5)
    assert all(torch.equal(r.var, torch.ones_like(r.var)) for r in result.state.running.values())
    final = calibrate_for_test(task, result.state, result.client_states, clients)
    model = nested_model().train()
    model.load_state_dict(export(task, result.state).state_dict())
    for layer in model.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.momentum = None
            layer.reset_running_stats()
    for client in range(3):
        for x, _ in clients.all_batches(client).steps:
            model(x)
    expected = model.state_dict()
    for path, running in final.running.items():
        mean, var = expected[f"{path}.running_mean"], expected[f"{path}.running_var"]
        torch.testing.assert_close(running.mean, mean, rtol=0, atol=1e-12)
        torch.testing.assert_close(running.var, var, rtol=0, atol=1e-12)


def test_heterofl_can_pool_the_moments_of_all_values():
    clients = ToyClients(sizes=(3, 6, 4))
    task = task_of("heterofl", STEP, statistics="pool")
    result = last(task, clients, 5)
    final = calibrate_for_test(task, result.state, result.client_states, clients)
    model, seen = nested_model().train(), {}
    model.load_state_dict(export(task, result.state).state_dict())
    for path, layer in model.named_modules():
        if isinstance(layer, nn.BatchNorm2d):
            seen[path] = []
            layer.register_forward_pre_hook(
                lambda _, x, seen=seen[path]: seen.append(x[0].detach())
            )
    for client in range(3):
        for x, _ in clients.all_batches(client).steps:
            model(x)
    for path, inputs in seen.items():
        values = torch.cat(inputs).transpose(0, 1).flatten(1)
        running = final.running[path]
        torch.testing.assert_close(running.mean, values.mean(1), rtol=0, atol=1e-12)
        torch.testing.assert_close(running.var, values.var(1), rtol=0, atol=1e-12)


def test_heterofl_is_tested_with_surveyed_statistics():
    run = fednorm.simulate("heterofl", rounds=40, partition="iid", clients=3)
    assert run.final.accuracy > 0.6


@pytest.mark.parametrize("shape", [(6, 3), (4, 3, 5, 5)])
def test_hbn_with_a_at_its_ends(shape):
    cls = nn.BatchNorm1d if len(shape) == 2 else nn.BatchNorm2d
    plain = cls(3).double()
    with torch.no_grad():
        plain.weight.uniform_(0.5, 2)
        plain.bias.uniform_(-1, 1)
        plain.running_mean.uniform_(-1, 1)
        plain.running_var.uniform_(0.5, 2)
    layer = add_mixing(plain).model
    assert isinstance(layer, FedBatchNorm)
    x = torch.randn(shape, dtype=torch.float64)
    layer.mixing.alpha.data.fill_(-1e4)
    torch.testing.assert_close(normalize_hybrid(layer, x), plain.eval()(x))
    layer.mixing.alpha.data.fill_(1e4)
    torch.testing.assert_close(normalize_hybrid(layer, x), plain.train()(x))


def test_hbn_gradient_against_the_explicit_formula():
    layer = add_mixing(nn.BatchNorm1d(2, affine=False).double()).model
    layer.running_var.fill_(2.0)
    alpha = torch.tensor([0.3, -0.7], dtype=torch.float64)

    def formula(x, alpha):
        a = 1 / (1 + torch.exp(-alpha))
        mean = (1 - a) * layer.running_mean + a * x.mean(0)
        var = (1 - a) * layer.running_var + a * ((x - x.mean(0)) ** 2).mean(0)
        return (x - mean) / torch.sqrt(var + layer.eps)

    x = torch.randn(5, 2, dtype=torch.float64, requires_grad=True)
    z = x.detach().clone().requires_grad_()
    free = alpha.clone().requires_grad_()
    layer.mixing.alpha.data.copy_(alpha)
    weight = torch.randn(5, 2, dtype=torch.float64)
    (normalize_hybrid(layer, x) * weight).sum().backward()
    (formula(z, free) * weight).sum().backward()
    torch.testing.assert_close(x.grad, z.grad)
    torch.testing.assert_close(layer.mixing.alpha.grad, free.grad)


def test_hbn_learns_as_well_as_others_where_clients_are_alike():
    run = fednorm.simulate(
        "hbn",
        rounds=15,
        partition="iid",
        clients=3,
        model="resnet",
        algorithm="fedavg",
        local_steps=5,
    )
    assert run.final.accuracy > 0.8


def test_fedfn_normalises_features_on_any_base():
    for base, options in (
        ("naive", {}),
        ("fbn", {"stats_momentum": 0.3}),
        ("fedbn", {}),
        ("gn", {}),
    ):
        wrapped = create_strategy("fedfn", base=base, options=options)
        inner = create_strategy(base, **options)
        assert wrapped.statistics == inner.statistics
        assert wrapped.roles == inner.roles
        assert wrapped.needs_batch_statistics == inner.needs_batch_statistics
        task = task_of(wrapped, STEP)
        assert set(task.layout.personal) == set(task_of(inner, STEP).layout.personal)
        last(task, ToyClients(), 2)
    x = torch.randn(4, 6, dtype=torch.float64)
    plain = nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 5)).double().eval()
    model = create_strategy("fedfn", base="naive").convert(plain).model
    features = plain[0](x)
    expected = functional.linear(
        features / features.norm(dim=1, keepdim=True), plain[1].weight, plain[1].bias
    )
    torch.testing.assert_close(model(x), expected)
    assert list(model.state_dict()) == list(plain.state_dict())


def test_fedfn_refuses_what_it_cannot_wrap():
    with pytest.raises(ValueError, match="not to itself"):
        create_strategy("fedfn", base="fedfn")
    with pytest.raises(ValueError, match="unknown strategy 'fnb'"):
        create_strategy("fedfn", base="fnb")
    with pytest.raises(TypeError, match="no linear layer"):
        create_strategy("fedfn").convert(nn.Sequential(nn.BatchNorm1d(3)))
