"""What must be the same: one client and one machine, two runs of a seed, any order of clients."""

import pytest
import torch
from torch import nn

from fednorm import ClientState, broadcast, client_round, server_round
from fednorm.algorithms import create_algorithm
from fednorm.core.types import Role
from fednorm.engines.evaluation import calibrate_for_test, is_personal
from fednorm.engines.merged_batch import MergedClients
from fednorm.strategies import STRATEGIES, create_strategy
from support import ToyClients, last, task_of

LR = 0.05
SHARING = [
    name
    for name, cls in STRATEGIES.items()
    if Role.PERSONAL not in create_strategy(name).roles.values() and hasattr(cls, "needs_tracking")
]


def flat(state):
    parts = [t.flatten() for t in state.weights.values()]
    parts += [t.flatten() for r in state.running.values() for t in (r.mean, r.var)]
    return torch.cat(parts)


def test_the_sharing_strategies_are_found():
    assert {"naive", "fixbn", "fbn", "fedtan"} <= set(SHARING)


@pytest.mark.slow
@pytest.mark.parametrize("name", SHARING)
def test_one_client_is_one_machine(name):
    clients = ToyClients(sizes=(6,))
    step = create_algorithm("dsgd", lr=LR, momentum=0.9)
    alone = last(task_of(name, step), clients).state
    central = last(task_of(name, step), MergedClients(clients)).state
    torch.testing.assert_close(flat(alone), flat(central), rtol=0, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(STRATEGIES))
@pytest.mark.parametrize("kind", ["dsgd", "fedavg"])
def test_same_seed_same_result_in_any_order(name, kind):
    class Backwards(ToyClients):
        def participants(self, round_):
            return super().participants(round_)[::-1]

    fields = {"momentum": 0.9, "lr": LR}
    steps = 1 if kind == "dsgd" else 2
    one, again, turned = (
        last(task_of(name, create_algorithm(kind, **fields)), clients, 3)
        for clients in (ToyClients(steps=steps), ToyClients(steps=steps), Backwards(steps=steps))
    )
    assert torch.equal(flat(one.state), flat(again.state))
    assert torch.equal(flat(one.state), flat(turned.state))
    for client, client_state in one.client_states.items():
        for key, value in client_state.tensors.items():
            assert torch.equal(value, turned.client_states[client].tensors[key])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gn", "ln", "in", "none", "gn_ws", "fixup", "fedwon"])
def test_norms_without_statistics_equal_one_machine(name):
    """No sample depends on another, so one gradient step is that of the merged batch."""
    clients = ToyClients(sizes=(2, 7, 1))
    step = create_algorithm("dsgd", lr=LR)
    federated = last(task_of(name, step), clients).state
    central = last(task_of(name, step), MergedClients(clients)).state
    torch.testing.assert_close(flat(federated), flat(central), rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", ["fedbn", "silobn"])
def test_personal_strategies_say_so(name):
    assert is_personal(task_of(create_strategy(name), create_algorithm("dsgd", lr=LR)))


def test_training_leaves_the_callers_randomness_alone():
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    last(task_of("fbn", create_algorithm("dsgd", lr=LR)), ToyClients(), 2)
    assert torch.equal(torch.rand(3), expected)


def test_dropout_is_seeded_by_client_and_round():
    model = nn.Sequential(
        nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 4)
    ).double()
    states = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        task = task_of("naive", create_algorithm("dsgd", lr=LR), model=model)
        states.append(flat(last(task, ToyClients(), 3).state))
    assert torch.equal(*states)


def test_the_server_does_not_mind_the_order_of_replies():
    task, clients = task_of("fbn", create_algorithm("dsgd", lr=LR)), ToyClients(sizes=(3, 5, 4))
    received = broadcast(task, task.initial_state)
    replies = [
        client_round(task, received, ClientState(), clients.batches(c, 1))[0] for c in range(3)
    ]
    one, two = (server_round(task, task.initial_state, r) for r in (replies, replies[::-1]))
    assert torch.equal(flat(one), flat(two))


@pytest.mark.parametrize("name", ["hbn", "heterofl"])
def test_calibration_leaves_the_callers_randomness_alone(name):
    model = nn.Sequential(
        nn.Flatten(), nn.Dropout(0.5), nn.Linear(64, 6), nn.BatchNorm1d(6), nn.Linear(6, 4)
    ).double()
    variances = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        expected = torch.rand(2)
        torch.manual_seed(seed)
        task = task_of(name, create_algorithm("dsgd", lr=LR), model=model)
        result = last(task, ToyClients(), 2)
        variances.append(calibrate_for_test(task, result.state, {}, ToyClients()).running["3"].var)
        assert torch.equal(torch.rand(2), expected)
    assert torch.equal(*variances)
