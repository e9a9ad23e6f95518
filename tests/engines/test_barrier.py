"""Clients that wait for each other: bit by bit what training anew after each exchange gives."""

import os
import signal
import threading
import time
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

import pytest
import torch
from torch import nn

from fednorm import models
from fednorm.algorithms import create_algorithm
from fednorm.core.round import broadcast
from fednorm.engines import barrier
from fednorm.engines.barrier import BarrierTrainer
from fednorm.engines.loop import rounds
from fednorm.errors import ConfigError, NonFiniteLossError
from fednorm.experiment.comparison import run_comparison
from fednorm.experiment.schema.load import build_experiment
from support import CLASSES, SHAPE, ToyClients, task_of, why_not

STEPS = create_algorithm("fedavg", lr=0.05, momentum=0.9, momentum_state="local")
CLIENTS = ToyClients(sizes=(3, 5, 4), steps=2, absent={2: (1,)})


@pytest.fixture(autouse=True)
def no_thread_is_left():
    before = threading.active_count()
    yield
    assert threading.active_count() == before


def barrier_rounds(task, clients, count, room=10**9):
    return rounds(task, clients, count, train=BarrierTrainer(task, room).train)


def random_model():
    """A model with random numbers before, between and after its exchanges."""
    torch.manual_seed(0)
    width, drop = SHAPE[1] * SHAPE[2], partial(nn.Dropout, 0.3)
    first = (nn.Flatten(), drop(), nn.Linear(width, 6), nn.BatchNorm1d(6), nn.ReLU(), drop())
    return nn.Sequential(
        *first, nn.Linear(6, 5), nn.BatchNorm1d(5), drop(), nn.Linear(5, CLASSES)
    ).double()


@pytest.mark.slow
@pytest.mark.parametrize("model", [None, random_model()], ids=["residual", "random"])
@pytest.mark.parametrize("shared_message", [False, True])
def test_gives_what_training_anew_gives(model, shared_message):
    task = task_of("fedtan", STEPS, model=model, shared_message=shared_message, count=3)
    for ours, expected in zip(
        barrier_rounds(task, CLIENTS, 3), rounds(task, CLIENTS, 3), strict=True
    ):
        for name, weight in expected.state.weights.items():
            assert torch.equal(ours.state.weights[name], weight)
        for path, running in expected.state.running.items():
            assert torch.equal(ours.state.running[path].var, running.var)
        for client, client_state in expected.client_states.items():
            for name, momentum in client_state.optimizer.items():
                assert torch.equal(ours.client_states[client].optimizer[name], momentum)
        assert ours.train_loss == expected.train_loss
        assert ours.exchanges == expected.exchanges
        assert ours.bytes_up == expected.bytes_up


def test_the_callers_randomness_stays_as_it_was():
    task = task_of("fedtan", STEPS, model=random_model(), count=2)
    before = torch.get_rng_state()
    list(barrier_rounds(task, CLIENTS, 2))
    assert torch.equal(torch.get_rng_state(), before)


def test_each_client_trains_once(monkeypatch):
    trained = []
    train = barrier.train_client
    monkeypatch.setattr(
        barrier, "train_client", lambda *args: (trained.append(args[3].client), train(*args))[1]
    )
    list(barrier_rounds(task_of("fedtan", STEPS, count=1), CLIENTS, 1))
    assert trained == [0, 1, 2]


@pytest.mark.slow
def test_without_room_for_all_they_train_anew(monkeypatch):
    task = task_of("fedtan", STEPS, count=2)
    expected = next(rounds(task, CLIENTS, 2))
    batches = [CLIENTS.batches(client, 1) for client in range(3)]
    need = BarrierTrainer(task, 0).count_bytes(batches)
    assert next(barrier_rounds(task, CLIENTS, 2, room=need)).train_loss == expected.train_loss
    monkeypatch.setattr(barrier, "ClientThread", None)
    ours = next(barrier_rounds(task, CLIENTS, 2, room=need - 1))
    assert ours.train_loss == expected.train_loss


def test_what_clients_hold_grows_with_batches_and_parameters():
    task = task_of("fedtan", STEPS)
    one, two, large = (
        BarrierTrainer(task, 0).count_bytes(
            [ToyClients(sizes=sizes).batches(i, 1) for i in range(len(sizes))]
        )
        for sizes in ((4,), (4, 4), (4, 400))
    )
    parameters = sum(p.numel() * 8 for p in task.model.parameters())
    assert one > 4 * parameters
    assert two == pytest.approx(2 * one)
    assert large - two == pytest.approx(396 * (one - 4 * parameters) / 4, rel=0.01)


def test_a_loss_that_is_not_finite_ends_the_round():
    clients = ToyClients(sizes=(3, 5, 4), broken=frozenset({1}))
    with pytest.raises(NonFiniteLossError, match="client"):
        list(barrier_rounds(task_of("fedtan", STEPS, count=2), clients, 2))


def test_a_byzantine_client_may_diverge():
    clients = ToyClients(sizes=(3, 5, 4), broken=frozenset({1}))
    task = task_of("fedtan", STEPS, count=2)
    results, _ = BarrierTrainer(task, 10**9, byzantine={0, 1, 2}).train(
        broadcast(task, task.initial_state), {}, [clients.batches(i, 1) for i in range(3)]
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
        list(barrier_rounds(task, CLIENTS, 2))


def test_an_interruption_ends_all_of_them(monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(barrier, "answer_exchange", interrupted)
    with pytest.raises(KeyboardInterrupt):
        list(barrier_rounds(task_of("fedtan", STEPS, count=2), CLIENTS, 2))


class Interrupting(ToyClients):
    """Its first client is interrupted in the second of many steps."""

    def batches(self, client, round_):
        batches = super().batches(client, round_)
        return replace(batches, steps=Endless(batches.steps[0])) if client == 0 else batches


@dataclass
class Endless:
    batch: tuple
    taken: ClassVar[int] = 0

    def __iter__(self):
        yield self.batch
        os.kill(os.getpid(), signal.SIGINT)
        for _ in range(1000):
            Endless.taken += 1
            yield self.batch


def test_no_client_trains_to_the_end_after_an_interruption():
    # A shell that starts the tests in the background lets them ignore the signal.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            list(barrier_rounds(task_of("fedtan", STEPS, count=2), Interrupting(), 2))
    finally:
        signal.signal(signal.SIGINT, before)
    assert 0 < Endless.taken < 500


@pytest.mark.slow
def test_a_signal_that_a_clients_thread_takes_interrupts_the_run():
    over = threading.Event()

    def train(_thread):
        time.sleep(0.3)
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)
        over.wait(20)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    client, started = barrier.ClientThread(train), time.monotonic()
    try:
        with pytest.raises(KeyboardInterrupt):
            client.start()
    finally:
        signal.signal(signal.SIGINT, before)
        over.set()
        client.thread.join()
    assert time.monotonic() - started < 15  # not when the client is done


@pytest.mark.parametrize(("settings", "expected"), [({}, True), ({"precision": "bf16"}, False)])
def test_only_in_full_precision(settings, expected):
    task = replace(task_of("fedtan", STEPS), **settings)
    assert (why_not("barrier", task, CLIENTS, ours=True) is None) is expected
    assert why_not("barrier", task_of("naive", STEPS), CLIENTS, ours=True)


def test_an_experiment_uses_it_for_models_of_its_own_only(monkeypatch):
    made = []
    train = BarrierTrainer.train
    monkeypatch.setattr(BarrierTrainer, "train", lambda *args: (made.append(1), train(*args))[1])
    experiment = build_experiment(
        {"strategies": ["fedtan"], "algorithm": "fedavg", "rounds": 2, "seeds": 1, "clients": 3}
    )
    (ours,) = run_comparison(experiment).runs
    assert len(made) == 2
    model = models.create_model("mlp", (1, 8, 8), 10, seed=0)
    (theirs,) = run_comparison(experiment, model=model).runs
    assert len(made) == 2
    assert ours.status == theirs.status == "finished"
    assert ours.final.loss == theirs.final.loss


def test_for_others_it_is_refused():
    experiment = build_experiment(
        {"strategies": ["naive"], "engine": "barrier", "rounds": 1, "seeds": 1}
    )
    with pytest.raises(ConfigError, match="exchanges in mid-round"):
        run_comparison(experiment)
