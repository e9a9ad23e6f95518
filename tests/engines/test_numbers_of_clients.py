"""Every engine with few and with odd numbers of clients, with absent ones and dropouts."""

import multiprocessing
import os
import time
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from fednorm.algorithms import create_algorithm
from fednorm.core.messages import Batches, ClientState, Reply
from fednorm.core.round import broadcast, client_round, server_round
from fednorm.core.task import export
from fednorm.engines import processes, run_rounds
from fednorm.engines.base import EngineRun, Faults
from fednorm.engines.loop import LoopEngine
from fednorm.engines.loop import rounds as in_turn
from fednorm.engines.processes import SharedBlock
from fednorm.engines.stacked import StackedTrainer
from fednorm.errors import ConfigError
from fednorm.experiment.prepare import prepare
from fednorm.experiment.schema.load import build_experiment
from support import ToyClients, nested_model, task_of

COUNTS = (1, 2, 3, 5, 7)
STEPS = create_algorithm("fedavg", lr=0.05, momentum=0.9, momentum_state="local")


@pytest.mark.parametrize("size", range(1, 9))
def test_every_client_is_in_one_stack_and_no_stack_is_empty(size):
    trainer = StackedTrainer(task_of("naive", STEPS), size)
    for count in range(1, 40):
        alike = [Batches(client, [], 4, batch_sizes=(4, 4)) for client in range(count)]
        groups = trainer.group_clients(alike, {})
        assert sorted(own.client for group in groups for own in group) == list(range(count))
        lengths = [len(group) for group in groups]
        assert max(lengths) <= size
        assert max(lengths) - min(lengths) <= 1
        assert min(lengths) > 0


# Engines, each with what it is for.
ENGINES = {
    "loop": {"strategies": ["fbn"], "algorithm": "fedavg", "local_steps": 2},
    "stacked": {"strategies": ["fbn"], "algorithm": "fedavg", "local_steps": 2},
    "merged": {"strategies": ["fbn"], "algorithm": "dsgd"},
    "barrier": {"strategies": ["fedtan"], "algorithm": "fedavg", "local_steps": 2},
}
ADVERSE = {
    "all": {},
    "some": {"participation": 0.6},
    "dropping out": {"client_dropout": 0.3},
    "both": {"participation": 0.6, "client_dropout": 0.3},
}


def prepared(name, clients, **settings):
    values = {"rounds": 4, "seeds": 1, "batch_size": 8, "model": "mlp", "dtype": "float64"}
    experiment = build_experiment({**values, "engine": name, "clients": clients, **settings})
    return prepare(experiment, experiment.strategies[0], 0)


def by_hand(run, answered):
    """Oracle: the two public functions, with the clients that answered."""
    state, client_states, losses = run.task.initial_state, {}, []
    for clients in answered:
        received = broadcast(run.task, state)
        replies = []
        for client in clients:
            own, client_state = (
                run.clients.batches(client, received.round),
                client_states.get(client),
            )
            reply, kept = client_round(run.task, received, client_state or ClientState(), own)
            client_states[client] = kept
            replies.append(reply)
        state = server_round(run.task, state, replies)
        total = sum(reply.examples for reply in replies)
        losses.append(sum(r.loss * r.examples for r in replies) / total)
    return state, losses


def assert_close(one, other):
    assert one.weights.keys() == other.weights.keys()
    for name, value in one.weights.items():
        torch.testing.assert_close(other.weights[name], value, rtol=1e-9, atol=1e-11)
    for path, running in one.running.items():
        torch.testing.assert_close(other.running[path].mean, running.mean, rtol=1e-9, atol=1e-11)
        torch.testing.assert_close(other.running[path].var, running.var, rtol=1e-9, atol=1e-11)
        assert other.running[path].num_batches == running.num_batches


@pytest.mark.slow
@pytest.mark.parametrize("what", ADVERSE)
@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("name", ENGINES)
def test_every_engine_with_any_number_of_clients(name, count, what):
    settings = {**ENGINES[name], **ADVERSE[what], "partition": "iid"}
    if name == "merged" and "client_dropout" in settings:
        with pytest.raises(ConfigError, match="clients that all are honest and answer"):
            prepared(name, count, **settings)
        return
    asked = max(1, round(count * settings.get("participation", 1.0)))
    if name == "stacked" and asked == 1:
        with pytest.raises(ConfigError, match="at least two clients a round"):
            prepared(name, count, **settings)
        return
    ours = list(prepared(name, count, **settings).rounds())
    loop = prepared("loop", count, **settings)
    expected = list(loop.rounds())
    assert [r.dropped_out for r in ours] == [r.dropped_out for r in expected]
    assert (sum(r.dropped_out for r in ours) > 0) == ("client_dropout" in settings)
    for got, theirs in zip(ours, expected, strict=True):
        assert got.train_loss == pytest.approx(theirs.train_loss, rel=1e-9)
    assert_close(expected[-1].state, ours[-1].state)
    if name != "barrier":  # in mid-round, the functions of one client cannot answer
        state, losses = by_hand(loop, [[r.client for r in one.replies] for one in expected])
        assert losses == pytest.approx([r.train_loss for r in expected], rel=1e-9)
        assert_close(state, ours[-1].state)


@dataclass(frozen=True)
class Watched:
    """Clients that note which process got to know them, and which one trained whom in which round.

    A process gets to know them once it has started: they are part of what it is started with.
    """

    clients: ToyClients
    log: Path

    def __setstate__(self, state):
        self.__dict__.update(state)
        self.note("begins")

    def note(self, *what):
        with self.log.open("a") as file:
            file.write(" ".join(map(str, (os.getpid(), *what))) + "\n")

    def notes(self):
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        begun = {int(line.split()[0]) for line in lines if line.endswith("begins")}
        trained = [tuple(map(int, line.split())) for line in lines if not line.endswith("begins")]
        return begun, trained

    def all(self):
        return self.clients.all()

    def participants(self, round_):
        return self.clients.participants(round_)

    def all_batches(self, client):
        return self.clients.all_batches(client)

    def batches(self, client, round_):
        own = self.clients.batches(client, round_)
        steps = Noted(self, (round_, client), own.steps)
        return Batches(client, steps, own.examples, own.seed, batch_sizes=own.batch_sizes)


@dataclass(frozen=True)
class Noted:
    watched: Watched
    what: tuple
    steps: list

    def __iter__(self):
        self.watched.note(*self.what)
        return iter(self.steps)


def wait_until_all_have_begun(clients, patience=240.0):
    """Wait for processes that take longer to start than a round of small clients takes."""
    until = time.monotonic() + patience
    while True:
        started = {child.pid for child in multiprocessing.active_children()}
        if started <= clients.notes()[0]:
            return started
        assert time.monotonic() < until, "a process did not start"
        time.sleep(0.05)


# Rounds with 3, 1, 2, 3, 5 and 7 of seven clients, before any drops out. The first ones have three
# clients that are alike, so that an extra process has to start for one of them.
TAKING_PART = (3, 3, 3, 3, *COUNTS, *COUNTS, *COUNTS, *COUNTS)
ABSENT = {r: tuple(range(count, 7)) for r, count in enumerate(TAKING_PART, 1)}


@pytest.fixture
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
def test_processes_serve_rounds_of_any_number_of_clients(tmp_path):
    toy = ToyClients(sizes=(4, 4, 4, 6, 4, 6, 4), steps=2, absent=ABSENT)
    clients, model = Watched(toy, tmp_path / "log"), nested_model()
    model.stem[1].eval()  # it is frozen, and stays so when the parent tests the model
    task = task_of("fedbn", STEPS, model=model, count=len(ABSENT))
    faults = Faults(client_dropout=0.1, seed=3)
    run = EngineRun(task, clients, len(ABSENT), faults=faults, processes=2, step_seconds=60.0)
    expected = list(in_turn(task, toy, len(ABSENT), faults=faults))
    answered = {one.state.round: [r.client for r in one.replies] for one in expected}
    assert {len(who) for who in answered.values()} >= set(COUNTS)
    assert all(len(answered[round_]) == 3 for round_ in range(1, 5))
    assert sum(one.dropped_out for one in expected) > 0
    processes = set()
    for ours, theirs in zip(run_rounds(LoopEngine(), run), expected, strict=True):
        processes |= wait_until_all_have_begun(clients)
        export(task, ours.state)
        assert [r.client for r in ours.replies] == answered[ours.state.round]
        for name, value in theirs.state.weights.items():
            assert torch.equal(ours.state.weights[name], value)
        for client, client_state in theirs.client_states.items():
            for name, value in client_state.tensors.items():
                assert torch.equal(ours.client_states[client].tensors[name], value)
    assert all(
        int(m.tensors["stem.1.num_batches_tracked"]) == 0 for m in ours.client_states.values()
    )
    _, trained = clients.notes()
    served = defaultdict(set)
    for process, round_, _client in trained:
        served[process].add(round_)
    assert os.getpid() not in served
    assert set(served) == processes  # two, and a third for the last clients of odd numbers
    assert len(processes) == 3
    assert min(map(len, served.values())) >= 3
    each = Counter((round_, client) for _, round_, client in trained)
    assert each == Counter((r, client) for r, who in answered.items() for client in who)


class _Wire:
    """Brings one message."""

    def __init__(self, message):
        self.message = message

    def recv(self):
        return self.message


@pytest.mark.slow
def test_a_process_may_begin_with_a_reply_without_tensors():
    """As of a Byzantine client that diverges and keeps nothing."""
    sent = [(Reply(3, 5, {}, {}, {}, loss=float("inf")), ClientState())]
    plan, block = SharedBlock().write(sent)
    assert block is None
    pool = object.__new__(processes.WorkerPool)
    worker = processes.Worker(None, _Wire(("reply", plan, block)), SharedBlock())
    assert pool._receive(worker) == sent
