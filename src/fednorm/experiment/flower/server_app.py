"""An experiment as the ServerApp of a SuperLink; the ClientApp of its SuperNodes is in `nodes.py`.

The ServerApp makes the runs of the experiment one after the other with the nodes that are
connected, and writes the results into its log, as signed lines that `submit.py` reads. A trained
model stays on the SuperLink's machine. So do checkpoints and what was told until all runs are
finished: if the SuperLink is restarted, the same experiment continues.
"""

import json
import os
import shutil
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fednorm.errors import FednormError
from fednorm.experiment.build import PreparedRun
from fednorm.experiment.callbacks.base import Monitor
from fednorm.experiment.checkpoint import clear_checkpoints
from fednorm.experiment.flower import open_experiment
from fednorm.experiment.flower.submit import LineWriter
from fednorm.experiment.job import CheckpointPolicy, Job, check_start, find_state, lock_folder
from fednorm.experiment.prepare import prepare
from fednorm.experiment.results import Event, RunResult
from fednorm.experiment.run import run
from fednorm.experiment.run_folder import (
    MetricsFile,
    RunCheckpointer,
    run_folder,
    run_key,
    save_run,
)
from fednorm.experiment.schema.config import Experiment
from fednorm.experiment.trained_model import fold_run, save_model
from fednorm.system import limit_threads

server = ServerApp()


@server.main()
def main(grid: Grid, context: Context) -> None:
    """Make all runs of the experiment, or the rest of them."""
    messages = LineWriter()
    try:
        # A setting of the SuperLink's process, which who submits a run cannot change.
        allow = os.environ.get("FEDNORM_ALLOW", "")
        with open_experiment(str(context.run_config["experiment"]), allow) as experiment:
            _make_runs(experiment, grid, context, messages)
    except (FednormError, OSError) as error:
        messages.send(error=str(error))
        raise


def _make_runs(experiment: Experiment, grid: Grid, context: Context, messages: LineWriter) -> None:
    home = Path(os.environ.get("FLWR_HOME", "~/.flwr")).expanduser() / "fednorm"
    unfinished = home / "unfinished" / sha256(experiment.model_dump_json().encode()).hexdigest()
    every = context.run_config.get("checkpoint-every")
    saving = CheckpointPolicy(
        None if every is None else int(every), bool(context.run_config.get("resume", True))
    )
    if not saving.resume:
        shutil.rmtree(unfinished, ignore_errors=True)
    place = _Place(grid, messages, home / str(context.run_id))
    with lock_folder(unfinished):
        jobs = [
            Job(experiment, entry, seed, unfinished, saving)
            for entry in experiment.strategies
            for seed in experiment.seeds
        ]
        ended = [_make_run(job, place) for job in jobs]
    if all(ended):
        shutil.rmtree(unfinished, ignore_errors=True)


@dataclass(frozen=True)
class _Place:
    """Where the runs are made: the nodes, whom to tell, and where models stay."""

    grid: Grid
    messages: LineWriter
    folder: Path


class EventFile(MetricsFile):
    """The events of a run, one line a round, to tell them again when the run is resumed."""

    def write(self, event: Event) -> None:
        """Add a round."""
        self.file.write(json.dumps(asdict(event)) + "\n")  # with NaN, as in messages

    def list_lines(self) -> list[str]:
        """Return the rounds so far."""
        self.file.flush()
        self.file.seek(0)
        return self.file.read().splitlines()


def _make_run(job: Job, place: _Place) -> bool:
    """Make one run, or the rest of it, and tell of all of it; return whether it has ended."""
    target = run_folder(job.folder or Path(), job.entry, job.seed)
    target.mkdir(parents=True, exist_ok=True)
    events = EventFile(target / "events.jsonl")
    name = f"{job.entry.folder}-seed{job.seed}.safetensors"
    try:
        if result := job.find_recorded():
            _tell_again(events, place)
        else:
            with limit_threads(job.experiment.threads):
                result = _continue_run(job, events, place, target / name)
    finally:
        events.file.close()
    if (target / name).is_file():
        path = place.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(target / name, path)
        place.messages.send(model=str(path), sha256=sha256(path.read_bytes()).hexdigest())
    place.messages.send(result=asdict(result))
    return result.status not in {"stopped", "interrupted"}


def _tell_again(events: EventFile, place: _Place) -> None:
    for line in events.list_lines():
        place.messages.send(event=json.loads(line))


def _continue_run(job: Job, events: EventFile, place: _Place, model: Path) -> RunResult:
    prepared, folder = prepare(job.experiment, job.entry, job.seed), model.parent
    if prepared.remote:
        prepared.remote.open = lambda: nullcontext(place.grid)
        prepared.remote.exact = False  # rounds on machines are dear
    if prepared.task.layout.personal or prepared.task.algorithm.needs_client_state:
        clear_checkpoints(folder)  # what nodes kept is gone with their part of the run
    key = run_key(job.experiment, job.entry, job.seed)
    saves = RunCheckpointer(folder, key, events, job.saving.every)
    start, _ = saves.start(prepared.data.transform.device, partial(check_start, prepared))
    _tell_again(events, place)
    tell = [events.write, lambda event: place.messages.send(event=asdict(event))]
    result = run(prepared, Monitor(tell), saves=saves, start=start)
    _keep_model(prepared, saves, model)
    if result.status not in {"stopped", "interrupted"}:
        save_run(job.folder or Path(), job.experiment, job.entry, result)
    return result


def _keep_model(prepared: PreparedRun, saves: RunCheckpointer, path: Path) -> None:
    if saves.reached:
        save_model(path, fold_run(prepared, find_state(prepared, saves.reached)))
