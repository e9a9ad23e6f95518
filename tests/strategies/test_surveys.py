"""heterofl, hbn and fedfn."""

import pytest
import torch
from torch import nn
from torch.nn import functional

import fednorm
from fednorm import strategy
from fednorm.algorithms import algorithm
from fednorm.core.task import export
from fednorm.engines.survey import surveyed
from fednorm.nn.batch_norm import FedBatchNorm
from fednorm.nn.hybrid import hybrid, with_mixing
from support import Toy, last, nested_model, task_of

STEP = algorithm("dsgd", lr=0.05)


def seen_by_plain_torch(model, batches):
    """All inputs of every BatchNorm layer, captured by hooks; labels are not used."""
    inputs = {p: [] for p, m in model.named_modules() if isinstance(m, nn.BatchNorm2d)}
    for path, seen in inputs.items():
        model.get_submodule(path).register_forward_pre_hook(
            lambda _m, x, seen=seen: seen.append(x[0].detach())
        )
    for x, _ in batches:
        model(x)
    return {path: torch.cat(x).transpose(0, 1).flatten(1) for path, x in inputs.items()}


def test_heterofl_statistics_are_those_of_all_data_under_the_final_weights():
    clients = Toy(sizes=(3, 6, 4))
    task = task_of("heterofl", STEP)
    result = last(task, clients, 5)
    assert all(torch.equal(r.var, torch.ones_like(r.var)) for r in result.state.running.values())
    final = surveyed(task, result.state, result.memories, clients)
    model = nested_model().train()
    for layer in model.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.track_running_stats = False
            layer.running_mean = layer.running_var = None
    model.load_state_dict(
        {k: v for k, v in export(task, final).state_dict().items() if k in model.state_dict()}
    )
    batches = [b for c in range(3) for b in clients.everything(c).steps]
    for path, values in seen_by_plain_torch(model, batches).items():
        torch.testing.assert_close(final.running[path].mean, values.mean(1), rtol=0, atol=1e-6)
        torch.testing.assert_close(final.running[path].var, values.var(1), rtol=0, atol=1e-6)


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


def test_hbn_mixing_is_personal_and_its_statistics_are_surveyed():
    clients = Toy()
    task = task_of("hbn", STEP, momentum=0.25)
    alphas = {f"{path}.mixing.alpha" for path in task.initial_state.running}
    assert set(task.layout.personal) == alphas
    first, second = last(task, clients, 1), last(task_of("hbn", STEP, momentum=0.25), clients, 2)
    assert first.exchanges == 2
    assert not alphas & set(second.state.weights)
    key = next(iter(alphas))
    values = [second.memories[c].tensors[key] for c in range(3)]
    assert not torch.equal(values[0], values[1])
    # The first survey, of the initial model with statistics 0 and 1, sets the statistics.
    model = nested_model().eval()
    batches = [b for c in range(3) for b in clients.everything(c).steps]
    for path, seen in seen_by_plain_torch(model, batches).items():
        torch.testing.assert_close(first.state.running[path].mean, seen.mean(1))
        torch.testing.assert_close(first.state.running[path].var, seen.var(1))
        assert second.state.running[path].batches == 2


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
