"""An experiment as the ServerApp of a SuperLink; the ClientApp of its SuperNodes is in `nodes.py`.

The ServerApp makes the runs of the experiment one after the other with the nodes that are
connected, and writes the results into its log, as signed lines that `submit.py` reads. A trained
model stays on the SuperLink's machine.
"""

import os
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fednorm.errors import ConfigError
from fednorm.experiment.config import Experiment
from fednorm.experiment.flower import read_experiment
from fednorm.experiment.flower.signed_lines import LineWriter
from fednorm.experiment.prepare import prepare
from fednorm.experiment.run import LastRound, Monitor, run
from fednorm.experiment.specs import StrategySpec
from fednorm.experiment.trained_model import fold_run, save_model
from fednorm.system import limit_threads

server = ServerApp()


@server.main()
def main(grid: Grid, context: Context) -> None:
    """Make all runs of the experiment."""
    messages = LineWriter()
    try:
        # A setting of the SuperLink's process, which who submits a run cannot change.
        allow = os.environ.get("FEDNORM_ALLOW", "")
        experiment = read_experiment(str(context.run_config["experiment"]), allow)
    except ConfigError as error:
        messages.send(error=str(error))
        raise
    folder = Path(os.environ.get("FLWR_HOME", "~/.flwr")).expanduser() / "fednorm"
    place = _Place(grid, messages, folder / str(context.run_id))
    for entry in experiment.strategies:
        for seed in experiment.seeds:
            _make_run(experiment, entry, seed, place)


@dataclass(frozen=True)
class _Place:
    """Where the runs are made: the nodes, whom to tell, and where models stay."""

    grid: Grid
    messages: LineWriter
    folder: Path


def _make_run(experiment: Experiment, entry: StrategySpec, seed: int, place: _Place) -> None:
    last = LastRound()
    try:
        with limit_threads(experiment.threads):
            prepared = prepare(experiment, entry, seed)
            if prepared.remote:
                prepared.remote.open = lambda: nullcontext(place.grid)
            report = Monitor([lambda event: place.messages.send(event=asdict(event))])
            result = run(prepared, report, saves=last)
    except (ConfigError, OSError) as error:
        place.messages.send(error=str(error))
        raise
    if last.round:
        path = place.folder / f"{entry.folder}-seed{seed}.safetensors"
        save_model(path, fold_run(prepared, last.round.tested or last.round.state))
        place.messages.send(model=str(path), sha256=sha256(path.read_bytes()).hexdigest())
    place.messages.send(result=asdict(result))
