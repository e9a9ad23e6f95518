"""Loggers: rounds and evaluations for TensorBoard, Weights & Biases and MLflow.

Each is an extra, such as `pip install ".[tensorboard]"`. Every run of a comparison is a run
there, and one that was stopped continues there. What is logged: the training loss and the bytes of
each round, all numbers of an evaluation, and the diagnostics, if asked for.
"""

import hashlib
import importlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from math import isfinite
from pathlib import Path
from typing import Any, ClassVar

from fednorm.errors import ConfigError
from fednorm.experiment.callbacks.base import Callback, RunStart
from fednorm.experiment.results import Event, RunResult
from fednorm.registry import param


def list_scalars(event: Event) -> dict[str, float]:
    """Return the finite numbers of a round, by name.

    >>> list_scalars(Event("fbn", seed=0, round=1, train_loss=2.5))
    {'train_loss': 2.5, 'bytes_up': 0.0, 'bytes_down': 0.0, 'exchanges': 0.0}
    """
    found: dict[str, Any] = {"train_loss": event.train_loss}
    found |= {"bytes_up": event.bytes_up, "bytes_down": event.bytes_down}
    found |= {"exchanges": event.exchanges, **(event.diagnostics or {})}
    if event.evaluation is not None:
        found |= asdict(event.evaluation) | {"round": None}
    numbers = {k: float(v) for k, v in found.items() if isinstance(v, int | float)}
    return {key: number for key, number in numbers.items() if isfinite(number)}


class Logger(Callback):
    """Opens one log for each run, writes rounds into it, and closes it at the end."""

    observes: ClassVar[bool] = True
    package: ClassVar[str]  # that it needs
    name: ClassVar[str]  # also of the extra that installs it

    def __post_init__(self) -> None:
        self._open: dict[tuple[str, int], Any] = {}

    def open_log(self, start: RunStart, module: Any) -> Any:
        """Return the log of a run; `module` is the package."""
        raise NotImplementedError

    def write_round(self, log: Any, event: Event) -> None:
        """Write a round."""
        raise NotImplementedError

    def close_log(self, log: Any, result: RunResult) -> None:
        """Write how the run ended."""
        raise NotImplementedError

    def on_start(self, start: RunStart) -> None:
        """Open the log of a run."""
        try:
            module = importlib.import_module(self.package)
        except ModuleNotFoundError as error:
            raise ConfigError(
                f"callback {self.name!r} needs {error.name}, which is not installed; "
                f'in a checkout of fednorm: pip install ".[{self.name}]".'
            ) from error
        self._open[start.strategy, start.seed] = self.open_log(start, module)

    def on_round(self, event: Event) -> None:
        """Log a round."""
        self.write_round(self._open[event.strategy, event.seed], event)

    def on_end(self, result: RunResult) -> None:
        """Close the log of a run."""
        log = self._open.pop((result.strategy, result.seed), None)
        if log is not None:
            self.close_log(log, result)


@dataclass
class TensorBoard(Logger):
    """Writes event files for TensorBoard, into the folder of each run.

    `pip install ".[tensorboard]"` installs what it needs; `tensorboard --logdir results`
    shows all runs below that folder. A run that continues overwrites points after its last
    checkpoint.
    """

    package: ClassVar[str] = "torch.utils.tensorboard"
    name: ClassVar[str] = "tensorboard"

    folder: str = param("", "where event files go; the folder of the run, or runs, if not given")

    def open_log(self, start: RunStart, module: Any) -> Any:
        """Return a writer; what comes after the rounds before is overwritten."""
        place = start.folder / "tensorboard" if start.folder and not self.folder else None
        place = place or Path(self.folder or "runs", _name_run(start))
        return module.SummaryWriter(str(place), purge_step=start.done + 1 if start.done else None)

    def write_round(self, log: Any, event: Event) -> None:
        """Add a point to each curve."""
        for key, number in list_scalars(event).items():
            log.add_scalar(key, number, event.round)

    def close_log(self, log: Any, result: RunResult) -> None:
        """Write what is left."""
        log.add_text("status", _describe_end(result), result.rounds)
        log.close()


@dataclass
class WeightsAndBiases(Logger):
    """Logs to Weights & Biases; WANDB_MODE=offline keeps all on this machine.

    `pip install ".[wandb]"` installs what it needs. Each run is one there, in a group for the
    comparison, with its settings as config; `wandb sync` sends what was logged offline. A run that
    continues is continued there.
    """

    package: ClassVar[str] = "wandb"
    name: ClassVar[str] = "wandb"

    project: str = param("fednorm", "the project at Weights & Biases")
    entity: str | None = param(None, "the user or team; yours if not given")
    group: str | None = param(None, "joins the runs of a comparison; its folder if not given")

    def open_log(self, start: RunStart, module: Any) -> Any:
        """Return a run; several are open at the same time if several processes work."""
        identity = _identify(start)
        return module.init(
            project=self.project,
            entity=self.entity,
            group=self.group or (start.folder.parents[1].name if start.folder else None),
            name=_name_run(start),
            config={"strategy": start.strategy, "seed": start.seed, **start.settings},
            dir=str(start.folder) if start.folder else None,
            id=identity,
            resume="allow" if start.done else None,
            reinit="create_new",
        )

    def write_round(self, log: Any, event: Event) -> None:
        """Log a round as a step."""
        log.log(list_scalars(event), step=event.round)

    def close_log(self, log: Any, result: RunResult) -> None:
        """Log the result as the summary."""
        log.summary.update({"status": _describe_end(result), **_list_finals(result)})
        log.finish(exit_code=0 if result.status in _GOOD else 1)


@dataclass
class MLflow(Logger):
    """Logs to MLflow: to a server, or to files of this machine.

    `pip install ".[mlflow]"` installs what it needs. Each run is one there, with its settings
    as parameters; one that continues is found by a tag. `uri` is that of a server, of a database
    (`sqlite:///runs.db`, which needs SQLAlchemy), or a folder (`file:mlruns`), which newer versions
    of MLflow take with MLFLOW_ALLOW_FILE_STORE=true.
    """

    package: ClassVar[str] = "mlflow"
    name: ClassVar[str] = "mlflow"

    experiment: str = param("fednorm", "the experiment at MLflow")
    uri: str | None = param(None, "where MLflow stores runs; MLFLOW_TRACKING_URI if not given")

    def open_log(self, start: RunStart, module: Any) -> Any:
        """Return a client of MLflow with the number of the run there."""
        client, identity = module.MlflowClient(self.uri), _identify(start)
        found = client.get_experiment_by_name(self.experiment)
        place = found.experiment_id if found else client.create_experiment(self.experiment)
        if identity and start.done:
            kept = client.search_runs([place], f"tags.`fednorm.run` = '{identity}'", max_results=1)
            for run in kept:
                client.update_run(run.info.run_id, status="RUNNING")
                return client, run.info.run_id
        tags = {"fednorm.run": identity} if identity else {}
        run = client.create_run(place, tags=tags, run_name=_name_run(start))
        settings = {"strategy": start.strategy, "seed": start.seed, **start.settings}
        for key, value in _flatten(settings):
            client.log_param(run.info.run_id, key, str(value)[:_LONGEST])
        return client, run.info.run_id

    def write_round(self, log: Any, event: Event) -> None:
        """Log a round as a step."""
        client, number = log
        for key, value in list_scalars(event).items():
            client.log_metric(number, key, value, step=event.round)

    def close_log(self, log: Any, result: RunResult) -> None:
        """Log how the run ended."""
        client, number = log
        client.set_tag(number, "fednorm.status", _describe_end(result))
        ended = {"diverged": "FAILED", "interrupted": "KILLED", "stopped": "KILLED"}
        client.set_terminated(number, ended.get(result.status, "FINISHED"))


_GOOD = {"finished", "stopped early"}
_LONGEST = 500  # characters of a parameter at MLflow
_DIGITS = 16  # of a run's identity


def _name_run(start: RunStart) -> str:
    """Return the name of a run: that of its folder, or one like it."""
    return start.folder.name if start.folder else f"{start.strategy}-seed{start.seed}"


def _identify(start: RunStart) -> str | None:
    """Return what is the same for all parts of a run, if it has a folder to continue in."""
    if start.folder is None:
        return None
    return hashlib.sha256(str(start.folder.resolve()).encode()).hexdigest()[:_DIGITS]


def _describe_end(result: RunResult) -> str:
    why = f" by {result.stopped_by}" if result.stopped_by else ""
    return f"{result.status}{why} after round {result.rounds}"


def _list_finals(result: RunResult) -> dict[str, float]:
    numbers = asdict(result.final) if result.final else {}
    return {key: value for key, value in numbers.items() if isinstance(value, float)}


def _flatten(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in settings.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{key}.")
        elif key != "strategies":  # of which this run is one
            yield f"{prefix}{key}", value
