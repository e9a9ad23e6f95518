"""Clients and models for tests: small, seeded, far from identically distributed."""

import copy

import torch
from torch import nn
from torch.nn import functional

from fednorm.algorithms import create_algorithm
from fednorm.contract.training import CLASSES, SHAPE, ToyClients, nested_model
from fednorm.core.messages import ClientState
from fednorm.core.round import broadcast, client_round, server_round
from fednorm.core.task import Task
from fednorm.engines import ENGINES
from fednorm.engines.base import NO_FAULTS, EngineRun
from fednorm.engines.loop import rounds
from fednorm.engines.processes import ProcessEngine
from fednorm.strategies import create_strategy

__all__ = ["CLASSES", "SHAPE", "ToyClients", "nested_model"]


def task_of(name, algorithm, *, model=None, count=20, **fields):
    """Make a task; `name` may be a strategy object."""
    chosen = create_strategy(name, **fields) if isinstance(name, str) else name
    return Task.build(model or nested_model(), chosen, algorithm, rounds=count)


def why_not(engine, task, clients, **fields):
    """Return why an engine refuses to train a task, or None."""
    share = getattr(clients, "participation", 1.0)
    return ENGINES[engine].why_not(EngineRun(task, clients, 1, participation=share, **fields))


def in_processes(task, clients, count, *, stacked=False, faults=NO_FAULTS):
    """Run rounds in two processes."""
    run = EngineRun(task, clients, count, faults=faults, processes=2)
    return ProcessEngine(stacked).rounds(run)


def last(task, clients, count=20):
    """Run rounds and return the last one."""
    *_, result = rounds(task, clients, count)
    return result


def run_by_hand(task, clients, count, lost=lambda *_: False):
    """Run rounds with the two public functions; replies of lost clients never arrive."""
    state, client_states = task.initial_state, {}
    for _ in range(count):
        received = broadcast(task, state)
        replies = []
        for client in clients.participants(received.round):
            batches = clients.batches(client, received.round)
            client_state = client_states.get(client, ClientState())
            reply, kept = client_round(task, received, client_state, batches)
            if not lost(received.round, client):
                replies.append(reply)
                client_states[client] = kept
        state = server_round(task, state, replies)
    return state


def assert_same_state(state, model, tolerance=1e-10):
    """Compare weights and running statistics with those of a plain torch model."""
    expected = model.state_dict()
    for name, value in state.weights.items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=tolerance)
    for path, running in state.running.items():
        torch.testing.assert_close(
            running.mean, expected[f"{path}.running_mean"], rtol=0, atol=tolerance
        )
        torch.testing.assert_close(
            running.var, expected[f"{path}.running_var"], rtol=0, atol=tolerance
        )
        assert running.num_batches == int(expected[f"{path}.num_batches_tracked"])


def plain_fedavg(model, clients, count, lr, momentum=0.0):
    """Train as textbook FedAvg does: every float tensor is averaged, counters are not."""
    for round_ in range(1, count + 1):
        states, weights = [], []
        for client in clients.participants(round_):
            local = copy.deepcopy(model).train()
            optimizer = torch.optim.SGD(local.parameters(), lr=lr, momentum=momentum)
            batches = clients.batches(client, round_)
            for x, y in batches.steps:
                optimizer.zero_grad()
                functional.cross_entropy(local(x), y).backward()
                optimizer.step()
            states.append(local.state_dict())
            weights.append(batches.examples)
        total = sum(weights)
        model.load_state_dict(
            {
                key: sum(w / total * s[key] for w, s in zip(weights, states, strict=True))
                if states[0][key].is_floating_point()
                else max(s[key] for s in states)
                for key in states[0]
            }
        )
    return model


def replace_batch_norm(model, make):
    """Replace every BatchNorm2d layer of a plain model by `make(layer)`, with its γ and β."""
    for path, layer in list(model.named_modules()):
        if isinstance(layer, nn.BatchNorm2d):
            new = make(layer).double()
            new.load_state_dict(layer.state_dict(), strict=False)
            model.set_submodule(path, new)
    return model


def shifted_model():
    """Return the nested model with a γ and β per channel that are not 1 and 0."""
    model = nested_model()
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for layer in model.modules():
            if isinstance(layer, nn.BatchNorm2d):
                for tensor in (layer.weight, layer.bias):
                    tensor.copy_(0.5 + torch.rand(tensor.shape, generator=generator))
    return model


def assert_is_fedavg_with(strategy, make, count=3, **fields):
    """Compare rounds of unequal clients with FedAvg on a plain model whose layers are `make`'s."""
    clients = ToyClients(sizes=(2, 7, 4), steps=2)
    task = task_of(strategy, create_algorithm("fedavg", lr=0.05), model=shifted_model(), **fields)
    state = last(task, clients, count).state
    plain = plain_fedavg(replace_batch_norm(shifted_model(), make), clients, count, lr=0.05)
    oracle = dict(plain.named_parameters())
    assert not state.running
    assert set(state.weights) == set(oracle)
    for name, value in state.weights.items():
        torch.testing.assert_close(value, oracle[name].detach(), rtol=0, atol=1e-10)
