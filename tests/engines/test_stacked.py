"""Clients side by side in a wide model: equal to the loop within rounding."""

import os
import signal

import pytest
import torch
from torch import nn
from torch.nn import functional

from fednorm.algorithms import create_algorithm
from fednorm.core.messages import Batches
from fednorm.engines import stacked
from fednorm.engines.loop import rounds as in_turn
from fednorm.engines.processes import WorkerPool
from fednorm.errors import ConfigError, NonFiniteLossError
from fednorm.experiment.comparison import run_comparison
from fednorm.experiment.prepare import prepare
from fednorm.experiment.schema.load import build_experiment
from fednorm.models import create_model as network
from fednorm.nn.stacked_model import widen
from fednorm.strategies import STRATEGIES
from populations import Population
from support import CLASSES, SHAPE, ToyClients, task_of, why_not

LOCAL = create_algorithm("fedavg", lr=0.05, momentum=0.9, momentum_state="local", weight_decay=1e-3)
ALGORITHMS = {
    "local momentum": LOCAL,
    "global momentum": create_algorithm("fedavg", lr=0.05, momentum=0.9, momentum_state="global"),
    "adam": create_algorithm("fedavg", lr=0.01, optimizer="adam"),
    "dsgd": create_algorithm("dsgd", lr=0.05, momentum=0.9),
}
# Batches of two shapes, and clients that were away: some trainer are cut short.
CLIENTS = ToyClients(sizes=(4, 6, 4, 4, 6, 4), steps=2, absent={2: (1, 3), 3: (0,)})
ALONE = {"fedtan", "switchnorm", "fixup", "fedfn"}  # exchanges, or layers over all channels


def first(clients):
    return [clients.batches(client, 1) for client in clients.participants(1)]


def close(one, other):
    assert one.keys() == other.keys()
    for name, value in one.items():
        torch.testing.assert_close(other[name], value, rtol=1e-9, atol=1e-11)


def assert_close(ours, expected):
    close(expected.state.weights, ours.state.weights)
    close(expected.state.momentum, ours.state.momentum)
    for path, running in expected.state.running.items():
        got = ours.state.running[path]
        close({"mean": running.mean, "var": running.var}, {"mean": got.mean, "var": got.var})
        assert got.num_batches == running.num_batches
    for client, client_state in expected.client_states.items():
        close(client_state.tensors, ours.client_states[client].tensors)
        close(client_state.optimizer, ours.client_states[client].optimizer)
    assert ours.train_loss == pytest.approx(expected.train_loss, rel=1e-9)
    assert ours.bytes_up == expected.bytes_up
    assert [r.examples for r in ours.replies] == [r.examples for r in expected.replies]
    for got, reply in zip(ours.replies, expected.replies, strict=True):
        assert got.loss == pytest.approx(reply.loss, rel=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(STRATEGIES))
def test_stacked_clients_give_what_the_loop_gives(name):
    task = task_of(name, LOCAL, count=4)
    assert (why_not("stacked", task, CLIENTS) is None) is (name not in ALONE)
    if name not in ALONE:
        trainer = stacked.StackedTrainer(task, 3)
        expected = list(in_turn(task, CLIENTS, 3))
        got = list(in_turn(task, CLIENTS, 3, train=trainer.train))
        for ours, theirs in zip(got, expected, strict=True):
            assert_close(ours, theirs)
        assert max(trainer.stacks) > 1


@pytest.mark.slow
@pytest.mark.parametrize("which", sorted(ALGORITHMS))
@pytest.mark.parametrize("name", ["fbn", "fedbn"])
def test_every_algorithm(which, name):
    task = task_of(name, ALGORITHMS[which], count=4)
    trainer = stacked.StackedTrainer(task, 4)
    expected = list(in_turn(task, CLIENTS, 3))
    for ours, theirs in zip(in_turn(task, CLIENTS, 3, train=trainer.train), expected, strict=True):
        assert_close(ours, theirs)


@pytest.mark.parametrize("name", ["mlp", "cnn", "resnet"])
def test_a_wide_model_is_its_models_side_by_side(name):
    torch.manual_seed(0)
    single = [network(name, SHAPE, CLASSES, seed).double() for seed in range(3)]
    conversion = [task_of("naive", LOCAL, model=model).model.train() for model in single]
    wide = widen(conversion[0], 3)
    with torch.no_grad():
        for path, tensor in wide.named_parameters():
            tensor.copy_(torch.cat([model.get_parameter(path) for model in conversion]))
    x = torch.randn(3, 5, *SHAPE, dtype=torch.float64)
    got = wide(torch.cat(list(x), 1)).view(5, 3, CLASSES).transpose(0, 1)
    for ours, model, batch in zip(got, conversion, x, strict=True):
        torch.testing.assert_close(ours, model(batch), rtol=0, atol=1e-12)


@pytest.mark.slow
def test_with_processes_the_result_is_the_same_bit_by_bit():
    torch.set_num_threads(1)
    task = task_of("fedbn", LOCAL, count=4)
    trainer = stacked.StackedTrainer(task, 2)
    pool = WorkerPool(task, CLIENTS, 2, stack=2)
    try:
        expected = in_turn(task, CLIENTS, 2, train=trainer.train)
        for ours, theirs in zip(in_turn(task, CLIENTS, 2, train=pool.train), expected, strict=True):
            for name, value in theirs.state.weights.items():
                assert torch.equal(ours.state.weights[name], value)
            assert ours.train_loss == theirs.train_loss
            os.kill(pool.workers[0].process.pid, signal.SIGKILL)  # it is replaced
    finally:
        pool.close()


def test_a_loss_that_is_not_finite_is_the_clients_own():
    task = task_of("none", create_algorithm("fedavg", lr=1e200), count=4)
    with pytest.raises(NonFiniteLossError, match=r"in round \d at client \d"):
        list(in_turn(task, CLIENTS, 4, train=stacked.StackedTrainer(task, 3).train))


class Shuffled(nn.Module):
    """Channels that are mixed by hand: in a wide model they would be those of other clients."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4)
        self.last = nn.Linear(4, CLASSES)

    def forward(self, x):
        return self.last(self.norm(self.conv(x)).roll(1, 1).mean((2, 3)))


class Tied(nn.Module):
    """One weight in two places."""

    def __init__(self):
        super().__init__()
        self.flat = nn.Flatten()
        self.one, self.norm, self.two = nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Linear(64, 64)
        self.two.weight = self.one.weight
        self.last = nn.Linear(64, CLASSES)

    def forward(self, x):
        return self.last(self.two(self.norm(self.one(self.flat(x)))))


class Noisy(nn.Module):
    """Randomness that no layer shows."""

    def __init__(self):
        super().__init__()
        self.norm, self.last = nn.BatchNorm2d(1), nn.Linear(64, CLASSES)

    def forward(self, x):
        return self.last(functional.dropout(self.norm(x), 0.5).flatten(1))


class Scaled(nn.Module):
    """A parameter outside any known layer."""

    def __init__(self):
        super().__init__()
        self.norm, self.last = nn.BatchNorm2d(1), nn.Linear(64, CLASSES)
        self.scale = nn.Parameter(torch.ones(64))

    def forward(self, x):
        return self.last(self.norm(x).flatten(1) * self.scale)


@pytest.mark.parametrize("made", [Shuffled, Tied, Noisy, Scaled])
def test_a_model_that_mixes_its_clients_is_noticed(made):
    torch.manual_seed(0)
    assert why_not("stacked", task_of("fbn", LOCAL, model=made().double()), CLIENTS)


def test_large_models_train_alone():
    data = ToyClients(sizes=(20, 20), shape=(3, 32, 32))
    small, large = (network(name, data.shape, 4, 0).double() for name in ("mlp", "resnet20"))
    assert stacked.choose_size(task_of("fbn", LOCAL, model=small), first(data)) == 2
    assert stacked.choose_size(task_of("fbn", LOCAL, model=large), first(data)) == 1


BASE = {
    "strategies": ["fbn"],
    "rounds": 2,
    "seeds": 1,
    "clients": 4,
    "algorithm": {"name": "fedavg", "lr": 0.05},
    "local_steps": 2,
}


def test_it_is_chosen_for_small_models_of_several_steps():
    experiment = build_experiment(BASE)
    assert prepare(experiment, experiment.strategies[0], 0).engine.name == "stacked"
    loop, wide = (
        run_comparison(build_experiment({**BASE, "engine": e})).runs[0] for e in ("loop", "auto")
    )
    assert wide.final.loss == pytest.approx(loop.final.loss, rel=1e-4)


def test_where_it_does_not_fit_the_reason_is_told():
    with pytest.raises(ConfigError, match="without exchanges in mid-round"):
        run_comparison(build_experiment({**BASE, "engine": "stacked", "strategies": ["fedtan"]}))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, 1),  # over before processes have started
        ({"rounds": 1_000_000}, 4),
        ({"rounds": 1_000_000, "engine": "loop"}, 1),
        ({"rounds": 1_000_000, "strategies": ["centralized"]}, 1),
        ({"rounds": 1_000_000, "algorithm": "dsgd", "local_steps": 1}, 1),  # merged batches
    ],
)
def test_processes_are_started_where_they_pay(changes, expected):
    experiment = build_experiment({**BASE, **changes})
    assert prepare(experiment, experiment.strategies[0], 0).count_workers(4) == expected


@pytest.mark.parametrize("last", [False, True])
def test_a_wide_model_is_arranged_as_its_model(last):
    layers = [nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 2), nn.Flatten()]
    arranged = torch.channels_last if last else torch.contiguous_format
    model = nn.Sequential(*layers, nn.Linear(4, CLASSES)).to(memory_format=arranged)
    wide = stacked.StackedClients(task_of("naive", LOCAL, model=model), 3)
    assert wide.memory_format is arranged
    weight = wide.task.model[2].weight
    assert weight.is_contiguous(memory_format=torch.channels_last) == last


class InOneBatch(Population):
    def all_batches(self, client):
        generator = torch.Generator().manual_seed(client)
        return Batches(client, [self._batch(client, self.holds[client], generator)], 1)


def test_clients_that_measure_all_their_data_are_tried_with_one_that_has_as_much():
    clients = InOneBatch(
        holds=(6, 7, 6, 7), batch=(3,) * 4, steps=(2,) * 4, shapes=((1, 8, 8),) * 4
    )
    task = task_of("hbn", create_algorithm("fedavg", lr=0.05))
    batches = [clients.batches(client, 1) for client in clients.all()]
    assert stacked.find_misfit(task, batches) is None
    groups = stacked.StackedTrainer(task, 4).group_clients(batches, {})
    assert sorted([own.client for own in group] for group in groups) == [[0, 2], [1, 3]]
