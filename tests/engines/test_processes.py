"""Clients in worker processes: bit by bit what the loop gives."""

import os
import signal

import pytest
import torch

from fednorm.algorithms import create_algorithm
from fednorm.core.messages import ClientState, RunningStats, ServerState
from fednorm.engines.loop import rounds as in_turn
from fednorm.engines.processes import SharedBlock, WorkerPool, read_plan
from fednorm.errors import ConfigError, NonFiniteLossError
from fednorm.experiment.comparison import run_comparison
from fednorm.experiment.schema.load import build_experiment
from support import ToyClients, in_processes, task_of, why_not

STEP = create_algorithm("fedavg", lr=0.05, momentum=0.9, momentum_state="local")


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def equal(one, other):
    assert one.keys() == other.keys()
    return all(torch.equal(one[name], other[name]) for name in one)


def assert_equal(ours, expected):
    assert equal(ours.state.weights, expected.state.weights)
    assert equal(ours.state.momentum, expected.state.momentum)
    assert ours.state.running.keys() == expected.state.running.keys()
    for path, running in expected.state.running.items():
        assert torch.equal(ours.state.running[path].mean, running.mean)
        assert torch.equal(ours.state.running[path].var, running.var)
        assert ours.state.running[path].num_batches == running.num_batches
    for client, client_state in expected.client_states.items():
        assert equal(ours.client_states[client].tensors, client_state.tensors)
        assert equal(ours.client_states[client].optimizer, client_state.optimizer)
    assert ours.train_loss == expected.train_loss
    assert ours.bytes_up == expected.bytes_up


CLIENTS = ToyClients(sizes=(3, 5, 4, 6, 2), steps=2, absent={2: (1, 3)})


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fbn", "dualbn", "fedbn", "hbn"])
def test_a_worker_pool_gives_what_the_loop_gives(name):
    task = task_of(name, STEP, count=4)
    for ours, expected in zip(
        in_processes(task, CLIENTS, 3), in_turn(task, CLIENTS, 3), strict=True
    ):
        assert_equal(ours, expected)


@pytest.mark.slow
def test_a_process_that_dies_is_replaced():
    task = task_of("fedbn", STEP, count=4)
    expected = list(in_turn(task, CLIENTS, 2))
    pool = WorkerPool(task, CLIENTS, 2)
    try:
        for number, ours in enumerate(in_turn(task, CLIENTS, 2, train=pool.train)):
            assert_equal(ours, expected[number])
            os.kill(pool.workers[0].process.pid, signal.SIGKILL)
    finally:
        pool.close()
    assert not any(worker.process.is_alive() for worker in pool.workers)


@pytest.mark.slow
def test_a_loss_that_is_not_finite_is_told_as_in_the_loop():
    task = task_of("none", create_algorithm("fedavg", lr=1e200), count=4)
    with pytest.raises(NonFiniteLossError, match=r"in round \d at client \d"):
        list(in_processes(task, CLIENTS, 4))


def test_exchanges_in_mid_round_need_all_clients():
    assert why_not("processes", task_of("fbn", STEP), CLIENTS) is None
    assert why_not("processes", task_of("fedtan", STEP), CLIENTS)
    assert why_not("processes", task_of("fedfn", STEP, base="fedtan"), CLIENTS)


def test_values_come_out_of_a_block_as_they_went_in():
    value = ServerState(
        round=3,
        weights={"a": torch.randn(3, 4).to(torch.bfloat16), "b": torch.tensor(2.0)},
        buffers={"n": torch.tensor([1, 2])},
        running={"l": RunningStats(torch.randn(5, dtype=torch.float64), torch.empty(0), 7)},
    )
    block = SharedBlock()
    plan, new = block.write((value, ClientState({"x": torch.randn(2, 3, 4, 4)})))
    assert new is block.bytes
    (state, client_state) = read_plan(plan, new, copy=True)
    assert equal(state.weights, value.weights)
    assert equal(state.buffers, value.buffers)
    assert torch.equal(state.running["l"].mean, value.running["l"].mean)
    assert (state.round, state.running["l"].num_batches) == (3, 7)
    assert client_state.tensors["x"].shape == (2, 3, 4, 4)
    again, same = block.write(value)
    assert same is None
    assert equal(read_plan(again, block.bytes, copy=False).weights, value.weights)


@pytest.mark.slow
def test_an_experiment_gives_the_same_in_processes():
    values = {
        "strategies": ["fedbn"], "seeds": 1, "rounds": 3, "clients": 3, "local_steps": 2,
        "model": "cnn", "algorithm": "fedavg",
    }  # fmt: skip
    loop, pool = (
        run_comparison(build_experiment({**values, "engine": e})).runs[0]
        for e in ("loop", "processes")
    )
    assert pool.history == loop.history


def test_a_run_that_needs_one_process_is_refused():
    with pytest.raises(ConfigError, match="engine 'processes' needs"):
        run_comparison(
            build_experiment({"strategies": ["fedtan"], "engine": "processes", "rounds": 1})
        )
