"""Workers start from a server on Linux, and have their parent's surroundings all the same."""

import multiprocessing.forkserver
import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from fednorm.algorithms import create_algorithm
from fednorm.core.messages import Batches
from fednorm.engines import processes
from fednorm.engines.loop import rounds
from fednorm.engines.processes import WorkerPool
from fednorm.engines.worker_process import Surroundings, prepare_context, start_worker
from support import ToyClients, task_of

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere workers are spawned")


def _tell(wire, surroundings):
    start_worker(surroundings)
    os.write(1, b"to stdout ")
    os.write(2, b"to stderr ")
    wire.send(
        {
            "environment": dict(os.environ),
            "draw": float(np.random.random()),  # noqa: NPY002 (the state that a fork would share)
            "interrupts": signal.getsignal(signal.SIGINT),
            "server": os.getppid(),
            "path": sys.path,
        }
    )


def ask_workers(count=2):
    """Return what workers tell that start now."""
    context = prepare_context()
    told = []
    for _ in range(count):
        ours, theirs = context.Pipe()
        process = context.Process(target=_tell, args=(theirs, Surroundings()))
        process.start()
        told.append(ours.recv())
        process.join()
    return told


@pytest.mark.slow
def test_workers_have_the_surroundings_of_their_parent(monkeypatch, capfd):
    ask_workers(1)  # so that the server, where there is one, knows nothing of what follows
    capfd.readouterr()
    monkeypatch.setenv("FEDNORM_TEST", "new")
    monkeypatch.delenv("PATH")
    monkeypatch.syspath_prepend("/a/new/folder")
    one, other = ask_workers()
    assert one["environment"] == other["environment"] == dict(os.environ)
    assert one["path"] == sys.path
    assert capfd.readouterr() == ("to stdout to stdout ", "to stderr to stderr ")
    assert one["draw"] != other["draw"]
    assert one["interrupts"] is signal.SIG_IGN


@on_linux
@pytest.mark.slow
def test_their_server_has_one_thread_and_never_sees_ctrl_c():
    one, other = ask_workers()
    server = multiprocessing.forkserver._forkserver._forkserver_pid
    assert one["server"] == other["server"] == server
    assert len(list(Path(f"/proc/{server}/task").iterdir())) == 1
    status = Path(f"/proc/{server}/status").read_text().splitlines()
    masks = [int(line.split()[1], 16) for line in status if line.startswith(("SigBlk", "SigIgn"))]
    assert all(mask & 1 << signal.SIGINT - 1 for mask in masks)


def _train_and_tell(wire):
    task = task_of("fedbn", create_algorithm("fedavg", lr=0.05, momentum=0.9), count=1)
    list(rounds(task, ToyClients(), 1))
    wire.send("torch._dynamo" in sys.modules)


@on_linux
@pytest.mark.slow
def test_training_does_not_wait_for_the_compiler_of_torch():
    context = prepare_context()
    ours, theirs = context.Pipe()
    process = context.Process(target=_train_and_tell, args=(theirs,))
    process.start()
    assert ours.recv() is False
    process.join()


@dataclass(frozen=True)
class ManyTensors(ToyClients):
    """Clients whose data are more tensors than a server passes on."""

    tensors: tuple = tuple(torch.full((1,), float(number)) for number in range(300))

    def batches(self, client, round_):
        own = super().batches(client, round_)
        ((x, y),) = own.steps
        return Batches(client, [(x + sum(self.tensors), y)], own.examples, batch_sizes=(len(y),))


@pytest.mark.slow
def test_clients_may_hold_more_tensors_than_a_server_passes_on(monkeypatch):
    monkeypatch.setattr(processes, "DEATHS", 1)
    task = task_of("none", create_algorithm("dsgd", lr=0.05), count=4)
    clients = ManyTensors(sizes=(2, 3))
    pool = WorkerPool(task, clients, 1)
    try:
        (ours,) = rounds(task, clients, 1, train=pool.train)
    finally:
        pool.close()
    (expected,) = rounds(task, clients, 1)
    for name, value in expected.state.weights.items():
        assert torch.equal(ours.state.weights[name], value)
