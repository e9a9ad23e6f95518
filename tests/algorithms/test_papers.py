"""Algorithms against their papers in numpy (`plain_federated.py`), several rounds, in float64.

Softmax regression, whose gradient is written out; clients differ in data, batches and local steps,
and some are absent.
"""

from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

import fednorm
from algorithms import plain_federated as plain
from fednorm.algorithms import ALGORITHMS, create_algorithm
from fednorm.core.messages import Batches
from fednorm.core.task import Task
from fednorm.engines.base import train_clients
from fednorm.engines.loop import rounds
from fednorm.strategies import create_strategy

INPUTS, CLASSES, ROUNDS, LR = 3, 4, 5, 0.3


@dataclass(frozen=True)
class UnequalClients:
    """Clients of unequal batches and numbers of steps; one is absent in rounds 2 and 4."""

    sizes: tuple[int, ...] = (3, 5, 4)
    steps: tuple[int, ...] = (2, 5, 1)

    def all(self):
        return list(range(len(self.sizes)))

    def participants(self, round_):
        return [client for client in self.all() if round_ % 2 or client != round_ // 2 - 1]

    def draw(self, client, round_):
        rng = np.random.default_rng([client, round_])
        for _ in range(self.steps[client]):
            x = rng.standard_normal((self.sizes[client], INPUTS)) * (1 + client) + client
            yield x, rng.integers(CLASSES, size=self.sizes[client])

    def batches(self, client, round_):
        steps = [(torch.from_numpy(x), torch.from_numpy(y)) for x, y in self.draw(client, round_)]
        examples = self.sizes[client] * self.steps[client]
        return Batches(client, steps, examples, batch_sizes=(self.sizes[client],) * len(steps))


CLIENTS = UnequalClients()


def find_gradient(w, x, y):
    """Return the gradient of the mean cross-entropy of softmax(x·Wᵀ + b)."""
    weight, bias = w[: CLASSES * INPUTS].reshape(CLASSES, INPUTS), w[CLASSES * INPUTS :]
    scores = x @ weight.T + bias
    shares = np.exp(scores - scores.max(1, keepdims=True))
    shares /= shares.sum(1, keepdims=True)
    shares[np.arange(len(y)), y] -= 1
    return np.concatenate([(shares.T @ x).ravel(), shares.sum(0)]) / len(y)


def list_clients(round_):
    """Return all clients of a round as the oracle has them, and which take part."""
    made = []
    for client in CLIENTS.all():
        drawn = list(CLIENTS.draw(client, round_))
        gradient = partial(lambda w, s, drawn: find_gradient(w, *drawn[s]), drawn=drawn)
        weight = CLIENTS.batches(client, round_).examples
        made.append(plain.Client(gradient, CLIENTS.steps[client], weight))
    return made, CLIENTS.participants(round_)


def build_task(name, **fields):
    torch.manual_seed(0)
    model = nn.Linear(INPUTS, CLASSES).double()
    algorithm = create_algorithm(name, lr=LR, **fields)
    return Task.build(model, create_strategy("none"), algorithm, clients=len(CLIENTS.all()))


def flatten(weights):
    return torch.cat([weights["weight"].flatten(), weights["bias"]]).numpy()


def assert_follows(task, step, tolerance=1e-10):
    """Compare rounds with the oracle's `step(weights, clients, chosen)`."""
    w = start = flatten(task.initial_state.weights)
    for round_, result in enumerate(rounds(task, CLIENTS, ROUNDS), start=1):
        w = step(w, *list_clients(round_))
        np.testing.assert_allclose(flatten(result.state.weights), w, rtol=0, atol=tolerance)
    assert np.abs(w - start).max() > 0.1  # or nothing would be tested


@pytest.mark.parametrize("mu", [0.0, 0.4])
@pytest.mark.parametrize("fields", [{}, {"momentum": 0.8, "weight_decay": 0.01}], ids=str)
def test_fedprox(mu, fields):
    step = partial(plain.step_sgd, lr=LR, **fields)

    def follow(w, clients, chosen):
        return plain.run_fedprox(w, clients, step=step, mu=mu, chosen=chosen)

    assert_follows(build_task("fedprox", mu=mu, **fields), follow)
    if not mu:
        assert_follows(build_task("fedavg", **fields), follow)


def test_the_proximal_term_is_clipped_with_the_gradient():
    step = partial(plain.step_sgd, lr=LR)

    def follow(w, clients, chosen):
        return plain.run_fedprox(w, clients, step=step, mu=2.0, chosen=chosen, max_norm=0.2)

    # torch's clipping, as the oracle's, adds 1e-6 to the norm.
    assert_follows(build_task("fedprox", mu=2.0, clip_norm=0.2), follow, tolerance=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adam", "adamw"])
def test_local_adam(optimizer):
    step = partial(plain.step_adam, lr=LR, weight_decay=0.1, adamw=optimizer == "adamw")

    def follow(w, clients, chosen):
        return plain.run_fedprox(w, clients, step=step, chosen=chosen)

    assert_follows(build_task("fedavg", optimizer=optimizer, weight_decay=0.1), follow)


@pytest.mark.parametrize("server_lr", [1.0, 0.6])
def test_scaffold(server_lr):
    zero = np.zeros(CLASSES * (INPUTS + 1))
    kept = {"c": zero, "controls": [zero] * 3}

    def follow(w, clients, chosen):
        w, kept["c"], kept["controls"] = plain.run_scaffold(
            w, kept["c"], kept["controls"], clients, lr=LR, server_lr=server_lr, chosen=chosen
        )
        return w

    task = build_task("scaffold", server_lr=server_lr)
    assert_follows(task, follow)
    *_, end = rounds(task, CLIENTS, ROUNDS)
    np.testing.assert_allclose(flatten(end.state.momentum), kept["c"], rtol=0, atol=1e-10)
    for client, control in enumerate(kept["controls"]):
        own = flatten(end.client_states[client].optimizer)
        np.testing.assert_allclose(own, control, rtol=0, atol=1e-10)
    # The shared control variate is the mean of the clients'.
    np.testing.assert_allclose(kept["c"], np.mean(kept["controls"], 0), rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", ["scaffold", "feddyn"])
def test_a_rejected_reply_moves_nothing_that_its_client_keeps(name):
    def damage(received, state, batches):
        results, answers = train_clients(task, received, state, batches)
        results = [
            (replace(reply, loss="none") if (reply.client, received.round) == (1, 2) else reply, s)
            for reply, s in results
        ]
        return results, answers

    task = build_task(name)
    before, refused, *_, end = rounds(task, CLIENTS, ROUNDS, train=damage)
    assert [one.client for one in refused.rejected] == [1]
    after, earlier = (flatten(r.client_states[1].optimizer) for r in (refused, before))
    np.testing.assert_array_equal(after, earlier)
    if name == "feddyn":
        return
    # The shared control variate is still the mean of the clients'.
    mean = np.mean([flatten(end.client_states[c].optimizer) for c in range(3)], 0)
    np.testing.assert_allclose(flatten(end.state.momentum), mean, rtol=0, atol=1e-10)


def test_control_variates_with_momentum_are_means_of_gradients():
    """Weighted as the gradients are in the change of weights."""
    task = build_task("scaffold", momentum=0.8)
    w, (clients, _) = flatten(task.initial_state.weights), list_clients(1)
    (first, *_) = rounds(task, CLIENTS, 1)
    for number, client in enumerate(clients):
        seen = []

        def record(v, s, client=client, seen=seen):
            seen.append(client.gradient(v, s))
            return seen[-1]

        step = partial(plain.step_sgd, lr=LR, momentum=0.8)
        plain.train_locally(w, client._replace(gradient=record), step=step)
        weights = plain.find_step_weights(client.steps, lr=LR, momentum=0.8)
        mean = plain.average(seen, weights / weights.sum())
        own = flatten(first.client_states[number].optimizer)
        np.testing.assert_allclose(own, mean, rtol=0, atol=1e-10)


@pytest.mark.parametrize("momentum", [0.0, 0.8])
def test_fednova(momentum):
    def follow(w, clients, chosen):
        return plain.run_fednova(w, clients, lr=LR, momentum=momentum, chosen=chosen)

    assert_follows(build_task("fednova", momentum=momentum), follow)


@pytest.mark.parametrize("fields", [{}, {"momentum": 0.5}], ids=str)
def test_feddyn(fields):
    zero = np.zeros(CLASSES * (INPUTS + 1))
    kept = {"h": zero, "gradients": [zero] * 3}
    step = partial(plain.step_sgd, lr=LR, **fields)

    def follow(w, clients, chosen):
        w, kept["h"], kept["gradients"] = plain.run_feddyn(
            w, kept["h"], kept["gradients"], clients, step=step, alpha=0.3, chosen=chosen
        )
        return w

    assert_follows(build_task("feddyn", alpha=0.3, **fields), follow)


@pytest.mark.parametrize("local", ["fedprox", "fednova"])
@pytest.mark.parametrize("rule", ["adam", "yogi", "adagrad", "sgd"])
def test_server_optimizers_on_any_algorithm(rule, local):
    momentum = 0.0 if rule == "adagrad" else 0.7
    state = None

    def follow(w, clients, chosen):
        nonlocal state
        if local == "fedprox":
            step = partial(plain.step_sgd, lr=LR)
            mean = plain.run_fedprox(w, clients, step=step, mu=0.1, chosen=chosen)
        else:
            mean = plain.run_fednova(w, clients, lr=LR, chosen=chosen)
        if rule == "sgd":
            w, state = plain.step_fedavgm(
                w, mean - w, 0.0 if state is None else state, server_lr=0.5, momentum=momentum
            )
        else:
            w, state = plain.step_fedopt(
                w, mean - w, state, kind=rule, server_lr=0.05, beta1=momentum
            )
        return w

    lr = 0.5 if rule == "sgd" else 0.05
    fields = {"server": rule, "server_lr": lr, "server_momentum": momentum}
    fields |= {"mu": 0.1} if local == "fedprox" else {}
    assert_follows(build_task(local, **fields), follow)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(ALGORITHMS.keys() - {"dsgd", "fedavg"}))
def test_as_users_run_it(name):
    """Float32, BatchNorm, unequal clients, partial participation, local epochs: it learns."""
    found = fednorm.simulate(
        "naive", algorithm={"name": name, "lr": 0.05}, partition="dirichlet_unbalanced=1",
        participation=0.6, local_epochs=1, rounds=15, eval_every=15,
    )  # fmt: skip
    assert found.status == "finished"
    assert not found.rejected
    assert found.final.accuracy > 0.5


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("fedprox", {"mu": -1.0}, "mu must be 0 or more"),
        ("feddyn", {"alpha": 0.0}, "alpha must be positive"),
        ("feddyn", {"server": "adam"}, "feddyn defines the server step"),
        ("feddyn", {"momentum_state": "local"}, "use momentum_state = 'reset'"),
        ("scaffold", {"optimizer": "adam"}, "use optimizer = 'sgd'"),
        ("fednova", {"momentum_state": "global", "momentum": 0.9}, "momentum_state = 'reset'"),
    ],
)
def test_refuses_impossible_fields(name, fields, message):
    with pytest.raises(ValueError, match=message):
        create_algorithm(name, **fields)
