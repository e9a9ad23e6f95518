"""heterofl, hbn and fedfn."""

import pytest
import torch
from torch import nn
from torch.nn import functional

import fednorm
from fednorm import strategy
from fednorm.algorithms import algorithm
from fednorm.core.task import export
from fednorm.engines.simulate import rounds
from fednorm.engines.survey import surveyed
from fednorm.nn.batch_norm import FedBatchNorm
from fednorm.nn.hybrid import hybrid, with_mixing
from support import Toy, last, nested_model, task_of

STEP = algorithm("dsgd", lr=0.05)


def test_heterofl_statistics_are_torchs_cumulative_average_over_all_batches():
    clients = Toy(sizes=(3, 6, 4))
    task = task_of("heterofl", STEP)
    result = last(task, clients, 5)
    assert all(torch.equal(r.var, torch.ones_like(r.var)) for r in result.state.running.values())
    final = surveyed(task, result.state, result.memories, clients)
    model = nested_model().train()
    model.load_state_dict(export(task, result.state).state_dict())
    for layer in model.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.momentum = None
            layer.reset_running_stats()
    for client in range(3):
        for x, _ in clients.everything(client).steps:
            model(x)
    expected = model.state_dict()
    for path, running in final.running.items():
        mean, var = expected[f"{path}.running_mean"], expected[f"{path}.running_var"]
        torch.testing.assert_close(running.mean, mean, rtol=0, atol=1e-12)
        torch.testing.assert_close(running.var, var, rtol=0, atol=1e-12)


def test_heterofl_can_pool_the_moments_of_all_values():
    clients = Toy(sizes=(3, 6, 4))
    task = task_of("heterofl", STEP, statistics="pool")
    result = last(task, clients, 5)
    final = surveyed(task, result.state, result.memories, clients)
    model, seen = nested_model().train(), {}
    model.load_state_dict(export(task, result.state).state_dict())
    for path, layer in model.named_modules():
        if isinstance(layer, nn.BatchNorm2d):
            seen[path] = []
            layer.register_forward_pre_hook(
                lambda _, x, seen=seen[path]: seen.append(x[0].detach())
            )
    for client in range(3):
        for x, _ in clients.everything(client).steps:
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
    layer = with_mixing(plain).model
    assert isinstance(layer, FedBatchNorm)
    x = torch.randn(shape, dtype=torch.float64)
    layer.mixing.alpha.data.fill_(-1e4)
    torch.testing.assert_close(hybrid(layer, x), plain.eval()(x))
    layer.mixing.alpha.data.fill_(1e4)
    torch.testing.assert_close(hybrid(layer, x), plain.train()(x))


def test_hbn_gradient_against_the_explicit_formula():
    layer = with_mixing(nn.BatchNorm1d(2, affine=False).double()).model
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
    (hybrid(layer, x) * weight).sum().backward()
    (formula(z, free) * weight).sum().backward()
    torch.testing.assert_close(x.grad, z.grad)
    torch.testing.assert_close(layer.mixing.alpha.grad, free.grad)


class Mixed(nn.BatchNorm2d):
    """The oracle's layer: BatchNorm with mixed statistics, which it remembers."""

    def forward(self, x):
        # Before the first measurement there is nothing to mix in.
        a = torch.sigmoid(self.alpha) if self.num_batches_tracked else torch.ones_like(self.alpha)
        self.mean = (1 - a) * self.running_mean + a * x.mean((0, 2, 3))
        self.variance = (1 - a) * self.running_var + a * x.var((0, 2, 3), correction=0)
        self.values = x.numel() / x.shape[1]
        shape = (1, -1, 1, 1)
        scaled = (x - self.mean.view(shape)) / (self.variance + self.eps).sqrt().view(shape)
        return scaled * self.weight.view(shape) + self.bias.view(shape)


def measured(task, state, memories, clients, share=1.0):
    """Pooled mean and unbiased variance of the mixed statistics, over all clients' batches.

    `share` is how much the clients' weight in averages is of the samples that they measure.
    """
    model, weights = nested_model(), export(task, state).state_dict()
    model.load_state_dict({k: v for k, v in weights.items() if not k.endswith("alpha")})
    layers = {p: m for p, m in model.named_modules() if isinstance(m, nn.BatchNorm2d)}
    seen = {path: [] for path in layers}
    for client in range(clients.clients):
        for path, layer in layers.items():
            layer.__class__ = Mixed
            own = memories.get(client)
            key = f"{path}.mixing.alpha"
            layer.alpha = own.tensors[key] if own else torch.zeros_like(layer.running_mean)
        for x, _ in clients.everything(client).steps:
            with torch.no_grad():
                model(x)
            for path, layer in layers.items():
                seen[path].append((layer.values, layer.mean, layer.variance))
    return {path: whole(batches, share) for path, batches in seen.items()}


def whole(batches, share):
    count = sum(n for n, _, _ in batches)
    mean = sum(n * m for n, m, _ in batches) / count
    var = sum(n * (v + (m - mean) ** 2) for n, m, v in batches) / count
    return mean, var * (share * count) / (share * count - 1)


def test_hbn_follows_what_clients_measure_and_is_tested_with_fresh_statistics():
    clients, beta = Toy(), 0.25
    task = task_of("hbn", STEP, momentum=beta)
    alphas = {f"{path}.mixing.alpha" for path in task.initial_state.running}
    assert set(task.layout.personal) == alphas
    before, memories = task.initial_state, {}
    for result in rounds(task_of("hbn", STEP, momentum=beta), clients, 3):
        assert result.exchanges == 1
        assert not alphas & set(result.state.weights)
        rate = beta if result.state.round > 1 else 1.0
        seen = measured(task, before, memories, clients, share=1 / 3)
        for path, (mean, var) in seen.items():
            old, new = before.running[path], result.state.running[path]
            torch.testing.assert_close(new.mean, torch.lerp(old.mean, mean, rate))
            torch.testing.assert_close(new.var, torch.lerp(old.var, var, rate))
        before, memories = result.state, dict(result.memories)
        tested = surveyed(task, before, memories, clients)
        for path, (mean, var) in measured(task, before, memories, clients).items():
            torch.testing.assert_close(tested.running[path].mean, mean)
            torch.testing.assert_close(tested.running[path].var, var)
    key = next(iter(alphas))
    assert not torch.equal(memories[0].tensors[key], memories[1].tensors[key])


def test_hbn_learns_as_well_as_others_where_clients_are_alike():
    run = fednorm.simulate(
        "hbn",
        rounds=15,
        partition="iid",
        clients=3,
        model="resnet",
        algorithm="fedavg",
        steps=5,
    )
    assert run.final.accuracy > 0.8


def test_fedfn_normalises_features_on_any_base():
    for base, options in (("naive", {}), ("fbn", {"momentum": 0.3}), ("fedbn", {}), ("gn", {})):
        wrapped = strategy("fedfn", base=base, options=options)
        inner = strategy(base, **options)
        assert wrapped.statistics == inner.statistics
        assert wrapped.roles == inner.roles
        assert wrapped.needs_batch_statistics == inner.needs_batch_statistics
        task = task_of(wrapped, STEP)
        assert set(task.layout.personal) == set(task_of(inner, STEP).layout.personal)
        last(task, Toy(), 2)
    x = torch.randn(4, 6, dtype=torch.float64)
    plain = nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 5)).double().eval()
    model = strategy("fedfn", base="naive").convert(plain).model
    features = plain[0](x)
    expected = functional.linear(
        features / features.norm(dim=1, keepdim=True), plain[1].weight, plain[1].bias
    )
    torch.testing.assert_close(model(x), expected)
    assert list(model.state_dict()) == list(plain.state_dict())


def test_fedfn_refuses_what_it_cannot_wrap():
    with pytest.raises(ValueError, match="not to itself"):
        strategy("fedfn", base="fedfn")
    with pytest.raises(ValueError, match="unknown strategy 'fnb'"):
        strategy("fedfn", base="fnb")
    with pytest.raises(TypeError, match="no linear layer"):
        strategy("fedfn").convert(nn.Sequential(nn.BatchNorm1d(3)))
