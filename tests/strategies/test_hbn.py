"""HBN against plain torch: the mix, the pass over the data, the shared statistics, the test.

Each round is replayed from the state before it, so that the oracle needs no history.
"""

import copy
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.nn import functional

import fednorm
from fednorm.algorithms import create_algorithm
from fednorm.core.task import export
from fednorm.engines.evaluation import calibrate_for_test
from fednorm.engines.loop import rounds
from fednorm.nn.batch_norm import FedBatchNorm
from fednorm.nn.hybrid_norm import add_mixing, normalize_hybrid
from populations import Population, flat
from support import nested_model, task_of

LR, TIGHT = 0.05, 1e-11
MOMENTUM = 0.002  # the paper's


class Hybrid(nn.Module):
    """Per channel (1-a)·shared + a·batch, mean and variance alike, a = sigmoid(α)."""

    def __init__(self, plain):
        super().__init__()
        self.weight, self.bias, self.eps = plain.weight, plain.bias, plain.eps
        self.alpha = nn.Parameter(torch.zeros_like(plain.weight))
        self.mean, self.var = plain.running_mean, plain.running_var
        self.seen, self.used = [], []

    def forward(self, u):
        view = (1, -1, 1, 1)
        self.seen.append(flat(u))
        a = 1 / (1 + torch.exp(-self.alpha))
        mean = (1 - a) * self.mean + a * u.mean((0, 2, 3))
        var = (1 - a) * self.var + a * u.var((0, 2, 3), correction=0)
        self.used.append((flat(u).shape[1], mean.detach(), var.detach()))
        normal = (u - mean.view(view)) / (var.view(view) + self.eps).sqrt()
        return normal * self.weight.view(view) + self.bias.view(view)


def hybrid_model(state, client_state):
    """Return a client's plain model under the state of a server."""
    model = nested_model()
    for path, layer in list(model.named_modules()):
        if isinstance(layer, nn.BatchNorm2d):
            parent, _, name = path.rpartition(".")
            setattr(model.get_submodule(parent), name, Hybrid(layer))
    with torch.no_grad():
        for name, value in state.weights.items():
            model.get_parameter(name).copy_(value)
        for path, layer in layers(model).items():
            layer.mean, layer.var = state.running[path].mean, state.running[path].var
            if client_state is not None:
                layer.alpha.copy_(client_state.tensors[f"{path}.mixing.alpha"])
    return model


def layers(model):
    return {path: m for path, m in model.named_modules() if isinstance(m, Hybrid)}


def look(models, clients):
    """Return mean and unbiased variance of all that layers see when clients pass their data."""
    values = {path: [] for path in layers(next(iter(models.values())))}
    for client, model in models.items():
        with torch.no_grad():
            for x, _ in clients.all_batches(client).steps:
                model(x)
        for path, layer in layers(model).items():
            values[path] += layer.seen
            layer.seen = []
    together = {path: torch.cat(seen, 1) for path, seen in values.items()}
    return {path: (x.mean(1), x.var(1, correction=1)) for path, x in together.items()}


def replay(state, client_states, clients, momentum):
    """Return the next round's weights, statistics and mixing factors."""
    taking = clients.participants(state.round + 1)
    models = {c: hybrid_model(state, client_states.get(c)) for c in taking}
    found = look(copy.deepcopy(models), clients)
    running = {
        path: tuple(
            (1 - momentum) * old + momentum * new
            for old, new in zip((state.running[path].mean, state.running[path].var), f, strict=True)
        )
        for path, f in found.items()
    }
    held = {c: clients.batches(c, state.round + 1).examples for c in taking}
    for client, model in models.items():
        optimizer = torch.optim.SGD(model.parameters(), lr=LR)
        for x, y in clients.batches(client, state.round + 1).steps:
            optimizer.zero_grad()
            functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    weights = {
        name: sum(held[c] * models[c].get_parameter(name).detach() for c in taking)
        / sum(held.values())
        for name in state.weights
    }
    alphas = {c: {p: m.alpha.detach() for p, m in layers(models[c]).items()} for c in taking}
    return weights, running, alphas


CASES = {
    "all clients": Population(holds=(20, 9, 13), batch=(4, 5, 3), steps=(2, 2, 2)),
    "some clients": Population(
        holds=(20, 9, 13), steps=(2, 2, 2), absent={1: (2,), 2: (0,), 3: (1,)}
    ),
}


def run(clients, count=3, **fields):
    task = task_of("hbn", create_algorithm("fedavg", lr=LR), count=count, **fields)
    return task, list(rounds(task, clients, count))


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("fields", [{}, {"stats_momentum": 0.3}])
def test_a_round_from_the_state_before_it(case, fields):
    """Local training mixes with the statistics that came with the model, not with newer ones."""
    clients = CASES[case]
    _, results = run(clients, **fields)
    for before, after in pairwise(results):
        weights, running, alphas = replay(
            before.state,
            dict(before.client_states),
            clients,
            fields.get("stats_momentum", MOMENTUM),
        )
        for name, value in weights.items():
            torch.testing.assert_close(after.state.weights[name], value, rtol=0, atol=TIGHT)
        for client, own in alphas.items():
            for path, alpha in own.items():
                got = after.client_states[client].tensors[f"{path}.mixing.alpha"]
                torch.testing.assert_close(got, alpha, rtol=0, atol=TIGHT)
        for path, (mean, var) in running.items():
            got = after.state.running[path]
            torch.testing.assert_close(got.mean, mean, rtol=0, atol=TIGHT)
            torch.testing.assert_close(got.var, var, rtol=TIGHT, atol=TIGHT)


def test_the_first_round_trains_with_the_initial_statistics():
    """What the first pass finds is used from the second round on."""
    clients = CASES["all clients"]
    task, results = run(clients, count=1)
    weights, _, alphas = replay(task.initial_state, {}, clients, MOMENTUM)
    for name, value in weights.items():
        torch.testing.assert_close(results[0].state.weights[name], value, rtol=0, atol=TIGHT)
    for client, own in alphas.items():
        for path, alpha in own.items():
            got = results[0].client_states[client].tensors[f"{path}.mixing.alpha"]
            torch.testing.assert_close(got, alpha, rtol=0, atol=TIGHT)


def normalised_with(models, clients):
    """Return count, mean and biased variance of what layers were normalised with, over all data."""
    for client, model in models.items():
        with torch.no_grad():
            for x, _ in clients.all_batches(client).steps:
                model(x)
    found = {}
    for path in layers(models[0]):
        used = [batch for model in models.values() for batch in layers(model)[path].used]
        n = sum(count for count, _, _ in used)
        mean = sum(count * m for count, m, _ in used) / n
        found[path] = n, mean, sum(count * (v + (m - mean) ** 2) for count, m, v in used) / n
    return found


@pytest.mark.parametrize("case", CASES)
def test_before_a_test_the_statistics_are_taken_anew(case):
    """All clients pass their data; pooled is what their layers normalised with, nothing older.

    A model that is normalised with a mix in training has to be tested with such a mix: what a layer
    saw belongs to layers before it that were normalised with something else.
    """
    clients = CASES[case]
    task, results = run(clients)
    end = results[-1]
    client_states = dict(end.client_states)
    models = {c: hybrid_model(end.state, client_states.get(c)) for c in clients.all()}
    tested = calibrate_for_test(task, end.state, end.client_states, clients)
    for path, (n, mean, var) in normalised_with(models, clients).items():
        got = tested.running[path]
        torch.testing.assert_close(got.mean, mean, rtol=0, atol=TIGHT)
        # One factor for all channels; whether a mix is corrected by n/(n-1) is left open.
        factor = got.var / var
        torch.testing.assert_close(factor, factor[:1].expand_as(factor), rtol=0, atol=1e-10)
        assert 1 - 1e-10 <= float(factor[0]) <= n / (n - 1) + 1e-10
    for name, value in end.state.weights.items():
        assert torch.equal(tested.weights[name], value)


def test_one_client_is_tested_as_it_trains():
    """One batch of one client, tested: the output of training mode."""
    clients = Population(holds=(4,), batch=(4,), steps=(2,), shapes=((1, 8, 8),))
    task, results = run(clients)
    end = results[-1]
    model = hybrid_model(end.state, end.client_states[0])
    ((x, _),) = clients.all_batches(0).steps
    got = export(task, calibrate_for_test(task, end.state, end.client_states, clients))(x)
    expected = model(x)
    n = 4 * 16  # values of the smallest layers, by which a variance may be corrected
    torch.testing.assert_close(got, expected, rtol=4 / n, atol=4 / n)


@pytest.mark.slow
def test_a_test_does_not_change_the_training():
    """What is taken for a test is used for that test only."""
    values = {"rounds": 4, "seed": 0, "partition": "iid", "clients": 3, "local_steps": 2}
    often = fednorm.simulate("hbn", algorithm="fedavg", eval_every=1, **values)
    once = fednorm.simulate("hbn", algorithm="fedavg", eval_every=4, **values)
    assert often.final.loss == pytest.approx(once.final.loss, rel=1e-12)


@pytest.mark.slow
def test_it_learns_what_naive_learns():
    """As users run it: real digits, a residual net, local steps."""
    values = {
        "rounds": 10,
        "partition": "dirichlet=0.6",
        "clients": 3,
        "model": {"name": "resnet", "widths": [8, 16]},
        "local_steps": 5,
        "batch_size": 60,
        "eval_every": 10,
    }
    naive, hbn = (
        fednorm.simulate(name, algorithm={"name": "fedavg", "lr": 0.1}, **values).final.accuracy
        for name in ("naive", "hbn")
    )
    assert naive > 0.6
    assert hbn > naive - 0.1


@pytest.mark.parametrize("shape", [(6, 3), (4, 3, 5, 5)])
def test_with_a_at_its_ends(shape):
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


def test_gradient_is_that_of_the_explicit_formula():
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
