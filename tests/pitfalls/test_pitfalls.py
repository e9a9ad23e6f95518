"""Mistakes that other projects made, each as a test that it is not made here.

The first five stand in the code of a widely copied tutorial; the others in the named projects.
"""

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch import nn

import fednorm
from fednorm import create_strategy
from fednorm.algorithms import create_algorithm
from fednorm.core.aggregation import Aggregator, weighted_mean
from fednorm.core.layout import find_kinds, find_layout, find_roles
from fednorm.core.task import Task, export
from fednorm.core.types import Kind, Role
from fednorm.data import load_dataset
from fednorm.engines.evaluation import calibrate_for_test
from fednorm.errors import ConfigError
from fednorm.strategies import STRATEGIES
from support import ToyClients, last, nested_model, task_of

STEP = create_algorithm("dsgd", lr=0.05, momentum=0.9)


class Nameless(nn.Module):
    """A residual block in which no BatchNorm has "bn" or "norm" in its path, and a Linear has."""

    def __init__(self):
        super().__init__()
        self.bn_conv = nn.Linear(4, 4)
        self.shortcut = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        self.a = nn.ModuleList([nn.ModuleDict({"b": nn.BatchNorm1d(4)})])
        self.norm_head = nn.Linear(4, 3)

    def forward(self, x):
        return self.norm_head(self.a[0]["b"](self.bn_conv(x)) + self.shortcut(x))


def test_layers_are_found_by_type_not_by_name():
    """`'bn' in key`: med-air/FedBN, PFLlib, FL-bench, Flower's baseline, the tutorial."""
    found = find_kinds(Nameless())
    assert {k for k, kind in found.items() if kind is Kind.AFFINE} == {
        "shortcut.1.weight",
        "shortcut.1.bias",
        "a.0.b.weight",
        "a.0.b.bias",
    }
    assert found["bn_conv.weight"] is found["norm_head.bias"] is Kind.WEIGHT


def test_excluding_batch_norm_excludes_its_affine_part_too():
    """The tutorial's "exclude BN" server still averages γ and β."""
    task = task_of("fedbn", STEP, model=Nameless().double())
    result = last(task, ToyClients(shape=(4,), classes=3), 3)
    assert not {"shortcut.1.weight", "a.0.b.bias"} & set(result.state.weights)


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n, c in STRATEGIES.items() if hasattr(c, "statistics")])
@pytest.mark.parametrize("kind", ["dsgd", "fedavg"])
def test_the_servers_statistics_leave_zero_and_one(name, kind):
    """Evaluation with mean 0 and variance 1: the tutorial, byzfl, FedLab #293."""
    task = task_of(name, create_algorithm(kind, lr=0.05))
    result = last(task, ToyClients(), 3)
    state = calibrate_for_test(task, result.state, result.client_states, ToyClients())
    model = export(task, state, result.client_states[0])
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            assert not torch.equal(module.running_mean, torch.zeros_like(module.running_mean))
            assert not torch.equal(module.running_var, torch.ones_like(module.running_var))


def test_counters_stay_integers():
    """Averaged as floats: the tutorial, flower #611 and #4344, secretflow #1009."""
    model = nested_model()
    model.register_buffer("positions", torch.arange(5))
    task = task_of("naive", STEP, model=model)
    state = last(task, ToyClients(absent={1: (0,), 2: (1,)}), 3).state
    assert state.buffers["positions"].dtype is torch.int64
    assert torch.equal(state.buffers["positions"], torch.arange(5))
    assert {r.num_batches for r in state.running.values()} == {3}
    saved = export(task, state).state_dict()
    assert saved["stem.1.num_batches_tracked"].dtype is torch.int64
    nested = nested_model()
    nested.register_buffer("positions", torch.zeros(5, dtype=torch.int64))
    nested.load_state_dict(saved, strict=True)


def test_a_counter_outside_normalization_is_carried_as_the_maximum():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nested_model()
            self.register_buffer("calls", torch.tensor(0))

        def forward(self, x):
            self.calls += len(x)
            return self.body(x)

    task = task_of("naive", STEP, model=Counting())
    state = last(task, ToyClients(sizes=(2, 7, 4)), 3).state
    assert state.buffers["calls"].dtype is torch.int64
    assert int(state.buffers["calls"]) == 21


def test_numpys_seed_does_not_decide_the_data():
    """`np.random.seed` before torch's generator: the tutorial's data are not reproducible."""
    np.random.seed(1)  # noqa: NPY002 (this is the mistake)
    torch.manual_seed(1)
    one = load_dataset("patterns", seed=3, samples=20, test=5)
    np.random.seed(2)  # noqa: NPY002
    torch.manual_seed(2)
    two = load_dataset("patterns", seed=3, samples=20, test=5)
    other = load_dataset("patterns", seed=4, samples=20, test=5)
    assert torch.equal(one.x, two.x)
    assert not torch.equal(one.x, other.x)


def test_nested_layers_keep_their_whole_path():
    """A type test that loses the parent's prefix: fluke keeps 1 of 20 layers local."""
    model = nested_model()
    personal = [
        key
        for key, role in find_roles(model, create_strategy("fedbn").role).items()
        if role is Role.PERSONAL
    ]
    layers = [m for m in model.modules() if isinstance(m, nn.BatchNorm2d)]
    assert len(personal) == 5 * len(layers)
    assert set(personal) <= set(model.state_dict())


def test_buffers_are_aggregated_and_not_taken_from_client_0():
    """`parameters()` forgets buffers: PFLlib #260, FedScale #57, FLamby #260."""

    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nested_model()
            self.register_buffer("level", torch.zeros((), dtype=torch.float64))

        def forward(self, x):
            self.level += x.mean()
            return self.body(x)

    clients = ToyClients(sizes=(2, 6, 4))
    result = last(task_of("naive", STEP, model=Scaled()), clients, 1)
    levels = [clients.batches(c, 1).steps[0][0].mean() for c in range(3)]
    expected = (2 * levels[0] + 6 * levels[1] + 4 * levels[2]) / 12
    torch.testing.assert_close(result.state.buffers["level"], expected)
    first = last(task_of("naive", STEP), clients, 1).state
    alone = last(task_of("naive", STEP), ToyClients(sizes=(2, 6, 4), absent={1: (1, 2)}), 1).state
    for path in first.running:
        assert not torch.allclose(first.running[path].mean, alone.running[path].mean)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["naive", "fbn", "fixbn", "fedtan"])
def test_the_optimiser_never_sees_statistics(name):
    """A server optimiser over running variances makes them negative: flower #1060, FL4Health."""
    task = task_of(name, create_algorithm("dsgd", lr=5.0))
    state = task.initial_state
    assert set(state.weights) == {n for n, _ in nested_model().named_parameters()}
    for running in last(task, ToyClients(), 3).state.running.values():
        assert (running.var > 0).all()


def test_weights_and_statistics_are_aggregated_apart():
    """One vector for both would let one distort the other's distances: byzfl."""
    seen = {"weights": [], "statistics": []}

    @dataclass
    class Watch(Aggregator):
        kind: str

        def __call__(self, values, weights):
            seen[self.kind].append(tuple(values.shape[1:]))
            return weighted_mean(values, weights)

    model = nested_model()
    task = Task.build(
        model,
        create_strategy("fbn"),
        STEP,
        aggregator=Watch("weights"),
        statistics_aggregator=Watch("statistics"),
    )
    last(task, ToyClients(), 1)
    assert seen["weights"] == [(sum(p.numel() for p in model.parameters()),)]
    layers = [m for m in model.modules() if isinstance(m, nn.BatchNorm2d)]
    assert len(seen["statistics"]) == 3 * len(layers)


def test_a_batch_of_one_is_refused_before_training():
    """FederatedScope #123."""
    with pytest.raises(ConfigError, match="batch of 1 sample"):
        fednorm.simulate("naive", batch_size=1, rounds=1)
    with pytest.raises(ConfigError, match="client 0"):
        fednorm.simulate("fedbn", data={"name": "ring", "samples_per_class": 1}, rounds=1)


def test_a_leftover_of_one_sample_joins_the_batch_before():
    result = fednorm.simulate(
        "naive",
        data={"name": "ring", "samples_per_class": 21},
        partition="natural",
        algorithm="fedavg",
        local_epochs=1,
        batch_size=20,
        rounds=2,
    )
    assert result.status == "finished"


def test_fedbn_without_batch_norm_is_an_error_not_fedavg():
    """PFLlib #42."""
    with pytest.raises(ValueError, match="FedBN needs BatchNorm layers, but Linear has none"):
        create_strategy("fedbn").convert(nn.Linear(2, 2))


def test_a_batch_norm_that_no_strategy_handles_is_named():
    model = nn.Sequential(nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2))
    with pytest.raises(ValueError, match=r"'1' \(BatchNorm2d\) tracks running statistics"):
        find_layout(model, create_strategy("fbn").role)


def test_counters_of_clients_with_different_numbers_of_steps_are_carried_as_the_maximum():
    class Uneven(ToyClients):
        def batches(self, client, round_):
            batches = super().batches(client, round_)
            return replace(batches, steps=batches.steps[: client + 1])

    for statistics in ("average", "pool"):
        task = task_of("naive", create_algorithm("fedavg", lr=0.05), statistics=statistics)
        running = last(task, Uneven(steps=3), 2).state.running
        assert {r.num_batches for r in running.values()} == {6}


def test_a_layer_in_two_places_has_a_role_in_both_and_travels_once():
    norm = nn.BatchNorm1d(4)
    layers = [nn.Flatten(), nn.Linear(64, 4), norm, nn.Linear(4, 4), norm, nn.Linear(4, 4)]
    model = nn.Sequential(*layers).double()
    task = task_of("fedbn", STEP, model=model)
    assert set(task.layout.roles) == set(model.state_dict())
    assert task.layout.roles["4.weight"] is Role.PERSONAL
    assert "4.weight" not in task.layout.personal
    result = last(task, ToyClients(), 2)
    assert int(result.client_states[0].tensors["2.num_batches_tracked"]) == 4


def test_a_constant_buffer_stays_constant_to_the_bit():
    model = nested_model().float()
    model.register_buffer("level", torch.tensor([0.1, 1 / 3, 7e-9]))

    class Single(ToyClients):
        def _batch(self, client, generator):
            x, y = super()._batch(client, generator)
            return x.float(), y

    state = last(task_of("naive", STEP, model=model), Single(sizes=(2, 7, 5)), 5).state
    assert torch.equal(state.buffers["level"], model.level)
