"""FedBN and SiloBN: what stays with the client really stays there."""

import copy

import pytest
import torch
from torch import nn

from fednorm.algorithms import create_algorithm
from fednorm.core.messages import ClientState
from fednorm.core.round import broadcast, client_round
from fednorm.engines.evaluation import score_clients
from support import ToyClients, last, nested_model, task_of

ALGORITHMS = [
    create_algorithm("dsgd", lr=0.1, momentum=0.9),
    create_algorithm("fedavg", lr=0.1, momentum=0.9, momentum_state="global"),
    create_algorithm("fedavg", lr=0.1, momentum=0.9, momentum_state="local"),
]


def keys(model, *names):
    """All tensors of BatchNorm layers, found with plain torch."""
    return {
        f"{path}.{name}"
        for path, module in model.named_modules()
        if isinstance(module, nn.BatchNorm2d)
        for name in names
    }


STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
PERSONAL = {"fedbn": ("weight", "bias", *STATISTICS), "silobn": STATISTICS}


@pytest.mark.parametrize("name", PERSONAL)
@pytest.mark.parametrize("step", ALGORITHMS)
def test_no_personal_tensor_in_any_reply(name, step):
    task = task_of(name, step)
    personal = keys(nested_model(), *PERSONAL[name])
    assert "blocks.1.downsample.1.running_var" in personal
    assert set(task.layout.personal) == personal
    received = broadcast(task, task.initial_state)
    reply, client_state = client_round(task, received, ClientState(), ToyClients().batches(0, 1))
    assert not reply.stats
    for part in (
        reply.update,
        reply.buffers,
        reply.momentum,
        received.state.weights,
        received.state.running,
    ):
        assert not personal & set(part)
    assert set(client_state.tensors) == personal
    assert set(reply.update) | personal == set(nested_model().state_dict()) - (
        keys(nested_model(), *STATISTICS) - personal
    )


@pytest.mark.parametrize("name", PERSONAL)
@pytest.mark.parametrize("step", ALGORITHMS)
def test_personal_tensors_differ_between_clients(name, step):
    result = last(task_of(name, step), ToyClients(), 5)
    first, second = result.client_states[0].tensors, result.client_states[1].tensors
    for key in keys(nested_model(), *PERSONAL[name]):
        if "num_batches" not in key:
            assert not torch.equal(first[key], second[key]), key


@pytest.mark.parametrize("name", PERSONAL)
def test_is_training_with_own_tensors(name):
    """Oracle: per-client plain models, of which only what is not personal is averaged."""
    clients = ToyClients(sizes=(4, 6), steps=2)
    task = task_of(name, create_algorithm("fedavg", lr=0.1))
    result = last(task, clients, 4)
    models = [nested_model() for _ in range(2)]
    personal = keys(models[0], *PERSONAL[name])
    for round_ in range(1, 5):
        states = []
        for client, model in enumerate(models):
            model.train()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for x, y in clients.batches(client, round_).steps:
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()
            states.append(copy.deepcopy(model.state_dict()))
        for model, state in zip(models, states, strict=True):
            mixed = {k: (4 * states[0][k] + 6 * states[1][k]) / 10 for k in state}
            model.load_state_dict({k: state[k] if k in personal else mixed[k] for k in state})
    for client, model in enumerate(models):
        for key in personal:
            torch.testing.assert_close(
                result.client_states[client].tensors[key], model.state_dict()[key]
            )
    for key, value in result.state.weights.items():
        torch.testing.assert_close(value, models[0].state_dict()[key], rtol=0, atol=1e-10)


def test_each_client_is_tested_with_its_own_layers():
    clients = ToyClients()
    task = task_of("fedbn", create_algorithm("dsgd", lr=0.1))
    result = last(task, clients, 3)
    own = score_clients(task, result.state, result.client_states, clients, range(3))
    losses = [score.loss for score in own.values()]
    swapped = {0: result.client_states[1], 1: result.client_states[0], 2: result.client_states[2]}
    others = score_clients(task, result.state, swapped, clients, range(3))
    other = [score.loss for score in others.values()]
    assert losses[0] != other[0]
    assert losses[1] != other[1]
    assert losses[2] == other[2]
