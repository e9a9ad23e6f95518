"""Training algorithms against plain torch."""

import re
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import nn

from fednorm import algorithms
from fednorm.algorithms import create_algorithm
from fednorm.engines.loop import rounds
from support import CLASSES, ToyClients, last, nested_model, task_of


def model_states(result):
    return torch.cat([t.flatten() for t in result.state.weights.values()])


@pytest.mark.slow
@pytest.mark.parametrize("state", ["reset", "local", "global"])
def test_momentum_between_rounds_with_one_client(state):
    """Kept momentum makes rounds of 2 steps one long run; reset starts anew every round."""
    clients = ToyClients(sizes=(5,), steps=2)
    step = create_algorithm(
        "fedavg", lr=0.05, momentum=0.9, weight_decay=1e-3, momentum_state=state
    )
    ours = last(task_of("ln", step), clients, 4)
    task = task_of("ln", step)
    model = task.model.train()
    optimizer = None
    for round_ in range(1, 5):
        if optimizer is None or state == "reset":
            optimizer = torch.optim.SGD(
                model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3
            )
        for x, y in clients.batches(0, round_).steps:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    for name, value in model.named_parameters():
        torch.testing.assert_close(ours.state.weights[name], value.detach(), rtol=0, atol=1e-10)


@pytest.mark.slow
def test_adam_is_reset_every_round():
    clients = ToyClients(sizes=(5,), steps=2)
    ours = last(task_of("ln", create_algorithm("fedavg", lr=0.01, optimizer="adam")), clients, 3)
    model = task_of("ln", create_algorithm("fedavg")).model.train()
    for round_ in range(1, 4):
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        for x, y in clients.batches(0, round_).steps:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    for name, value in model.named_parameters():
        torch.testing.assert_close(ours.state.weights[name], value.detach(), rtol=0, atol=1e-10)
    with pytest.raises(ValueError, match="use momentum = 0"):
        create_algorithm("fedavg", optimizer="adam", momentum=0.9)


@pytest.mark.slow
def test_global_momentum_is_the_weighted_mean_and_doubles_the_message():
    clients = ToyClients(sizes=(2, 6), steps=2)
    plain = create_algorithm("fedavg", lr=0.05, momentum=0.9)
    shared = create_algorithm("fedavg", lr=0.05, momentum=0.9, momentum_state="global")
    without, with_ = (last(task_of("none", step), clients, 2) for step in (plain, shared))
    assert with_.bytes_up - without.bytes_up == without.bytes_up - 8
    assert with_.bytes_down - without.bytes_down == without.bytes_down - 8
    one = [
        last(task_of("none", shared), ToyClients(sizes=(2, 6), steps=2, absent={1: (c,)}), 1).state
        for c in (1, 0)
    ]
    both = last(task_of("none", shared), clients, 1).state
    for name, value in both.momentum.items():
        mean = (2 * one[0].momentum[name] + 6 * one[1].momentum[name]) / 8
        torch.testing.assert_close(value, mean)


def test_local_momentum_stays_with_its_client():
    step = create_algorithm("fedavg", lr=0.05, momentum=0.9, momentum_state="local")
    result = last(task_of("none", step), ToyClients(steps=2), 2)
    assert not result.state.momentum
    name = next(iter(result.state.weights))
    assert not torch.equal(
        result.client_states[0].optimizer[name], result.client_states[1].optimizer[name]
    )


def test_dsgd_mean_is_the_gradient_of_the_merged_batch():
    clients = ToyClients(sizes=(1, 7, 3))
    task = task_of("ln", create_algorithm("dsgd", lr=1.0, weight_decay=0.01))
    start = {n: p.detach().clone() for n, p in task.model.named_parameters()}
    after = last(task, clients, 1).state
    model = task_of("ln", create_algorithm("dsgd")).model
    x, y = clients.union(1)
    nn.functional.cross_entropy(model(x), y).backward()
    for name, parameter in model.named_parameters():
        expected = start[name] - (parameter.grad + 0.01 * start[name])
        torch.testing.assert_close(after.weights[name], expected, rtol=0, atol=1e-12)


def test_dsgd_keeps_the_momentum_of_absent_clients():
    step = create_algorithm("dsgd", lr=0.1, momentum=0.9)
    task = task_of("none", step)
    one, two, three = rounds(task, ToyClients(absent={2: (0,)}), 3)
    name = next(iter(one.state.weights))
    assert three.client_states[0].optimizer[name] is not None
    del two
    again = list(rounds(task_of("none", step), ToyClients(absent={2: (0,)}), 2))
    first = again[0].client_states[1].optimizer[name]
    assert torch.equal(
        again[1].client_states[0].optimizer[name], again[0].client_states[0].optimizer[name]
    )
    assert first is not None


def test_schedules():
    step = create_algorithm("dsgd", lr=1.0, schedule="step")
    rates = [step.rate(t, 8) for t in range(1, 9)]
    assert rates == pytest.approx([1, 1, 1, 1, 0.1, 0.1, 0.01, 0.01])
    inverse = create_algorithm("dsgd", lr=0.1, schedule="inverse")
    rates = [inverse.rate(t, None) for t in (1, 1000, 1001, 2001, 3000)]
    assert rates == pytest.approx([0.1, 0.1, 0.05, 0.1 / 3, 0.1 / 3])
    sooner = create_algorithm("dsgd", lr=0.1, schedule="inverse", decay_every=2)
    assert [sooner.rate(t, None) for t in (1, 2, 3, 5)] == pytest.approx([0.1, 0.1, 0.05, 0.1 / 3])
    with pytest.raises(ValueError, match="needs the number of rounds"):
        step.rate(1, None)


@pytest.mark.parametrize("name", ["dsgd", "fedavg"])
def test_the_schedule_reaches_the_steps(name):
    """In the last quarter the weights move a hundred times less."""
    task = task_of("none", create_algorithm(name, lr=0.01, schedule="step"), count=8)
    states = [task.initial_state] + [r.state for r in rounds(task, ToyClients(), 8)]
    moves = [
        sum(float((b.weights[n] - a.weights[n]).norm()) for n in a.weights)
        for a, b in pairwise(states)
    ]
    assert 3 < moves[3] / moves[4] < 30
    assert 30 < moves[3] / moves[7] < 300


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"lr": 0}, "lr must be positive"),
        ({"momentum": 1.0}, "momentum must be in"),
        ({"weight_decay": -1}, "weight_decay must be finite and not negative"),
        ({"schedule": "cosine"}, "schedule must be"),
    ],
)
def test_refuses_impossible_fields(fields, message):
    with pytest.raises(ValueError, match=message):
        create_algorithm("fedavg", **fields)


def test_an_unused_parameter_does_not_change():
    model = nested_model()
    model.unused = nn.Parameter(torch.ones(3, dtype=torch.float64))
    for name in ("dsgd", "fedavg"):
        state = last(
            task_of("fbn", create_algorithm(name, lr=0.1), model=model), ToyClients(), 2
        ).state
        assert torch.equal(state.weights["unused"], torch.ones(3, dtype=torch.float64))


def test_a_parameter_without_gradient_is_shared_but_does_not_learn():
    model = nested_model()
    model.stem[0].weight.requires_grad_(requires_grad=False)
    for name in ("dsgd", "fedavg"):
        state = last(
            task_of("fbn", create_algorithm(name, lr=0.1), model=model), ToyClients(), 2
        ).state
        assert torch.equal(state.weights["stem.0.weight"], model.stem[0].weight)


def test_dsgd_with_personal_parameters_only():
    torch.manual_seed(0)
    layers = [nn.Flatten(), nn.Linear(64, 6), nn.BatchNorm1d(6), nn.Linear(6, CLASSES)]
    model = nn.Sequential(*layers).double()
    for layer in (model[1], model[3]):
        layer.requires_grad_(requires_grad=False)
    task = task_of("fedbn", create_algorithm("dsgd", lr=0.1), model=model)
    result = last(task, ToyClients(sizes=(4, 4)), 2)
    assert not result.replies[0].update
    assert torch.equal(result.state.weights["1.weight"], model[1].weight)


def test_the_bases_of_own_algorithms_are_where_the_documentation_says():
    page = Path(__file__).parents[2] / "docs/plugins.md"
    (row,) = re.findall(r"^\| `algorithm` .*$", page.read_text(), re.MULTILINE)
    bases = re.findall(r"`([A-Z]\w+)`", row)
    assert {"FedAvg", "DSGD", "SGD"} <= set(bases)
    assert all(hasattr(algorithms, base) for base in bases)
