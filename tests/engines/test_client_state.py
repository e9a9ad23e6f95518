"""What clients keep: in memory up to a limit, then on disk, and always the same."""

import gc

import pytest
import torch

from fednorm.algorithms import create_algorithm
from fednorm.core.messages import ClientState
from fednorm.engines import loop
from fednorm.engines.client_state import ClientStateStore, count_bytes
from fednorm.experiment.comparison import run_comparison
from fednorm.experiment.prepare import prepare
from fednorm.experiment.schema.load import build_experiment
from support import ToyClients, task_of


def client_state(value, length=100):
    momentum = {"conv.weight": torch.full((length,), float(value), dtype=torch.float64)}
    return ClientState({"bn.batches": torch.tensor(value)}, momentum)


def same(one, other):
    assert one.tensors.keys() == other.tensors.keys()
    assert all(torch.equal(one.tensors[n], t) for n, t in other.tensors.items())
    assert all(torch.equal(one.optimizer[n], t) for n, t in other.optimizer.items())
    assert one.tensors["bn.batches"].dtype == torch.int64


def files(kept):
    return [] if kept.folder is None else list(kept.folder.path.glob("*.safetensors"))


def test_those_that_have_waited_longest_go_to_disk():
    each = count_bytes(client_state(0))
    kept = ClientStateStore(limit=3 * each)
    for number in range(5):
        kept = kept.with_states({number: client_state(number)})
    assert len(files(kept)) == 2
    assert kept.held == 3 * each
    assert list(kept) == [0, 1, 2, 3, 4]
    for number in range(5):
        same(kept[number], client_state(number))
    assert isinstance(kept.entries[4], ClientState)
    assert not isinstance(kept.entries[0], ClientState)


def test_who_is_kept_is_known_without_reading(monkeypatch):
    kept = ClientStateStore(limit=0).with_states({0: client_state(0)})
    assert len(files(kept)) == 1
    monkeypatch.setattr(type(kept.entries[0]), "read", lambda _: 1 / 0)
    assert 0 in kept
    assert 1 not in kept


@pytest.mark.slow
def test_one_that_comes_back_is_in_memory_and_its_file_goes():
    each = count_bytes(client_state(0))
    kept = ClientStateStore(limit=2 * each)
    for number in range(3):
        kept = kept.with_states({number: client_state(number)})
    before = kept
    kept = kept.with_states({0: client_state(7)})
    same(kept[0], client_state(7))
    same(before[0], client_state(0))  # a value does not change
    assert len(files(kept)) == 2
    del before
    gc.collect()
    assert len(files(kept)) == 1
    assert kept.held == 2 * each


@pytest.mark.slow
def test_nothing_is_left_behind():
    kept = ClientStateStore(limit=0).with_states({0: client_state(1), 1: client_state(2)})
    folder = kept.folder.path
    assert len(list(folder.glob("*.safetensors"))) == 2
    same(kept[1], client_state(2))
    del kept
    gc.collect()
    assert not folder.exists()


def test_clients_that_keep_nothing_take_no_room():
    kept = ClientStateStore(limit=0).with_states({3: ClientState()})
    assert kept[3] == ClientState()
    assert kept.held == 0
    assert kept.folder is None


@pytest.mark.slow
def test_the_place_of_tensors_changes_no_result(tmp_path):
    values = {
        "strategies": ["fedbn"],
        "rounds": 4,
        "seeds": 1,
        "clients": 6,
        "participation": 0.5,
        "algorithm": {"name": "fedavg", "lr": 0.05, "momentum": 0.9, "momentum_state": "local"},
        "local_steps": 2,
    }
    usual = run_comparison(build_experiment(values)).runs[0]
    spilled = run_comparison(
        build_experiment({**values, "client_state_memory": 0}), folder=tmp_path
    ).runs[0]
    assert spilled.history == usual.history
    written = []
    experiment = build_experiment({**values, "client_state_memory": 0})
    for result in prepare(experiment, experiment.strategies[0], 0).rounds():
        written.append(len(files(result.client_states)))
    assert written[0] == 3  # one for each client that took part
    assert written[-1] == len(result.client_states)


def test_earlier_rounds_keep_their_client_states():
    first, second = loop.rounds(
        task_of("fedbn", create_algorithm("dsgd", lr=0.05)), ToyClients(), 2
    )
    key = "stem.1.running_mean"
    assert not torch.equal(
        first.client_states[0].tensors[key], second.client_states[0].tensors[key]
    )
