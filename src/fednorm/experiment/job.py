"""One run of a comparison, made and recorded."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from filelock import FileLock, Timeout

from fednorm.core.messages import ClientState, ServerState
from fednorm.core.types import ClientId
from fednorm.engines.base import RoundResult
from fednorm.errors import ConfigError
from fednorm.experiment import checkpoint
from fednorm.experiment.build import PreparedRun
from fednorm.experiment.callbacks.base import Monitor, RunStart
from fednorm.experiment.checkpoint import Checkpoint, RunRecorder
from fednorm.experiment.objective import ModelSource
from fednorm.experiment.prepare import prepare
from fednorm.experiment.results import RunResult
from fednorm.experiment.run import (
    LastRound,
    find_tested_state,
    make_initial_state,
    run,
)
from fednorm.experiment.run_folder import (
    MetricsFile,
    RunCheckpointer,
    check_record,
    load_recorded,
    run_folder,
    run_key,
    save_run,
)
from fednorm.experiment.schema.config import Experiment
from fednorm.experiment.schema.specs import StrategySpec
from fednorm.experiment.trained_model import (
    MODEL_FILE,
    fold_clients,
    fold_run,
    save_model,
)
from fednorm.system import explain_full_disk, limit_threads

_PATIENCE = 60.0  # seconds in which a process of a killed comparison ends its round
log = logging.getLogger("fednorm")


@dataclass(frozen=True)
class CheckpointPolicy:
    """How often runs are saved, and whether they resume."""

    every: int | None = None  # rounds between checkpoints; every ten seconds if none
    resume: bool = True  # from the last checkpoint; else from the beginning
    most_kept: int = 100_000_000  # bytes of the last state of a run, with which it can be extended


@dataclass(frozen=True)
class Job:
    """One run of a comparison."""

    experiment: Experiment
    entry: StrategySpec
    seed: int
    folder: Path | None = None
    saving: CheckpointPolicy = CheckpointPolicy()
    processes: int = 1  # that may train clients at the same time

    @property
    def name(self) -> str:
        """The name of the run in messages."""
        return f"{self.entry.title} seed {self.seed}"

    def find_recorded(self, model: ModelSource | None = None) -> RunResult | None:
        """Return the result if the run was finished before; `model` is the user's object."""
        if self.folder is None:
            return None
        found = load_recorded(self.folder, self.experiment, self.entry, self.seed)
        place = run_folder(self.folder, self.entry, self.seed)
        return found.keep_model(place, model) if found and model is not None else found


def execute_job(
    job: Job,
    monitor: Monitor,
    model: ModelSource | None = None,
    prepared: PreparedRun | None = None,
) -> RunResult:
    """Make one run, or the rest of it, and record it; prepare it unless it is `prepared`."""
    with limit_threads(job.experiment.threads):
        prepared = prepared or prepare(job.experiment, job.entry, job.seed, model)
        prepared = replace(prepared, setup=replace(prepared.setup, processes=job.processes))
        if job.folder is None:
            last = LastRound()
            monitor.start(describe_start(prepared))
            result = _keep_model(prepared, run(prepared, monitor, saves=last), last.round)
            monitor.end(result)
            return result
        target = run_folder(job.folder, job.entry, job.seed)
        with lock_folder(target, _PATIENCE):
            result = _run_recorded(job, prepared, monitor, job.folder)
        monitor.end(result)
        return result


def describe_start(
    prepared: PreparedRun, start: Checkpoint | None = None, folder: Path | None = None
) -> RunStart:
    """Return what callbacks are told before a run."""
    experiment = prepared.experiment
    recorder = RunRecorder.read(start.record) if start else RunRecorder()
    return RunStart(
        strategy=prepared.entry.title,
        seed=prepared.seed,
        rounds=experiment.rounds,
        done=len(recorder.exchanges),
        history=tuple(recorder.history),
        settings=experiment.model_dump(mode="json", exclude_none=True),
        folder=folder,
    )


def _run_recorded(job: Job, prepared: PreparedRun, monitor: Monitor, folder: Path) -> RunResult:
    target = run_folder(folder, job.entry, job.seed)
    metrics = MetricsFile(target / "metrics.jsonl")
    key = run_key(job.experiment, job.entry, job.seed)
    saves = RunCheckpointer(target, key, metrics, job.saving.every, job.saving.most_kept)
    if not job.saving.resume:
        checkpoint.clear_checkpoints(target)
    try:
        device = prepared.data.transform.device
        start, messages = saves.start(device, partial(check_start, prepared))
        for message in messages:
            log.warning(message)
        monitor.start(describe_start(prepared, start, target))
        recorded = replace(monitor, callbacks=(metrics.on_round, *monitor.callbacks))
        result = run(prepared, recorded, saves=saves, start=start)
        result = _keep_model(prepared, result, saves.reached, target)
    finally:
        metrics.close()
    if result.status not in {"interrupted", "stopped"}:
        save_run(folder, job.experiment, job.entry, result)
        last = result.rounds if result.status == "finished" else None
        checkpoint.clear_checkpoints(target, last=last, most=job.saving.most_kept)
    return result


def check_start(prepared: PreparedRun, found: Checkpoint) -> None:
    """Raise an error unless the run can resume from a checkpoint."""
    experiment = prepared.experiment
    checkpoint.check_fit(found, prepared.task, experiment.clients, experiment.rounds)
    check_record(found)


def _keep_model(
    prepared: PreparedRun,
    result: RunResult,
    reached: RoundResult | Checkpoint | None,
    target: Path | None = None,
) -> RunResult:
    """Keep the trained model of a run that came to its end, in its folder if it has one."""
    if not (result.completed or result.status == "stopped") or reached is None:
        return result
    state = find_state(prepared, reached)
    trained = fold_run(prepared, state)
    own = fold_clients(prepared, state, _list_states(prepared, reached), trained.header.personal)
    if target and prepared.setup.ours:
        save_model(target / MODEL_FILE, trained, own)
        return result.keep_model(target)
    trained = replace(trained, clients=dict(own))
    if target:  # without a model of the user's, which no file can hold
        save_model(target / MODEL_FILE, trained, trained.clients.items())
    return result.keep_model(trained)


def _list_states(
    prepared: PreparedRun, reached: RoundResult | Checkpoint
) -> Iterator[tuple[ClientId, ClientState]]:
    """Yield the clients with the states that they are tested with; Flower's nodes keep theirs."""
    if not prepared.remote:
        new = make_initial_state(prepared, reached.client_states)
        for client in range(prepared.experiment.clients):
            yield client, reached.client_states.get(client, new)


def find_state(prepared: PreparedRun, reached: RoundResult | Checkpoint) -> ServerState:
    """Return the state whose model is saved: the one that was tested, or would be now."""
    if isinstance(reached, RoundResult) and reached.tested:
        return reached.tested
    # Flower's nodes can be asked for their statistics only while rounds last.
    return reached.state if prepared.remote else find_tested_state(prepared, reached)


@contextmanager
def lock_folder(folder: Path, patience: float = 0.0) -> Iterator[None]:
    """Make a folder and lock it against other processes; the lock ends with the process."""
    lock = FileLock(folder / ".lock", timeout=patience)
    try:
        with explain_full_disk(folder):
            folder.mkdir(parents=True, exist_ok=True)
            lock.acquire()
    except Timeout:
        raise ConfigError(
            f"another run is writing into {str(folder)!r}; wait for it, or choose another --out."
        ) from None
    try:
        yield
    finally:
        lock.release()
