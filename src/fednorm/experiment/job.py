"""One run of a comparison, made and recorded."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from fednorm.core.messages import ServerState
from fednorm.core.task import export
from fednorm.engines.loop import RoundResult
from fednorm.errors import ConfigError
from fednorm.experiment import checkpoint
from fednorm.experiment.checkpoint import Checkpoint
from fednorm.experiment.config import Experiment
from fednorm.experiment.prepare import ModelSource, PreparedRun, prepare
from fednorm.experiment.results import RunResult
from fednorm.experiment.run import Event, OnRound, find_tested_state, run
from fednorm.experiment.run_folder import (
    MetricsFile,
    RunCheckpointer,
    load_recorded,
    run_folder,
    run_key,
    save_run,
)
from fednorm.experiment.specs import StrategySpec
from fednorm.system import limit_threads

_PATIENCE = 60.0  # seconds for a process of a killed comparison to end its round
log = logging.getLogger("fednorm")


@dataclass(frozen=True)
class CheckpointPolicy:
    """How runs are saved while they go on, and whether they go on from there."""

    every: int | None = None  # rounds between checkpoints; every ten seconds if none
    resume: bool = True  # from the last checkpoint; else from the beginning


@dataclass(frozen=True)
class Job:
    """One run of a comparison."""

    experiment: Experiment
    entry: StrategySpec
    seed: int
    folder: Path | None = None
    saving: CheckpointPolicy = CheckpointPolicy()
    processes: int = 1  # that may be used to train clients side by side

    @property
    def name(self) -> str:
        """What the run is called in messages."""
        return f"{self.entry.title} seed {self.seed}"

    def find_recorded(self) -> RunResult | None:
        """Return the result if the run was finished before."""
        if self.folder is None:
            return None
        return load_recorded(self.folder, self.experiment, self.entry, self.seed)


def execute_job(job: Job, on_round: OnRound, model: ModelSource | None = None) -> RunResult:
    """Make one run, or the rest of it, and record it."""
    with limit_threads(job.experiment.threads):
        prepared = prepare(job.experiment, job.entry, job.seed, model, processes=job.processes)
        if job.folder is None:
            return run(prepared, on_round)
        target = run_folder(job.folder, job.entry, job.seed)
        target.mkdir(parents=True, exist_ok=True)
        with lock_folder(target, _PATIENCE):
            result = _run_recorded(job, prepared, on_round, target)
            # A model object has no name by which a record of it could be told from another's.
            if result.status not in {"interrupted", "stopped"} and model is None:
                save_run(job.folder, job.experiment, job.entry, result)
                checkpoint.clear_checkpoints(target)
        return result


def _run_recorded(job: Job, prepared: PreparedRun, on_round: OnRound, target: Path) -> RunResult:
    metrics = MetricsFile(target / "metrics.jsonl")
    key = run_key(job.experiment, job.entry, job.seed)
    saves = RunCheckpointer(target, key, metrics, job.saving.every)
    if not job.saving.resume:
        checkpoint.clear_checkpoints(target)
    try:
        start, messages = saves.start(prepared.data.transform.device)
        for message in messages:
            log.warning(message)

        def both(event: Event) -> None:
            metrics.write(event)
            on_round(event)

        result = run(prepared, both, saves=saves, start=start)
        if result.status in {"finished", "stopped"} and saves.reached:
            model = export(prepared.task, _find_state(prepared, saves.reached)).state_dict()
            shared = {k: v for k, v in model.items() if k not in prepared.task.layout.personal}
            checkpoint.save_model(target / "model.safetensors", shared)
        return result
    finally:
        metrics.file.close()


def _find_state(prepared: PreparedRun, reached: RoundResult | Checkpoint) -> ServerState:
    """Return the state whose model is saved: what was tested, or would be if it were now."""
    if isinstance(reached, RoundResult) and reached.tested:
        return reached.tested
    # Nodes of Flower can be asked for their statistics only while rounds go on.
    return reached.state if prepared.remote else find_tested_state(prepared, reached)


@contextmanager
def lock_folder(folder: Path, patience: float = 0.0) -> Iterator[None]:
    """Keep others out of a folder; the system opens it again when the process ends."""
    try:
        with FileLock(folder / ".lock", timeout=patience):
            yield
    except Timeout:
        raise ConfigError(
            f"another run is writing into {str(folder)!r}; wait for it, or choose another --out."
        ) from None
