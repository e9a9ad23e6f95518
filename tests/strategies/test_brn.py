"""Batch renormalization against its formula written out, and against its two limits."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from fednorm import create_strategy
from fednorm.algorithms import create_algorithm
from fednorm.core.layer import RoundContext
from fednorm.nn.convert import to_fed_batch_norm
from fednorm.strategies.brn import compute_corrections, make_renorm_rule
from support import ToyClients, assert_same_state, last, nested_model, task_of

INFINITE = float("inf")


def layer_of(cls, channels, seed=0, **fields):
    """A federated layer whose tensors are not their defaults."""
    generator = torch.Generator().manual_seed(seed)
    layer = to_fed_batch_norm(cls(channels, **fields).double()).model
    with torch.no_grad():
        for tensor in layer.state_dict().values():
            if tensor.is_floating_point():
                tensor.copy_(0.5 + torch.rand(tensor.shape, generator=generator))
    return layer


def batch(shape, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return 3 * torch.randn(shape, generator=generator, dtype=torch.float64) + 1


def begun(layer, r_max, d_max, statistics="average"):
    layer.start_round(make_renorm_rule(r_max, d_max, statistics), RoundContext(), "site")
    return layer


def by_hand(layer, x, r_max, d_max):
    """Channel by channel, r and d as plain numbers."""
    columns = []
    for c in range(x.shape[1]):
        values = x[:, c]
        mean = values.sum() / values.numel()
        sigma = (((values - mean) ** 2).sum() / values.numel() + layer.eps) ** 0.5
        running = math.sqrt(float(layer.running_var[c]) + layer.eps)
        r = max(1 / r_max, min(r_max, float(sigma.detach()) / running))
        d = max(-d_max, min(d_max, (float(mean.detach()) - float(layer.running_mean[c])) / running))
        y = (values - mean) / sigma * r + d
        y = y if layer.weight is None else layer.weight[c] * y
        columns.append(y if layer.bias is None else y + layer.bias[c])
    return torch.stack(columns, 1)


shapes = st.lists(st.integers(1, 4), min_size=1, max_size=4)  # without the batch


@settings(max_examples=40, deadline=None)
@given(
    shape=shapes,
    size=st.integers(2, 6),
    r_max=st.floats(1, 5),
    d_max=st.floats(0, 3),
    affine=st.sampled_from(["both", "weight", "none"]),
)
def test_value_and_gradients_are_those_of_the_formula(shape, size, r_max, d_max, affine):
    cls = [nn.BatchNorm1d, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d][len(shape) - 1]
    layer = layer_of(cls, shape[0], affine=affine != "none")
    if affine == "weight":
        layer.register_parameter("bias", None)
    x = batch((size, *shape)).requires_grad_()
    leaves = [x, *layer.parameters()]
    expected = by_hand(layer, x, r_max, d_max)
    weights = batch(expected.shape, seed=2)
    wanted = torch.autograd.grad((expected * weights).sum(), leaves)
    for statistics in ("pool", "average"):
        y = begun(layer, r_max, d_max, statistics)(x)
        torch.testing.assert_close(y, expected, rtol=0, atol=1e-10)
        found = torch.autograd.grad((y * weights).sum(), leaves)
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-9)


def test_gradcheck_where_both_corrections_are_at_their_bounds():
    """There r and d do not depend on the input, so the true gradient is the one wanted."""
    layer, x = layer_of(nn.BatchNorm2d, 3), batch((4, 3, 2, 2))
    r, d = compute_corrections(layer, x, 1.05, 0.01)
    assert set(r.tolist()) <= {1.05, 1 / 1.05}
    assert set(d.abs().tolist()) == {0.01}
    begun(layer, 1.05, 0.01, "pool")
    x.requires_grad_()
    assert torch.autograd.gradcheck(
        lambda x, w, b: torch.func.functional_call(layer, {"weight": w, "bias": b}, x),
        (x, layer.weight, layer.bias),
    )


def test_no_gradient_through_the_corrections():
    r, d = compute_corrections(
        layer_of(nn.BatchNorm1d, 3), batch((4, 3)).requires_grad_(), 3.0, 5.0
    )
    assert not r.requires_grad
    assert not d.requires_grad


@pytest.mark.parametrize("statistics", ["average", "pool"])
def test_without_bounds_the_forward_pass_is_that_of_the_running_statistics(statistics):
    layer, x = layer_of(nn.BatchNorm2d, 3), batch((4, 3, 5, 5))
    expected = layer.eval()(x)
    y = begun(layer.train(), INFINITE, INFINITE, statistics)(x)
    torch.testing.assert_close(y, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("fields", [{}, {"momentum": None}, {"affine": False}])
def test_running_statistics_follow_as_in_torch(fields):
    layer, plain = layer_of(nn.BatchNorm1d, 3, **fields), nn.BatchNorm1d(3, **fields).double()
    plain.load_state_dict(layer.state_dict())
    begun(layer, 3.0, 5.0)
    for seed in range(4):
        x = batch((5, 3), seed)
        layer(x)
        plain(x)
    for key, value in plain.state_dict().items():
        torch.testing.assert_close(layer.state_dict()[key], value)


def test_pooling_keeps_the_running_statistics_and_reports_moments():
    layer, x = layer_of(nn.BatchNorm1d, 3), batch((5, 3))
    before = layer.read_running()
    begun(layer, 3.0, 5.0, "pool")(x)
    assert torch.equal(layer.running_mean, before.mean)
    assert torch.equal(layer.running_var, before.var)
    report = layer.report("pool")
    torch.testing.assert_close(report.moments.mean, x.mean(0))
    torch.testing.assert_close(report.moments.var, x.var(0, correction=0))
    assert report.moments.count == 5


@pytest.mark.slow
@pytest.mark.parametrize("statistics", ["average", "pool"])
@pytest.mark.parametrize("kind", ["dsgd", "fedavg"])
def test_one_and_zero_is_batch_norm_over_ten_rounds(statistics, kind):
    step = create_algorithm(kind, lr=0.05, momentum=0.9)
    clients = ToyClients(sizes=(3, 5, 4), steps=1 if kind == "dsgd" else 2)
    fields = {"statistics": statistics}
    naive = last(task_of("naive", step, **fields), clients, 10).state
    brn = last(task_of("brn", step, r_max=1, d_max=0, **fields), clients, 10).state
    other = last(task_of("brn", step, **fields), clients, 10).state
    for name, value in naive.weights.items():
        torch.testing.assert_close(brn.weights[name], value, rtol=0, atol=1e-12)
    for path, running in naive.running.items():
        torch.testing.assert_close(brn.running[path].mean, running.mean, rtol=0, atol=1e-12)
        torch.testing.assert_close(brn.running[path].var, running.var, rtol=0, atol=1e-12)
    assert any(not torch.allclose(other.weights[k], v) for k, v in naive.weights.items())


class Renormalised(nn.BatchNorm2d):
    """The oracle as a layer: the formula, then torch's own update of the running statistics."""

    def forward(self, x):
        y = by_hand(self, x, 3.0, 5.0)
        super().forward(x.detach())
        return y


@pytest.mark.slow
def test_one_client_is_one_machine():
    """Plain torch with the layer above, trained on the client's batches."""
    model, clients = nested_model().train(), ToyClients(sizes=(6,))
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.__class__ = Renormalised
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for round_ in range(1, 6):
        (x, y), *_ = clients.batches(0, round_).steps
        optimizer.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    for statistics in ("average", "pool"):
        task = task_of("brn", create_algorithm("dsgd", lr=0.05), statistics=statistics)
        assert_same_state(last(task, clients, 5).state, model)


def test_a_batch_of_one_value_is_refused():
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        begun(layer_of(nn.BatchNorm1d, 3), 3.0, 5.0)(batch((1, 3)))


def test_a_layer_without_statistics_is_refused():
    layer = to_fed_batch_norm(nn.BatchNorm1d(3, track_running_stats=False)).model
    with pytest.raises(ValueError, match="'site' tracks no running statistics"):
        begun(layer, 3.0, 5.0)(torch.randn(4, 3))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"r_max": 0.9}, "r_max must be at least 1, not 0.9"),
        ({"r_max": float("nan")}, "r_max must be at least 1"),
        ({"d_max": -1}, "d_max must be at least 0, not -1"),
        ({"stats_momentum": 0}, "stats_momentum must be in"),
        ({"statistics": "sum"}, "statistics must be"),
    ],
)
def test_wrong_fields_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        create_strategy("brn", **fields)
