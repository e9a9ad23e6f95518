"""Options that several commands share, their help taken from the schema of an experiment."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from fednorm.engines.allocator import keep_memory
from fednorm.experiment.config import Experiment
from fednorm.experiment.load import ConfigError
from fednorm.experiment.prepare import loaded
from fednorm.system import count_cores

console = Console()
errors = Console(stderr=True)

INTERRUPTED = 130

Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="override any key, e.g. strategy.momentum=0.05"
    ),
]
Out = Annotated[Path, typer.Option(help="folder for results.json, curves.png, report.html, runs/")]
Fresh = Annotated[bool, typer.Option("--fresh", help="repeat runs that the folder already holds")]
Resume = Annotated[
    bool, typer.Option(help="go on from the last checkpoint of a run that was stopped or killed")
]
CheckpointEvery = Annotated[
    int | None, typer.Option(min=1, help="rounds between checkpoints [default: every 10 seconds]")
]
Workers = Annotated[
    int | None,
    typer.Option(min=1, help="processes for runs, or for clients [default: all cores]"),
]


def described(key: str) -> str:
    """Return what the schema says of a key, with its default."""
    shown = {"strategies": "centralized,naive,fixbn,fbn,gn", "algorithm": "dsgd", "device": "cpu"}
    default = shown.get(key, Experiment.model_fields[key].default)
    known = f"; see `fednorm list {_LISTED[key]}`" if key in _LISTED else ""
    end = "" if default is None else f" [default: {default}]"
    return f"{Experiment.model_fields[key].description}{known}{end}"


_LISTED = {
    "strategies": "strategies",
    "data": "data",
    "model": "models",
    "partition": "partitions",
    "algorithm": "algorithms",
    "attack": "attacks",
    "aggregate": "aggregators",
    "aggregate_statistics": "aggregators",
}


def default_workers(experiment: Experiment) -> int:
    """Return how many runs go on at once: one for each core, unless one run takes them all."""
    alone = experiment.device != "cpu" or experiment.engine in ("workers", "flower")
    return 1 if alone else max(1, count_cores() // experiment.threads)


def prefetch(experiment: Experiment) -> None:
    """Get the data before the live view of the runs: a download has a bar of its own."""
    keep_memory()
    try:
        loaded(experiment, experiment.seeds[0])
    except (ValueError, TypeError) as error:
        raise ConfigError(f"data set {experiment.data.name!r}: {error}") from error
