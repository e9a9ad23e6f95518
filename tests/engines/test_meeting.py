"""Clients that wait for each other: bit by bit what training anew after each exchange gives."""

import threading
from functools import partial

import pytest
import torch
from torch import nn

from fednorm.algorithms import algorithm
from fednorm.core.round import NonFiniteLossError, broadcast
from fednorm.engines import meeting
from fednorm.engines.clients import train_in_turn
from fednorm.engines.meeting import Meeting, most
from fednorm.engines.simulate import rounds
from support import CLASSES, SHAPE, Toy, task_of

STEPS = algorithm("fedavg", lr=0.05, momentum=0.9, momentum_state="local")
CLIENTS = Toy(sizes=(3, 5, 4), steps=2, absent={2: (1,)})


@pytest.fixture(autouse=True)
def no_thread_is_left():
    before = threading.active_count()
    yield
    assert threading.active_count() == before


def random_model():
    """A model with random numbers before, between and after its exchanges."""
    torch.manual_seed(0)
    width, drop = SHAPE[1] * SHAPE[2], partial(nn.Dropout, 0.3)
    first = (nn.Flatten(), drop(), nn.Linear(width, 6), nn.BatchNorm1d(6), nn.ReLU(), drop())
    return nn.Sequential(
        *first, nn.Linear(6, 5), nn.BatchNorm1d(5), drop(), nn.Linear(5, CLASSES)
    ).double()


@pytest.mark.parametrize("model", [None, random_model()], ids=["residual", "random"])
@pytest.mark.parametrize("shared_message", [False, True])
def test_gives_what_training_anew_gives(model, shared_message):
    task = task_of("fedtan", STEPS, model=model, shared_message=shared_message, count=3)
    assert most(task, CLIENTS.batches(0, 1)) > CLIENTS.clients
    for ours, expected in zip(
        rounds(task, CLIENTS, 3), rounds(task, CLIENTS, 3, train=train_in_turn), strict=True
    ):
        for name, weight in expected.state.weights.items():
            assert torch.equal(ours.state.weights[name], weight)
        for path, running in expected.state.running.items():
            assert torch.equal(ours.state.running[path].var, running.var)
        for client, memory in expected.memories.items():
            for name, momentum in memory.optimizer.items():
                assert torch.equal(ours.memories[client].optimizer[name], momentum)
        assert ours.train_loss == expected.train_loss
        assert ours.exchanges == expected.exchanges
        assert ours.bytes_up == expected.bytes_up


def test_the_callers_randomness_stays_as_it_was():
    task = task_of("fedtan", STEPS, model=random_model(), count=2)
    before = torch.get_rng_state()
    list(rounds(task, CLIENTS, 2))
    assert torch.equal(torch.get_rng_state(), before)


def test_each_client_trains_once(monkeypatch):
    trained = []
    train = meeting.train_client
    monkeypatch.setattr(
        meeting, "train_client", lambda *args: (trained.append(args[3].client), train(*args))[1]
    )
    list(rounds(task_of("fedtan", STEPS, count=1), CLIENTS, 1))
    assert trained == [0, 1, 2]


def test_without_room_for_all_they_train_anew(monkeypatch):
    task = task_of("fedtan", STEPS, count=2)
    expected = list(rounds(task, CLIENTS, 2))
    monkeypatch.setattr(meeting, "_ROOM", 2 * meeting.held(task, CLIENTS.batches(0, 1)))
    assert most(task, CLIENTS.batches(0, 1)) == 2
    monkeypatch.setattr(meeting._Guest, "start", None)  # in the first round there are three
    ours = next(rounds(task, CLIENTS, 2))
    assert ours.train_loss == expected[0].train_loss


def test_a_loss_that_is_not_finite_ends_the_round():
    clients = Toy(sizes=(3, 5, 4), broken=frozenset({1}))
    with pytest.raises(NonFiniteLossError, match="client"):
        list(rounds(task_of("fedtan", STEPS, count=2), clients, 2))


def test_a_client_that_lies_may_diverge():
    clients = Toy(sizes=(3, 5, 4), broken=frozenset({1}))
    task = task_of("fedtan", STEPS, count=2)
    results, _ = Meeting(task, byzantine={0, 1, 2}).train(
        task, broadcast(task, task.initial_state), {}, [clients.batches(i, 1) for i in range(3)]
    )
    assert [reply.client for reply, _ in results] == [0, 1, 2]


class Wavering(nn.Module):
    """A model whose path depends on its data."""

    def __init__(self):
        super().__init__()
        self.one, self.other = nn.BatchNorm2d(1), nn.BatchNorm2d(1)
        self.last = nn.Linear(64, CLASSES)

    def forward(self, x):
        norm = self.one if x.mean() < 1 else self.other
        return self.last(norm(x).flatten(1))


def test_clients_that_wait_at_different_places_are_told():
    task = task_of("fedtan", STEPS, model=Wavering().double(), count=2)
    with pytest.raises(RuntimeError, match="same site"):
        list(rounds(task, CLIENTS, 2))


def test_an_interruption_ends_all_of_them(monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(meeting, "answer", interrupted)
    with pytest.raises(KeyboardInterrupt):
        list(rounds(task_of("fedtan", STEPS, count=2), CLIENTS, 2))
