"""An experiment as the ServerApp of a SuperLink; the ClientApp of its SuperNodes is in `nodes.py`.

The ServerApp makes the runs of the experiment one after the other with the nodes that are
connected, and writes the results into its log, as lines of JSON that `submit.py` reads. A trained
model stays on the SuperLink's machine.
"""

import json
import os
from contextlib import nullcontext
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from typing import Any

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fednorm.errors import ConfigError
from fednorm.experiment.config import Experiment
from fednorm.experiment.flower import MARK
from fednorm.experiment.prepare import prepare
from fednorm.experiment.results import replace_nan
from fednorm.experiment.run import LastRound, Monitor, run
from fednorm.experiment.specs import StrategySpec
from fednorm.experiment.trained_model import fold_run, save_model
from fednorm.system import limit_threads

server = ServerApp()


@server.main()
def main(grid: Grid, context: Context) -> None:
    """Make all runs of the experiment."""
    experiment = Experiment.model_validate_json(str(context.run_config["experiment"]))
    folder = Path(os.environ.get("FLWR_HOME", "~/.flwr")).expanduser() / "fednorm"
    for entry in experiment.strategies:
        for seed in experiment.seeds:
            _make_run(experiment, entry, seed, grid, folder / str(context.run_id))


def _make_run(
    experiment: Experiment, entry: StrategySpec, seed: int, grid: Grid, folder: Path
) -> None:
    last = LastRound()
    try:
        with limit_threads(experiment.threads):
            prepared = prepare(experiment, entry, seed)
            if prepared.remote:
                prepared.remote.open = lambda: nullcontext(grid)
            report = Monitor([lambda event: _send(event=replace_nan(asdict(event)))])
            result = run(prepared, report, saves=last)
    except (ConfigError, OSError) as error:
        _send(error=str(error))
        raise
    if last.round:
        path = folder / f"{entry.folder}-seed{seed}.safetensors"
        save_model(path, fold_run(prepared, last.round.tested or last.round.state))
        _send(model=str(path), sha256=sha256(path.read_bytes()).hexdigest())
    _send(result=replace_nan(asdict(result)))


def _send(**content: Any) -> None:
    print(MARK + json.dumps(content), flush=True)  # noqa: T201 (Flower carries it to the user)
