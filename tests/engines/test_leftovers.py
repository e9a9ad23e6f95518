"""A run that was killed leaves nothing that stays, and a process that hangs is replaced."""

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch

from fednorm import system
from fednorm.algorithms import create_algorithm
from fednorm.core.messages import ClientState
from fednorm.engines import loop
from fednorm.engines.client_state import ClientStateStore
from fednorm.engines.processes import WorkerPool
from fednorm.errors import DiskError
from fednorm.experiment.comparison import run_comparison
from fednorm.experiment.run import Monitor
from fednorm.experiment.schema.load import build_experiment
from support import ToyClients, task_of

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Linux's processes")
SHARED = Path("/dev/shm")  # noqa: S108 (Linux keeps semaphores there)
LONG = """
strategies = ["fedbn"]
clients = 6
rounds = 100000
seeds = {seeds}
model = "cnn"
algorithm = "fedavg"
engine = "{engine}"
client_state_memory = 0
"""


def list_session(number):
    """Return the processes of a session: all that its first process has started."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            state, _, _, session = (entry / "stat").read_text().rpartition(")")[2].split()[:4]
            if int(session) == number and state != "Z":
                found.append(int(entry.name))
    return found


def start_run(folder, engine, seeds=1, workers=1):
    """Start a run that would take long, and wait until it trains."""
    (folder / "tmp").mkdir(exist_ok=True)
    config = folder / "long.toml"
    config.write_text(LONG.format(engine=engine, seeds=seeds))
    command = [Path(sys.executable).with_name("fednorm"), "run", config, "--out", folder / "out"]
    env = os.environ | {"TMPDIR": str(folder / "tmp"), "FEDNORM_ALLOCATOR": "off"}
    process = subprocess.Popen(
        [*command, "--workers", str(workers)],
        env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    until = time.monotonic() + 120
    while not any(path.stat().st_size for path in folder.glob("out/runs/*/metrics.jsonl")):
        assert process.poll() is None
        assert time.monotonic() < until
        time.sleep(0.1)
    return process


@pytest.fixture
def place():
    """Return a folder with a short path, as sockets need it."""
    with tempfile.TemporaryDirectory(prefix="t-") as folder:
        yield Path(folder)


@pytest.mark.slow
@pytest.mark.parametrize(("engine", "seeds", "workers"), [("processes", 1, 2), ("loop", 2, 2)])
def test_nothing_of_a_killed_run_stays(place, engine, seeds, workers):
    process = start_run(place, engine, seeds, workers)
    assert len(list_session(process.pid)) >= 4  # the run, two workers, their server
    process.kill()
    process.wait()
    until = time.monotonic() + 30
    while alive := list_session(process.pid):
        assert time.monotonic() < until, alive
        time.sleep(0.1)
    # What is left in the folder for temporary files goes when the next run needs it.
    assert not list((place / "tmp").glob("pymp-*"))
    folders = [path.name for path in (place / "tmp").iterdir()]
    assert folders
    code = "from fednorm.system import TemporaryFolder; TemporaryFolder()"
    env = os.environ | {"TMPDIR": str(place / "tmp")}
    subprocess.run([sys.executable, "-c", code], env=env, check=True)
    assert list((place / "tmp").iterdir()) == []
    assert [path for name in folders for path in SHARED.glob(f"sem.{name}*")] == []


@pytest.mark.slow
def test_nothing_of_a_finished_process_stays(tmp_path):
    code = "from fednorm.engines.worker_process import prepare_context; prepare_context()"
    env = os.environ | {"TMPDIR": str(tmp_path)}
    subprocess.run([sys.executable, "-c", code], env=env, check=True)
    assert list(tmp_path.iterdir()) == []


def test_only_folders_of_dead_processes_are_removed(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / "fednorm-mine").mkdir()  # another program's
    (tmp_path / "fednorm-run-mine").mkdir()  # without a lock it is not ours
    (tmp_path / "fednorm-run-link").symlink_to(tmp_path / "fednorm-mine")
    code = (
        "import os, sys, tempfile; from fednorm.system import TemporaryFolder\n"
        f"tempfile.tempdir = {str(tmp_path)!r}\n"
        "held = TemporaryFolder(); (held.path / 'file').touch(); print(held.path, flush=True)\n"
        "sys.stdin.read()"
    )
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as p:
        held = Path(p.stdout.readline().strip())
        mine = system.TemporaryFolder()
        assert held.exists()
        assert mine.path.exists()
        name = held.name.removeprefix(system.OURS)
        semaphore = SHARED / f"sem.fednorm-{name}-test"
        semaphore.touch()
        p.kill()
    del mine
    system.TemporaryFolder()
    left = {"fednorm-mine", "fednorm-run-mine", "fednorm-run-link"}
    assert {path.name for path in tmp_path.iterdir()} == left
    assert not semaphore.exists()


@pytest.mark.slow
def test_a_worker_that_hangs_is_replaced():
    task, clients = (
        task_of("fedbn", create_algorithm("fedavg", lr=0.1), count=4),
        ToyClients(sizes=(3, 5, 4, 6), steps=2),
    )
    expected = list(loop.rounds(task, clients, 3))
    pool = WorkerPool(task, clients, 2, timeout=1.0)
    hung = []
    try:
        start = time.monotonic()
        for number, ours in enumerate(loop.rounds(task, clients, 3, train=pool.train)):
            for name, value in expected[number].state.weights.items():
                assert torch.equal(ours.state.weights[name], value)
            if number == 0:
                hung.append(pool.workers[0].process)
                os.kill(hung[0].pid, signal.SIGSTOP)
        assert time.monotonic() - start < 60
        assert not hung[0].is_alive()
    finally:
        pool.close()


@pytest.mark.slow
@pytest.mark.parametrize("signals", [(signal.SIGSTOP,) * 2, (signal.SIGSTOP, signal.SIGKILL)])
def test_processes_of_runs_that_hang_are_replaced(signals, tmp_path):
    values = {
        "strategies": ["gn"], "seeds": 2, "rounds": 30, "clients": 2, "timeout": 0.5,
        "engine": "loop",
    }  # fmt: skip
    stopped = []

    def stop(event):
        if not stopped and event.round == 2:
            workers = multiprocessing.active_children()
            stopped.extend(workers)
            for worker, sent in zip(workers, signals, strict=True):
                os.kill(worker.pid, sent)

    runs = run_comparison(
        build_experiment(values), folder=tmp_path, workers=2, monitor=Monitor([stop])
    ).runs
    assert stopped
    assert [run.status for run in runs] == ["finished"] * 2


def test_a_full_folder_for_temporary_files_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    def refuse(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("fednorm.engines.client_state.write_state", refuse)
    store = ClientStateStore(limit=0)
    with pytest.raises(DiskError, match=r"No space left on device.*TMPDIR"):
        store.with_states({0: ClientState({"a": torch.ones(3)})})
