"""A run that is stopped, killed or damaged ends as if nothing had happened."""

import errno
import logging
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Mapping
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import safetensors.torch
import torch

from fednorm.core.messages import ClientState, RejectedReply, RunningStats, ServerState
from fednorm.engines.worker_process import prepare_context
from fednorm.errors import ConfigError, DiskError, WorkerError
from fednorm.experiment import checkpoint
from fednorm.experiment.checkpoint import Checkpoint
from fednorm.experiment.comparison import run_comparison
from fednorm.experiment.job import CheckpointPolicy, lock_folder
from fednorm.experiment.results import Event
from fednorm.experiment.run import Monitor
from fednorm.experiment.run_folder import MetricsFile, open_folder
from fednorm.experiment.schema.load import build_experiment
from fednorm.system import atomic_write

SMALL = {
    "strategies": ["fedbn"],
    "seeds": [0],
    "rounds": 12,
    "clients": 3,
    "batch_size": 8,
    "eval_every": 4,
    "model": {"name": "resnet", "widths": [4, 4]},
    "algorithm": {"name": "fedavg", "lr": 0.05, "momentum": 0.9, "momentum_state": "local"},
}
KINDS = {
    "personal": {},
    "sampled": {"participation": 0.5},
    "hardly sampled": {"clients": 8, "participation": 0.2, "evaluate": "global", "eval_every": 1},
    "global momentum": {
        "strategies": ["naive"],
        "algorithm": {"name": "fedavg", "momentum": 0.9, "momentum_state": "global"},
    },
    "frozen by itself": {
        "strategies": [{"name": "fixbn", "freeze_round": "auto", "window": 3, "threshold": 1.0}]
    },
    "dual, merged": {
        "strategies": ["dualbn"],
        "algorithm": {"name": "dsgd", "lr": 0.05, "momentum": 0.9},
    },
    "calibrated": {  # clients pass over all their data in every round
        "strategies": ["hbn"],
        "algorithm": {"name": "fedavg", "lr": 0.05},
        "data": {"name": "patterns", "samples": 90, "test": 30, "size": 8, "classes": 8},
    },
    "diagnosed": {"strategies": ["fbn"], "algorithm": "dsgd", "diagnose": True},
    "diagnosed in part": {"strategies": ["naive"], "participation": 0.5, "diagnose": True},
    "exchanged": {"strategies": ["fedtan"], "algorithm": "dsgd", "rounds": 6},
    "attacked": {
        "strategies": ["fbn"],
        "clients": 6,
        "byzantine": 2,
        "attack": "gaussian",
        "aggregator": "nnm > trimmed_mean",
        "statistics_aggregator": "median",
    },
    "dropping out": {
        "strategies": ["naive"],
        "clients": 6,
        "client_dropout": 0.5,
        "min_replies": 3,
    },
    "centralized": {"strategies": ["centralized"], "algorithm": "dsgd"},
}


def experiment(kind="personal", **more):
    return build_experiment({**SMALL, **KINDS[kind], **more})


def run_of(folder):
    (found,) = (folder / "runs").iterdir()
    return found


def outcome(folder):
    """All that a run leaves, but its time."""
    files = {p.name: p.read_bytes() for p in run_of(folder).glob("m*") if p.is_file()}
    assert set(files) == {"metrics.jsonl", "model.safetensors"}
    return files


def stopping_after(number):
    def on_round(event):
        if event.round == number:
            raise KeyboardInterrupt

    return on_round


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_stopped_run_resumes_as_if_nothing_had_happened(kind, tmp_path):
    chosen = experiment(kind)
    whole = run_comparison(chosen, folder=tmp_path / "whole")
    seen = []
    for number in (1, 5):
        (stopped,) = run_comparison(
            chosen, folder=tmp_path / "parts", monitor=Monitor([stopping_after(number)])
        ).runs
        assert (stopped.status, stopped.rounds) == ("interrupted", number)
    parts = run_comparison(
        chosen, folder=tmp_path / "parts", monitor=Monitor([lambda e: seen.append(e.round)])
    )
    assert seen == list(range(6, chosen.rounds + 1))
    assert outcome(tmp_path / "parts") == outcome(tmp_path / "whole")
    (one,), (other,) = whole.runs, parts.runs
    assert repr(one.history) == repr(other.history)
    assert repr(one.diagnostics) == repr(other.diagnostics)
    assert one.bytes_up_per_round == other.bytes_up_per_round
    (last,) = run_of(tmp_path / "parts").glob("checkpoint-*")  # with which the run can be extended
    assert last.name.startswith(f"checkpoint-{chosen.rounds:08}-")


def saved(folder, kind="personal", every=2, until=9):
    """Stop a run with checkpoints of the last two even rounds, and the one where it stopped."""
    run_comparison(
        experiment(kind),
        folder=folder,
        monitor=Monitor([stopping_after(until)]),
        saving=CheckpointPolicy(every),
    )
    return sorted(run_of(folder).glob("checkpoint-*"))


def test_the_newest_two_are_kept(tmp_path):
    assert [path.name[:19] for path in saved(tmp_path)] == [
        "checkpoint-00000008",
        "checkpoint-00000009",
    ]


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["cut off", "altered", "empty"])
@pytest.mark.parametrize("both", [False, True])
def test_a_damaged_checkpoint_is_noticed_and_the_one_before_is_used(damage, both, tmp_path, caplog):
    run_comparison(experiment(), folder=tmp_path / "whole")
    files = saved(tmp_path / "parts")
    for path in files if both else files[-1:]:
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        end = {"cut off": len(content) - 7, "altered": len(content), "empty": 0}[damage]
        path.write_bytes(bytes(content[:end]))
    seen = []
    with caplog.at_level(logging.WARNING, "fednorm"):
        run_comparison(
            experiment(),
            folder=tmp_path / "parts",
            monitor=Monitor([lambda e: seen.append(e.round)]),
        )
    assert seen[0] == (1 if both else 9)
    assert "checkpoint of round 9" in caplog.text
    assert "is damaged; the one before it is used" in caplog.text
    assert outcome(tmp_path / "parts") == outcome(tmp_path / "whole")


@pytest.mark.slow
def test_lines_that_are_missing_make_a_checkpoint_useless(tmp_path):
    saved(tmp_path)
    metrics = run_of(tmp_path) / "metrics.jsonl"
    metrics.write_bytes(metrics.read_bytes()[:-5])
    seen = []
    run_comparison(experiment(), folder=tmp_path, monitor=Monitor([lambda e: seen.append(e.round)]))
    assert seen[0] == 1
    assert len(metrics.read_text().splitlines()) == 12


@pytest.mark.slow
def test_a_checkpoint_of_another_setting_is_not_used(tmp_path):
    saved(tmp_path)
    other = experiment(strategies=[{"name": "fedbn", "stats_momentum": 0.2}])
    seen = []
    run_comparison(other, folder=tmp_path, monitor=Monitor([lambda e: seen.append(e.round)]))
    assert seen[0] == 1


@pytest.mark.slow
def test_a_run_can_be_begun_anew(tmp_path):
    saved(tmp_path)
    seen = []
    again = CheckpointPolicy(resume=False)
    run_comparison(
        experiment(),
        folder=tmp_path,
        monitor=Monitor([lambda e: seen.append(e.round)]),
        saving=again,
    )
    assert seen[0] == 1


@pytest.mark.slow
def test_a_full_disk_stops_the_run_and_leaves_the_last_checkpoint(tmp_path, monkeypatch):
    whole = tmp_path / "whole"
    run_comparison(experiment(), folder=whole)
    real, calls = os.fsync, []

    def fsync(descriptor):
        calls.append(descriptor)
        if len(calls) > 4:  # two for each checkpoint: the file and its folder
            raise OSError(errno.ENOSPC, "No space left on device")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    parts = tmp_path / "parts"
    with pytest.raises(DiskError, match=r"No space left on device; the checkpoint of round 4 is"):
        run_comparison(experiment(), folder=parts, saving=CheckpointPolicy(2))
    monkeypatch.undo()
    assert not list(run_of(parts).glob(".checkpoint*"))
    seen = []
    run_comparison(experiment(), folder=parts, monitor=Monitor([lambda e: seen.append(e.round)]))
    assert seen[0] == 5
    assert outcome(parts) == outcome(whole)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="only Linux has /dev/full")
def test_a_full_disk_is_told_with_the_runs_folder(tmp_path):
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")  # every write finds no space
    metrics = MetricsFile(tmp_path / "metrics.jsonl")
    metrics.write(Event("fbn", 0, 1, 2, 0.5))
    told = re.escape(f"{str(tmp_path)!r} cannot be written to: No space left on device; make room")
    with pytest.raises(DiskError, match=told):
        metrics.flush()
    with pytest.raises(DiskError, match=told):
        metrics.close()


@pytest.mark.parametrize("full", ["write", "fsync", "open"])
def test_a_full_disk_is_told_where_a_file_is_written_whole(tmp_path, monkeypatch, full):
    def refuse(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    target = tmp_path / "run.json"
    if full == "fsync":
        monkeypatch.setattr(os, "fsync", refuse)
    elif full == "open":
        monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(DiskError, match=re.escape(repr(str(tmp_path)))), atomic_write(target) as f:
        refuse() if full == "write" else f.write(b"{}")
    assert not list(tmp_path.iterdir())


def test_a_full_disk_is_told_where_a_folder_is_made(tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(DiskError, match="new' cannot be written to: Disk quota exceeded"):
        run_comparison(experiment(), folder=tmp_path / "new")


def test_two_runs_do_not_write_into_one_folder(tmp_path):
    with lock_folder(tmp_path), pytest.raises(ConfigError, match="another run is writing into"):
        run_comparison(experiment(), folder=tmp_path)
    run_comparison(experiment(rounds=1), folder=tmp_path)


def test_values_come_back_bit_by_bit(tmp_path):
    odd = torch.tensor([float("nan"), float("inf"), -0.0, 1e-45])
    strided = torch.arange(24.0).view(2, 3, 2, 2).to(memory_format=torch.channels_last)
    state = ServerState(
        round=7,
        weights={"a.b": odd, "tied": strided, "tied too": strided},
        buffers={"count": torch.tensor(3)},
        running={"layer": RunningStats(odd.double(), torch.empty(0), 5)},
        strategy_state={"half": torch.tensor([0.5], dtype=torch.bfloat16)},
        rejected=(RejectedReply(3, "reason"),),
    )
    before = Checkpoint(state, {11: ClientState({"x": odd}, {})}, {"history": [], "n": 0.1 + 0.2})
    checkpoint.save_checkpoint(tmp_path, {"k": (1, 2)}, before)
    after, messages = checkpoint.load_newest(tmp_path, {"k": (1, 2)})
    assert not messages
    assert after.record == before.record
    assert after.state.rejected == state.rejected
    assert after.state.running["layer"].num_batches == 5
    pairs = [
        (after.state.weights[name], state.weights[name]) for name in ("a.b", "tied", "tied too")
    ]
    pairs += [
        (after.state.buffers["count"], state.buffers["count"]),
        (after.state.running["layer"].mean, state.running["layer"].mean),
        (after.state.strategy_state["half"], state.strategy_state["half"]),
        (after.client_states[11].tensors["x"], odd),
    ]
    for new, old in pairs:
        assert new.dtype == old.dtype
        assert new.shape == old.shape
        assert torch.equal(*(t.contiguous().view(-1).view(torch.uint8) for t in (new, old)))


def _to_be_killed(values, folder):
    torch.set_num_threads(1)
    run_comparison(build_experiment(values), folder=folder, saving=CheckpointPolicy(3))


def test_a_checkpoint_that_could_not_be_read_is_not_written(tmp_path, monkeypatch):
    state = ServerState(1, {str(i): torch.zeros(1) for i in range(100)}, {}, {})
    checkpoint.save_checkpoint(tmp_path, {}, Checkpoint(state, {}, {}))
    before = list(tmp_path.iterdir())
    monkeypatch.setattr(checkpoint, "_LONGEST", 1000)
    with pytest.raises(DiskError, match=r"100 tensors are more than .* round 1 is intact"):
        checkpoint.save_checkpoint(tmp_path, {}, Checkpoint(state, {}, {}))
    assert list(tmp_path.iterdir()) == before


class OnDisk(Mapping):
    """Client states that exist only while they are referenced."""

    def __init__(self):
        self.alive = weakref.WeakSet()
        self.most = 0

    def __getitem__(self, client):
        tensor = torch.arange(6.0) + client
        self.alive.add(tensor)
        self.most = max(self.most, len(self.alive))
        counter = torch.tensor(client)
        return ClientState({"γ": tensor, "odd": torch.ones(3, dtype=torch.uint8), "n": counter})

    def __iter__(self):
        return iter(range(50))

    def __len__(self):
        return 50


def test_client_states_are_never_all_in_memory(tmp_path):
    state, client_states = ServerState(1, {"w": torch.zeros(2)}, {}, {}), OnDisk()
    checkpoint.save_checkpoint(tmp_path, {}, Checkpoint(state, client_states, {}))
    assert client_states.most <= 2
    found, _ = checkpoint.load_newest(tmp_path, {})
    (path,) = tmp_path.glob("*.safetensors")
    assert len(safetensors.torch.load_file(path)) == 1 + 3 * 50  # anybody can read it
    for client, client_state in found.client_states.items():
        expected = client_states[client].tensors
        assert client_state.tensors.keys() == expected.keys()
        assert all(torch.equal(client_state.tensors[name], t) for name, t in expected.items())
        assert all(client_state.tensors[name].dtype == t.dtype for name, t in expected.items())


@pytest.mark.slow
def test_a_run_killed_at_twenty_random_moments_ends_the_same(tmp_path):
    values = {**SMALL, "rounds": 150, "model": "mlp", "eval_every": 10}
    run_comparison(build_experiment(values), folder=tmp_path / "whole")
    context = prepare_context()  # torch is imported once
    draw = np.random.default_rng(0)
    killed = 0
    while killed < 20:
        process = context.Process(target=_to_be_killed, args=(values, tmp_path / "parts"))
        process.start()
        process.join(0.15 + draw.random() * 0.25)
        if process.exitcode is None:
            process.kill()
            process.join()
            killed += 1
        elif list((tmp_path / "parts").rglob("run.json")):
            break
    run_comparison(build_experiment(values), folder=tmp_path / "parts")
    assert killed >= 3  # it had to be interrupted for this to show anything
    assert outcome(tmp_path / "parts") == outcome(tmp_path / "whole")


def test_a_folder_whose_config_was_not_written_whole_keeps_the_one_before(tmp_path, monkeypatch):
    chosen = experiment()
    open_folder(tmp_path, chosen)
    before = (tmp_path / "config.toml").read_bytes()

    def die(_self, _target):
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", die)  # the last moment at which a process can be killed
    with pytest.raises(KeyboardInterrupt):
        open_folder(tmp_path, chosen)
    assert (tmp_path / "config.toml").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["config.toml"]


@pytest.mark.slow
def test_a_worker_that_dies_is_replaced(tmp_path, caplog):
    chosen = experiment(seeds=[0, 1, 2])
    whole = run_comparison(chosen, folder=tmp_path / "whole")
    killed = []

    def on_round(event):
        if event.round == 5 and not killed:
            child = multiprocessing.active_children()[0]
            killed.append(child.pid)
            os.kill(child.pid, signal.SIGKILL)

    with caplog.at_level(logging.WARNING, "fednorm"):
        parts = run_comparison(
            chosen,
            folder=tmp_path / "parts",
            monitor=Monitor([on_round]),
            workers=2,
            saving=CheckpointPolicy(2),
        )
    assert killed
    assert "a worker process died" in caplog.text
    assert [repr(r.history) for r in parts.runs] == [repr(r.history) for r in whole.runs]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["hbn", "heterofl"])
def test_a_run_that_ended_before_its_model_was_saved_saves_the_one_it_tested(
    name, tmp_path, monkeypatch
):
    chosen = experiment("calibrated", strategies=[name])
    whole, ended = tmp_path / "whole", tmp_path / "ended"
    run_comparison(chosen, folder=whole, saving=CheckpointPolicy(1))
    with monkeypatch.context() as patched:
        patched.setattr("fednorm.experiment.job.save_model", Mock(side_effect=SystemExit))
        with pytest.raises(SystemExit):
            run_comparison(chosen, folder=ended, saving=CheckpointPolicy(1))
    run_comparison(chosen, folder=ended, saving=CheckpointPolicy(1))
    assert outcome(ended) == outcome(whole)


@pytest.mark.slow
def test_workers_that_die_again_and_again_are_given_up(tmp_path):
    def on_round(event):
        del event
        for child in multiprocessing.active_children():
            os.kill(child.pid, signal.SIGKILL)

    # Long enough that no run is over before its process is killed.
    chosen = experiment(seeds=[0, 1], rounds=100_000)
    with pytest.raises(WorkerError, match="died 3 times in a row"):
        run_comparison(chosen, folder=tmp_path, monitor=Monitor([on_round]), workers=2)


def command(folder, **more):
    settings = [f"--set={key}={value}" for key, value in more.items()]
    script = "import sys; from fednorm.cli import main; main()"
    arguments = ["compare", "--strategies", "fbn,gn", "--seeds", "1", "--out", str(folder)]
    return [sys.executable, "-c", script, *arguments, *settings]


def descendants(pid):
    """Return the processes that a process started, and those that these started."""
    listed = Path(f"/proc/{pid}/task/{pid}/children")
    own = [int(child) for child in listed.read_text().split()]
    return own + [other for child in own for other in descendants(child)]


def wait_until(condition, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it took too long"
        time.sleep(0.05)


@pytest.mark.slow
def test_sigterm_saves_and_the_same_command_resumes(tmp_path):
    arguments = command(tmp_path, rounds=100000, eval_every=50)
    process = subprocess.Popen([*arguments, "--workers", "1"], stderr=subprocess.PIPE, text=True)
    metrics = tmp_path / "runs" / "fbn-seed0" / "metrics.jsonl"
    wait_until(lambda: metrics.exists() and metrics.stat().st_size > 0)
    process.terminate()
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "the same command continues" in errors
    assert list(metrics.parent.glob("checkpoint-*"))


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="reads Linux's /proc")
def test_workers_end_when_their_parent_is_killed(tmp_path):
    process = subprocess.Popen(
        [*command(tmp_path, rounds=100000, eval_every=50), "--workers", "2"],
        stderr=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
    )
    wait_until(lambda: len(list(tmp_path.glob("runs/*/metrics.jsonl"))) == 2)
    started = descendants(process.pid)
    assert len(started) >= 4  # two workers, their server, and what tracks shared memory
    process.kill()
    process.wait()
    wait_until(lambda: not any(_runs(pid) for pid in started))
    assert len(list(tmp_path.glob("runs/*/checkpoint-*"))) >= 2


def _runs(pid):
    stat = Path(f"/proc/{pid}/stat")
    try:
        return stat.read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
