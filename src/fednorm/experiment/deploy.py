"""An experiment as a Flower app: what a SuperLink runs; what SuperNodes run is in `flower.py`.

The ServerApp makes the runs of the experiment one after the other with the nodes that are there,
and says in lines of its log, as JSON, what came out; `submit.py` reads them. A trained model stays
on the SuperLink's machine.
"""

import json
import os
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fednorm.core.task import export
from fednorm.engines.simulate import Round
from fednorm.experiment import checkpoint
from fednorm.experiment.config import Experiment
from fednorm.experiment.entry import StrategyEntry
from fednorm.experiment.flower import given
from fednorm.experiment.load import ConfigError
from fednorm.experiment.prepare import Prepared, prepare
from fednorm.experiment.result import without_nan
from fednorm.experiment.run import Event, run
from fednorm.experiment.tally import Tally
from fednorm.system import limit_threads

MARK = "fednorm> "  # begins a line that is meant for the one who submitted the run


server = ServerApp()


@server.main()
def main(grid: Grid, context: Context) -> None:
    """Make all runs of the experiment."""
    experiment = Experiment.model_validate_json(str(context.run_config["experiment"]))
    folder = Path(os.environ.get("FLWR_HOME", "~/.flwr")).expanduser() / "fednorm"
    for entry in experiment.strategies:
        for seed in experiment.seeds:
            _make(experiment, entry, seed, grid, folder / str(context.run_id))


def _make(
    experiment: Experiment, entry: StrategyEntry, seed: int, grid: Grid, folder: Path
) -> None:
    last = _Last()
    try:
        with limit_threads(experiment.threads):
            prepared = prepare(experiment, entry, seed)
            if prepared.remote:
                prepared.remote.open = given(grid)
            result = run(prepared, _tell, saves=last)
    except (ConfigError, OSError) as error:
        _say(error=str(error))
        raise
    if last.round:
        _keep_model(prepared, last.round, folder / f"{entry.folder}-seed{seed}.safetensors")
    _say(result=without_nan(asdict(result)))


@dataclass
class _Last:
    """Holds the last round instead of saving it."""

    round: Round | None = None

    def after(self, result: Round, tally: Tally) -> None:
        del tally
        self.round = result

    def save(self, result: Round, tally: Tally) -> None:
        self.after(result, tally)


def _keep_model(prepared: Prepared, result: Round, path: Path) -> None:
    model = export(prepared.task, result.tested or result.state).state_dict()
    personal = prepared.task.layout.personal
    path.parent.mkdir(parents=True, exist_ok=True)
    checkpoint.save_model(path, {k: v for k, v in model.items() if k not in personal})
    _say(model=str(path), sha256=sha256(path.read_bytes()).hexdigest())


def _tell(event: Event) -> None:
    _say(event=without_nan(asdict(event)))


def _say(**content: Any) -> None:
    print(MARK + json.dumps(content), flush=True)  # noqa: T201 (Flower carries it to the user)
