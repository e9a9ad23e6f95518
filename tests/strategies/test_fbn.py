"""FBN on many clients equals one machine that holds all the data."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from fednorm import create_strategy
from fednorm.algorithms import create_algorithm
from fednorm.core.messages import ClientState
from fednorm.core.round import broadcast, client_round, server_round
from support import ToyClients, assert_same_state, last, nested_model, run_by_hand, task_of

LR, ROUNDS = 0.05, 20


class Machine:
    """The oracle: plain torch layers in evaluation mode, statistics from all values together."""

    def __init__(self, momentum=0.0):
        self.model, self.inputs = nested_model().train(), {}
        self.layers = [m for m in self.model.modules() if isinstance(m, nn.BatchNorm2d)]
        for layer in self.layers:
            layer.eval()
            layer.register_forward_pre_hook(self._see)
        self.momentum, self.velocity = momentum, None

    def _see(self, layer, inputs):
        self.inputs[layer] = inputs[0].detach()

    def step(self, x, y):
        self.model.zero_grad()
        (functional.cross_entropy(self.model(x), y, reduction="sum") / len(y)).backward()
        gradients = [p.grad for p in self.model.parameters()]
        if self.velocity is None:
            self.velocity = [torch.zeros_like(g) for g in gradients]
        with torch.no_grad():
            for i, p in enumerate(self.model.parameters()):
                self.velocity[i] = (
                    self.momentum * self.velocity[i] + (1 - self.momentum) * gradients[i]
                )
                p.sub_(LR * self.velocity[i])
        for layer in self.layers:
            values = self.inputs[layer].transpose(0, 1).flatten(1)
            layer.running_mean = 0.9 * layer.running_mean + 0.1 * values.mean(1)
            layer.running_var = 0.9 * layer.running_var + 0.1 * values.var(1, correction=1)
            layer.num_batches_tracked += 1


def central(clients, momentum=0.0):
    machine = Machine(momentum)
    for round_ in range(1, ROUNDS + 1):
        machine.step(*clients.union(round_))
    return machine.model


@pytest.mark.slow
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_equal_batches(momentum):
    clients = ToyClients()
    task = task_of("fbn", create_algorithm("dsgd", lr=LR, momentum=momentum))
    assert_same_state(last(task, clients, ROUNDS).state, central(clients, momentum))


@pytest.mark.slow
def test_unequal_batches():
    clients = ToyClients(sizes=(2, 7, 1, 4))
    task = task_of("fbn", create_algorithm("dsgd", lr=LR))
    assert_same_state(last(task, clients, ROUNDS).state, central(clients))


@pytest.mark.slow
def test_partial_participation():
    clients = ToyClients(sizes=(3, 5, 2), absent={2: (1,), 3: (0, 2), 7: (2,), 20: (0,)})
    task = task_of("fbn", create_algorithm("dsgd", lr=LR))
    assert_same_state(last(task, clients, ROUNDS).state, central(clients))


@pytest.mark.slow
def test_client_lost_in_mid_round():
    """It trained, but its reply never came: the others count as if it had not been there."""
    gone = {4: (0,), 9: (1, 2)}
    clients = ToyClients(sizes=(3, 5, 2))
    task = task_of("fbn", create_algorithm("dsgd", lr=LR))
    state = run_by_hand(task, clients, ROUNDS, lambda r, c: c in gone.get(r, ()))
    assert_same_state(state, central(ToyClients(sizes=(3, 5, 2), absent=gone)))


def test_server_equals_the_papers_algorithm_2():
    """Lines 5 to 10, written out literally, for equal batches."""
    clients, beta = ToyClients(sizes=(4, 4, 4)), 0.1
    task = task_of("fbn", create_algorithm("dsgd", lr=LR))
    state = task.initial_state
    received = broadcast(task, state)
    replies = [
        client_round(task, received, ClientState(), clients.batches(c, 1))[0] for c in range(3)
    ]
    after = server_round(task, state, replies)
    n = len(replies)
    for path, shared in state.running.items():
        moments = [reply.stats[path].moments for reply in replies]
        k = moments[0].count
        local_mean = [(1 - beta) * shared.mean + beta * m.mean for m in moments]
        local_var = [
            (1 - beta) * shared.var + beta * (k * n) / (k * n - 1) * m.var for m in moments
        ]
        mean = sum(local_mean) / n
        spread = sum((m - mean) ** 2 for m in local_mean) / n
        var = sum(local_var) / n + (k * n) / ((k * n - 1) * beta) * spread
        torch.testing.assert_close(after.running[path].mean, mean, rtol=0, atol=1e-12)
        torch.testing.assert_close(after.running[path].var, var, rtol=0, atol=1e-12)


def test_several_local_steps_weigh_as_the_running_statistics_would():
    """Step s of E weighs β(1-β)^(E-s); the statistics stay fixed meanwhile and move once."""
    steps, beta = 3, 0.1
    model = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 3)).double()
    clients = ToyClients(sizes=(4, 6), steps=steps, shape=(2,), classes=3)
    task = task_of("fbn", create_algorithm("fedavg", lr=LR), model=model)
    after = last(task, clients, 1).state.running["0"]
    # The layer sees the data itself, so its input does not depend on the weights.
    weight = [beta * (1 - beta) ** (steps - s) for s in range(1, steps + 1)]
    total = 1 - (1 - beta) ** steps
    values, weights = [], []
    for client in range(2):
        for (x, _), a in zip(clients.batches(client, 1).steps, weight, strict=True):
            values += list(x)
            weights += [a / total] * len(x)
    x, w = torch.stack(values), torch.tensor(weights, dtype=torch.float64)[:, None]
    count = w.sum()
    mean = (w * x).sum(0) / count
    var = (w * (x - mean) ** 2).sum(0) / (count - 1)
    assert count == pytest.approx(10)
    torch.testing.assert_close(after.mean, total * mean, rtol=0, atol=1e-12)
    torch.testing.assert_close(after.var, (1 - total) + total * var, rtol=0, atol=1e-12)
    assert after.num_batches == steps


def test_cumulative_average():
    """With momentum None the statistics are the mean over all batches so far."""
    model = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 3)).double()
    clients = ToyClients(sizes=(4, 4), shape=(2,), classes=3)
    task = task_of("fbn", create_algorithm("dsgd", lr=LR), model=model, stats_momentum=None)
    after = last(task, clients, 5).state.running["0"]
    unions = [clients.union(round_)[0] for round_ in range(1, 6)]
    torch.testing.assert_close(after.mean, torch.stack([u.mean(0) for u in unions]).mean(0))
    torch.testing.assert_close(after.var, torch.stack([u.var(0) for u in unions]).mean(0))


def test_cumulative_average_over_rounds_of_several_steps():
    """The mean over all steps of all rounds, each step weighing the same."""
    model = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 3)).double()
    clients = ToyClients(sizes=(4, 4), steps=3, shape=(2,), classes=3)
    task = task_of("fbn", create_algorithm("fedavg", lr=LR), model=model, stats_momentum=None)
    after = last(task, clients, 2).state.running["0"]
    seen = [x for c in range(2) for r in (1, 2) for x, _ in clients.batches(c, r).steps]
    torch.testing.assert_close(after.mean, torch.cat(seen).mean(0))
    assert after.num_batches == 6


def test_an_unknown_text_for_momentum_is_refused():
    for text in ("none", "0.5", "fast"):
        with pytest.raises(ValueError, match="momentum must be"):
            create_strategy("fbn", stats_momentum=text)
    wrapped = create_strategy("fedfn", base="fbn", options={"stats_momentum": "none"})
    assert wrapped.convert(nested_model()).model.stem[1].momentum is None
