"""Naive averaging is FedAvg to the letter, and it is not what one machine would compute."""

import pytest
import torch
from torch import nn

from fednorm.algorithms import create_algorithm
from fednorm.core.messages import ClientState
from fednorm.core.round import broadcast, client_round
from support import ToyClients, last, nested_model, plain_fedavg, task_of

LR = 0.05


@pytest.mark.slow
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_is_fedavg(momentum):
    clients = ToyClients(sizes=(2, 6, 4), steps=3)
    task = task_of("naive", create_algorithm("fedavg", lr=LR, momentum=momentum))
    state = last(task, clients, 5).state
    oracle = plain_fedavg(nested_model(), clients, 5, lr=LR, momentum=momentum).state_dict()
    for name, value in state.weights.items():
        torch.testing.assert_close(value, oracle[name], rtol=0, atol=1e-10)
    for path, running in state.running.items():
        torch.testing.assert_close(running.mean, oracle[f"{path}.running_mean"])
        torch.testing.assert_close(running.var, oracle[f"{path}.running_var"])
        assert running.num_batches == 15


@pytest.mark.slow
def test_is_not_one_machine():
    clients = ToyClients()
    naive = last(task_of("naive", create_algorithm("dsgd", lr=LR)), clients).state
    exact = last(task_of("fedtan", create_algorithm("dsgd", lr=LR)), clients).state
    gap = max(
        float((naive.running[path].var - exact.running[path].var).abs().max())
        for path in naive.running
    )
    assert gap > 1.0


def test_variance_bias_is_the_variance_between_clients():
    """What averaging loses, to the digit, for the first layer after one round."""
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 4)).double()
    clients, beta = ToyClients(sizes=(6, 6, 6), shape=(3,)), 0.1
    averaged, pooled = (
        last(
            task_of("naive", create_algorithm("dsgd", lr=LR), model=model, statistics=statistics),
            clients,
            1,
        ).state.running["0"]
        for statistics in ("average", "pool")
    )
    xs = [clients.batches(c, 1).steps[0][0] for c in range(3)]
    means = torch.stack([x.mean(0) for x in xs])
    between = means.var(0, correction=0)
    # Biased variances, so that the law of total variance holds without n-1 corrections.
    within = torch.stack([x.var(0, correction=0) for x in xs]).mean(0)
    total = torch.cat(xs).var(0, correction=0)
    torch.testing.assert_close(total - within, between)
    unbiased = (pooled.var - 0.9) / beta * (17 / 18) - (averaged.var - 0.9) / beta * (5 / 6)
    torch.testing.assert_close(unbiased, between)
    torch.testing.assert_close(averaged.mean, pooled.mean)


@pytest.mark.parametrize("name", ["naive", "fbn", "fedtan", "fixbn"])
def test_average_and_pool_agree_when_there_is_one_client(name):
    clients = ToyClients(sizes=(6,))
    states = [
        last(
            task_of(name, create_algorithm("dsgd", lr=LR), statistics=statistics), clients, 3
        ).state
        for statistics in ("average", "pool")
    ]
    for path in states[0].running:
        torch.testing.assert_close(states[0].running[path].var, states[1].running[path].var)


def test_cumulative_average_is_torchs():
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 4)).double()
    clients = ToyClients(sizes=(6,), shape=(3,))
    task = task_of("naive", create_algorithm("dsgd", lr=LR), model=model, stats_momentum=None)
    running = last(task, clients, 4).state.running["0"]
    plain = nn.BatchNorm1d(3, momentum=None).double()
    for round_ in range(1, 5):
        plain(clients.batches(0, round_).steps[0][0])
    torch.testing.assert_close(running.mean, plain.running_mean)
    torch.testing.assert_close(running.var, plain.running_var)


def test_reply_reports_the_clients_own_running_statistics():
    clients, task = ToyClients(), task_of("naive", create_algorithm("dsgd", lr=LR))
    received = broadcast(task, task.initial_state)
    reply, _ = client_round(task, received, ClientState(), clients.batches(1, 1))
    plain = nested_model().train()
    plain(clients.batches(1, 1).steps[0][0])
    for path, report in reply.stats.items():
        torch.testing.assert_close(
            report.moments.var, plain.get_submodule(path).running_var, rtol=0, atol=1e-12
        )
