"""Every engine gives what the loop gives, for every strategy that it takes, or says why not.

Flower is in tests/flower: test_parity.py has every strategy over a grid in memory, the runtimes are
in test_simulation.py and test_deployment.py.
"""

import functools
import tempfile
import typing
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import fednorm
from fednorm.data import load_dataset
from fednorm.errors import ConfigError
from fednorm.experiment.schema.config import Experiment
from fednorm.strategies import STRATEGIES

pytestmark = pytest.mark.xdist_group("engines")  # each run in the loop once
ENGINES = [n for n in typing.get_args(Experiment.model_fields["engine"].annotation) if n != "auto"]
LOOP, MERGED, STACKED, BARRIER, PROCESSES, _FLOWER = ENGINES
LOCAL = (MERGED, STACKED, BARRIER)  # in this process
DATA = {"name": "patterns", "samples": 60, "test": 12, "size": 8, "classes": 4}
CLIENTS, BATCH, SEED = 4, 16, 9
SETTINGS = {
    "data": DATA,
    "partition": "dirichlet_unbalanced=2",
    "clients": CLIENTS,
    "batch_size": BATCH,
    "model": {"name": "resnet", "widths": [4, 6]},
    "rounds": 2,
    "seeds": [SEED],
    "eval_every": 1,
    "dtype": "float64",
}
ALGORITHMS = {
    "dsgd": {"algorithm": {"name": "dsgd", "lr": 0.05, "momentum": 0.9}},
    "fedavg": {"algorithm": {"name": "fedavg", "lr": 0.05, "momentum": 0.9}, "local_steps": 2},
}
# Strategies that an engine takes; a test that finds fewer found an engine that refuses too much.
TAKEN = {
    (MERGED, "dsgd"): 13,
    (MERGED, "fedavg"): 0,  # all clients in one pass: one step a round
    (STACKED, "dsgd"): 16,
    (STACKED, "fedavg"): 16,
    (BARRIER, "dsgd"): 1,  # it waits for exchanges in mid-round, which only fedtan has
    (BARRIER, "fedavg"): 1,
}


def read(folder, name):
    """Return what was saved of a run: the tensors of its model."""
    return load_file(folder / f"runs/{name}-seed{SEED}/model.safetensors")


def run(name, engine, algorithm):
    """Return losses and accuracies of a run, and the tensors of its model."""
    with tempfile.TemporaryDirectory() as folder:
        (found,) = fednorm.compare(
            [name], engine=engine, out=folder, **SETTINGS, **ALGORITHMS[algorithm]
        ).runs
        assert found.status == "finished", found
        return found.history, read(Path(folder), name)


@functools.cache
def run_in_loop(name, algorithm):
    return run(name, LOOP, algorithm)


def assert_close(found, expected):
    (history, tensors), (right_history, right) = found, expected
    for ours, theirs in zip(history, right_history, strict=True):
        assert ours.round == theirs.round
        assert ours.loss == pytest.approx(theirs.loss, rel=1e-9)
        assert ours.train_loss == pytest.approx(theirs.train_loss, rel=1e-9)
        assert ours.accuracy == theirs.accuracy
    assert tensors.keys() == right.keys()
    for key, tensor in right.items():
        torch.testing.assert_close(tensors[key], tensor, rtol=1e-9, atol=1e-10)


def test_clients_are_unequal_but_for_two():
    labels = load_dataset(seed=SEED, **DATA).y
    parts = fednorm.partition(SETTINGS["partition"], labels, clients=CLIENTS, seed=SEED)
    assert [len(part) for part in parts] == [12, 19, 19, 10]  # batches of 12, 16, 16 and 10


@pytest.mark.slow
def test_the_loop_takes_every_strategy_and_trains():
    for name in STRATEGIES:
        history, tensors = run_in_loop(name, "dsgd")
        assert len(history) == SETTINGS["rounds"]
        assert all(torch.isfinite(tensor).all() for tensor in tensors.values())
        assert history[0].loss != history[1].loss


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("engine", LOCAL)
def test_gives_what_the_loop_gives_or_says_why_not(engine, algorithm):
    taken = []
    for name in STRATEGIES:
        try:
            found = run(name, engine, algorithm)
        except ConfigError as error:
            assert_reason(error, engine, name)
        else:
            assert_close(found, run_in_loop(name, algorithm))
            taken.append(name)
    assert len(taken) >= TAKEN[engine, algorithm], taken


def assert_reason(error, engine, name):
    reason = str(error).removeprefix(f"{name}: ")
    assert reason != str(error)
    assert engine in reason
    assert len(reason.split()) > 10
    assert "choose engine 'auto' or 'loop'" in reason


@pytest.mark.slow
def test_processes_give_what_the_loop_gives(tmp_path):
    names = [name for name in STRATEGIES if name != "fedtan"]  # which is refused, see below
    settings = SETTINGS | ALGORITHMS["fedavg"]
    for found in fednorm.compare(names, engine=PROCESSES, out=tmp_path, **settings).runs:
        history, right = run_in_loop(found.strategy, "fedavg")
        assert found.history == history
        tensors = read(tmp_path, found.strategy)
        assert tensors.keys() == right.keys()
        assert all(torch.equal(tensors[key], tensor) for key, tensor in right.items())


def test_processes_say_why_not():
    with pytest.raises(ConfigError) as raised:
        run("fedtan", PROCESSES, "dsgd")
    assert_reason(raised.value, PROCESSES, "fedtan")
