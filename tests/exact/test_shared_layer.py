"""A BatchNorm layer that is called twice in a step follows as torch's does: call by call."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional

from fednorm.aggregators import create_aggregator
from fednorm.algorithms import create_algorithm
from fednorm.core.task import export
from fednorm.engines import loop, merged_batch
from populations import flat
from support import ToyClients, last, task_of

LR, BETA, TIGHT, ROUNDS = 0.05, 0.1, 1e-11, 3
EQUAL, UNEQUAL = ToyClients(sizes=(5, 5, 5)), ToyClients(sizes=(2, 7, 4))
SIZES = pytest.mark.parametrize("clients", [EQUAL, UNEQUAL], ids=["equal", "unequal"])


class Twice(nn.Module):
    """One layer in two places, the second of which sees other values, and fewer of them."""

    def __init__(self, momentum=0.1):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Conv2d(1, 3, 3), nn.Conv2d(3, 3, 3)
        self.norm = nn.BatchNorm2d(3, momentum=momentum)
        self.last = nn.Linear(3, 4)
        with torch.no_grad():
            self.second.bias.fill_(5.0)  # far from what the first call sees
        self.double()

    def forward(self, x):
        x = torch.tanh(self.norm(self.first(x)))
        x = torch.tanh(self.norm(self.second(x)))
        return self.last(x.mean((2, 3)))


def step(model, x, y):
    model.zero_grad()
    functional.cross_entropy(model(x), y).backward()
    with torch.no_grad():
        for p in model.parameters():
            p.sub_(LR * p.grad)


def watch(model):
    seen = []
    model.norm.register_forward_pre_hook(lambda _m, x: seen.append(flat(x[0])))
    return seen


def move(layer, values, beta=BETA):
    """Torch's rule for the buffers, applied to one call's values of all clients."""
    layer.running_mean = (1 - beta) * layer.running_mean + beta * values.mean(1)
    layer.running_var = (1 - beta) * layer.running_var + beta * values.var(1, correction=1)
    layer.num_batches_tracked += 1


def on_the_union(clients, *, frozen, momentum=0.1):
    """One machine. Frozen: it normalises with its buffers, which torch's rule moves afterwards."""
    model = Twice(momentum).train()
    seen = watch(model)
    model.norm.train(not frozen)
    for round_ in range(1, ROUNDS + 1):
        seen.clear()
        step(model, *clients.union(round_))
        for values in seen if frozen else ():
            tracked = int(model.norm.num_batches_tracked) + 1
            move(model.norm, values, 1 / tracked if momentum is None else momentum)
    return model


def on_each_client(clients):
    """Ordinary BatchNorm on each client's batch; the moments of each call pooled, in order."""
    model = Twice()
    for round_ in range(1, ROUNDS + 1):
        calls, moved = [], []
        for client in clients.participants(round_):
            local = copy.deepcopy(model).train()
            seen = watch(local)
            step(local, *clients.batches(client, round_).steps[0])
            calls.append(seen)
            moved.append(local)
        shares = [size / sum(clients.sizes) for size in clients.sizes]
        with torch.no_grad():
            for name, p in model.named_parameters():
                parts = [m.get_parameter(name) for m in moved]
                p.copy_(sum(w * part for w, part in zip(shares, parts, strict=True)))
        for values in zip(*calls, strict=True):
            move(model.norm, torch.cat(values, 1))
    return model


def assert_same(state, model, *, weights=True):
    for name, value in model.named_parameters() if weights else ():
        torch.testing.assert_close(state.weights[name], value, rtol=0, atol=TIGHT)
    got = state.running["norm"]
    torch.testing.assert_close(got.mean, model.norm.running_mean, rtol=0, atol=TIGHT)
    torch.testing.assert_close(got.var, model.norm.running_var, rtol=0, atol=TIGHT)


def run(name, clients, engine=loop.rounds, *, model=None, **fields):
    task = task_of(name, create_algorithm("dsgd", lr=LR), model=model or Twice(), **fields)
    *_, result = engine(task, clients, ROUNDS)
    return result.state


ENGINES = pytest.mark.parametrize("engine", [loop.rounds, merged_batch.rounds])


@SIZES
@ENGINES
def test_fedtan_is_torchs_layer_on_the_union(clients, engine):
    assert_same(run("fedtan", clients, engine), on_the_union(clients, frozen=False))


@SIZES
@ENGINES
def test_fbn(clients, engine):
    assert_same(run("fbn", clients, engine), on_the_union(clients, frozen=True))


@SIZES
@ENGINES
def test_naive_with_pooled_statistics(clients, engine):
    state = run("naive", clients, engine, statistics="pool")
    assert_same(state, on_each_client(clients))


@SIZES
def test_feddna_without_importance_is_naive_pooled(clients):
    assert_same(run("feddna", clients, strength=0), on_each_client(clients))


@SIZES
def test_naive_with_averaged_statistics_is_torchs_on_each_client(clients):
    state = run("naive", clients)
    task = task_of("naive", create_algorithm("dsgd", lr=LR), model=Twice())
    after = last(task, clients, 1).state.running["norm"]
    means, variances = [], []
    for client in clients.all():
        local = Twice().train()
        local(clients.batches(client, 1).steps[0][0])
        means.append(local.norm.running_mean)
        variances.append(local.norm.running_var)
    shares = [size / sum(clients.sizes) for size in clients.sizes]
    for got, parts in ((after.mean, means), (after.var, variances)):
        expected = sum(w * part for w, part in zip(shares, parts, strict=True))
        torch.testing.assert_close(got, expected, rtol=0, atol=TIGHT)
    for name, value in on_each_client(clients).named_parameters():
        torch.testing.assert_close(state.weights[name], value, rtol=0, atol=TIGHT)


@SIZES
def test_dualbn_forward(clients):
    """One round: backward means are still 0. Its statistics are those of shared ones, as FBN's."""
    fields = {"weight_standardization": False, "model": Twice()}
    task = task_of("dualbn", create_algorithm("dsgd", lr=LR, warmup=0), **fields)
    got = last(task, clients, 1).state.running["norm"]
    model = Twice().train()
    seen = watch(model)
    model.norm.eval()
    step(model, *clients.union(1))
    for values in seen:
        move(model.norm, values)
    torch.testing.assert_close(got.mean, model.norm.running_mean, rtol=0, atol=TIGHT)
    torch.testing.assert_close(got.var, model.norm.running_var, rtol=0, atol=TIGHT)


@pytest.mark.parametrize("name", ["fbn", "fedtan"])
def test_the_counter_counts_calls(name):
    """As num_batches_tracked does, which a cumulative average divides by."""
    model = on_the_union(EQUAL, frozen=name == "fbn", momentum=None)
    state = run(name, EQUAL, model=Twice(None), stats_momentum=None)
    assert state.running["norm"].num_batches == int(model.norm.num_batches_tracked) == 2 * ROUNDS
    assert_same(state, model)


class Often(nn.Module):
    """A layer that is called as often as the batch's first label says; call t sees mean 5t."""

    def __init__(self):
        super().__init__()
        self.norm, self.last = nn.BatchNorm1d(2), nn.Linear(2, 4)
        self.double()

    def forward(self, x, times=None):
        if times is None:
            times = round(float(x[0, 0]))
        values = x - x.mean(0)
        return self.last(sum(self.norm(values + 5 * t) for t in range(times)))


class Times(ToyClients):
    """Client i calls its layer `times[i][s]` times in step s."""

    def __init__(self, *times):
        super().__init__(sizes=(8,) * len(times), steps=len(times[0]), shape=(2,))
        object.__setattr__(self, "times", times)

    def batches(self, client, round_):
        own = super().batches(client, round_)
        for (x, _), times in zip(own.steps, self.times[client], strict=True):
            x[0, 0] = times
        return own


@pytest.mark.parametrize("times", [(2, *[1] * 30), (3, 1, 1, 2, 1, 1, 1, 1), (2, 2, 2), (1, 2)])
def test_calls_of_steps_that_differ_weigh_what_they_do_in_torch(times):
    clients = Times(times)
    task = task_of("fbn", create_algorithm("fedavg", lr=LR), model=Often(), count=1)
    got = last(task, clients, 1).state.running["norm"]
    plain = Often()
    for x, _ in clients.batches(0, 1).steps:
        plain(x)
    torch.testing.assert_close(got.mean, plain.norm.running_mean, rtol=0, atol=TIGHT)
    assert got.num_batches == sum(times)


def test_one_client_that_calls_a_layer_once_more_changes_little():
    clients = Times(*[(1, 1)] * 9, (2, 1))
    task = task_of("fbn", create_algorithm("fedavg", lr=LR), model=Often(), count=1)
    got = last(task, clients, 1).state.running["norm"]
    assert got.mean.abs().max() < 5 / 10


def test_a_robust_rule_takes_clients_that_call_a_layer_unequally_often():
    clients = Times(*[(n, n) for n in (3, 4, 5, 6, 7)])
    task = task_of("fbn", create_algorithm("fedavg", lr=LR), model=Often(), count=1)
    task = replace(task, statistics_aggregator=create_aggregator("median", 1))
    result = last(task, clients, 1)
    assert not result.rejected
    assert result.state.running["norm"].mean.isfinite().all()


def test_what_a_model_is_called_for_after_a_round_is_not_kept():
    task = task_of("fbn", create_algorithm("fedavg", lr=LR), model=Often(), count=1)
    result = last(task, Times((1, 1)), 1)
    model = export(task, result.state).train()
    for _ in range(20):
        model(torch.randn(4, 2, dtype=torch.float64), 1)
    assert len(model.norm.recorder.logs) == 1
