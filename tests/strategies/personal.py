"""What fedbn and silobn share: an oracle of one plain model per client, and three claims."""

import copy

import torch
from torch import nn

from fednorm.algorithms import create_algorithm
from fednorm.core.messages import ClientState
from fednorm.core.round import broadcast, client_round
from support import ToyClients, last, nested_model, task_of

ALGORITHMS = [
    create_algorithm("dsgd", lr=0.1, momentum=0.9),
    create_algorithm("fedavg", lr=0.1, momentum=0.9, momentum_state="global"),
    create_algorithm("fedavg", lr=0.1, momentum=0.9, momentum_state="local"),
]
STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


def list_keys(model, *names):
    """List these tensors of all BatchNorm layers, found with plain torch."""
    return {
        f"{path}.{name}"
        for path, module in model.named_modules()
        if isinstance(module, nn.BatchNorm2d)
        for name in names
    }


def assert_nothing_personal_is_sent(strategy, step, names):
    """Assert that `names` of BatchNorm layers stay with the client, and that the rest is sent."""
    task = task_of(strategy, step)
    personal = list_keys(nested_model(), *names)
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
        list_keys(nested_model(), *STATISTICS) - personal
    )


def assert_clients_differ(strategy, step, names):
    """Assert that two clients have different personal tensors after five rounds."""
    result = last(task_of(strategy, step), ToyClients(), 5)
    first, second = result.client_states[0].tensors, result.client_states[1].tensors
    for key in list_keys(nested_model(), *names):
        if "num_batches" not in key:
            assert not torch.equal(first[key], second[key]), key


def assert_is_training_with_own_tensors(strategy, names):
    """Compare with one plain model per client, of which only what is not personal is averaged."""
    clients = ToyClients(sizes=(4, 6), steps=2)
    task = task_of(strategy, create_algorithm("fedavg", lr=0.1))
    result = last(task, clients, 4)
    models = [nested_model() for _ in range(2)]
    personal = list_keys(models[0], *names)
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
