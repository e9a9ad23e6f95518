"""Options that several commands share, made from the schema of an experiment."""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, get_args

import typer
from click.exceptions import NoSuchOption
from rich.console import Console
from typer.core import TyperCommand

from fednorm.errors import ConfigError, FednormError
from fednorm.experiment.schema.config import Experiment
from fednorm.registry import RENAMED
from fednorm.system import count_cores

console = Console()
errors = Console(stderr=True)

INTERRUPTED = 130

Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="override any key, e.g. strategy.stats_momentum=0.05"
    ),
]
Out = Annotated[
    Path | None,
    typer.Option(
        help="folder for report.html, results.json, curves.png, runs/ "
        "[default: below results/, named after the settings]"
    ),
]
Fresh = Annotated[bool, typer.Option("--fresh", help="repeat runs that the folder already holds")]
Resume = Annotated[
    bool, typer.Option(help="continue stopped or killed runs from their last checkpoint")
]
CheckpointEvery = Annotated[
    int | None, typer.Option(min=1, help="rounds between checkpoints [default: every 10 seconds]")
]
DataDir = Annotated[
    Path | None, typer.Option(help="folder that holds your copy of the data; see `data get`")
]
LearningRate = Annotated[float | None, typer.Option(help="learning rate [default: 0.05]")]
Momentum = Annotated[float | None, typer.Option(help="momentum of the optimizer [default: 0.9]")]
Workers = Annotated[
    int | None, typer.Option(min=1, help="processes for runs, or for clients [default: all cores]")
]

_LISTED = {key: f"{key}s" for key in ("model", "partition", "algorithm", "attack", "aggregator")}
_LISTED |= {"strategies": "strategies", "data": "data", "statistics_aggregator": "aggregators"}


def option_help(key: str) -> str:
    """Return the schema's description of a key, with its default."""
    shown = {"strategies": "centralized,naive,fixbn,fbn,gn", "algorithm": "dsgd"}
    default = shown.get(key, Experiment.model_fields[key].default)
    known = f"; see `fednorm list {_LISTED[key]}`" if key in _LISTED else ""
    end = "" if default is None else f" [default: {default}]"
    return f"{Experiment.model_fields[key].description}{known}{end}"


def list_overrides(
    given: dict[str, Any], lr: float | None, momentum: float | None, data_dir: Path | None
) -> list[str]:
    """Take the algorithm out of the given keys; return it and other fields as `--set` would.

    A flag changes only what it names: another algorithm keeps learning rate and momentum.
    """
    parts = {"name": given.pop("algorithm", None), "lr": lr, "momentum": momentum}
    found = [f"algorithm.{key}={value}" for key, value in parts.items() if value is not None]
    return [*found, f"data.root={data_dir}"] if data_dir else found


def take_settings(
    order: Sequence[str], helps: Mapping[str, str] | None = None
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that gives a command an option for each key of the schema.

    The command gets the keys that the user sets in one dict, its first argument.

    Args:
        order: the keys; options that the command declares itself may stand among them.
        helps: help texts that differ from those of the schema.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        _, *declared = inspect.signature(command).parameters.values()
        own = {parameter.name: parameter for parameter in declared}
        names = [*order, *(name for name in own if name not in order)]
        keys = [name for name in names if name not in own]

        @wraps(command)
        def call(**options: Any) -> None:
            given = {key: options.pop(key) for key in keys}
            command({key: value for key, value in given.items() if value is not None}, **options)

        call.__signature__ = inspect.Signature(  # type: ignore[attr-defined]  # typer reads it
            [own.get(name) or _make_option(name, (helps or {}).get(name)) for name in names]
        )
        call.__annotations__ = {}
        return call

    return decorate


def _make_option(key: str, text: str | None) -> inspect.Parameter:
    """Return the option of a key: a number, a flag, or text that the schema reads."""
    annotation = Experiment.model_fields[key].annotation
    types = {annotation, *get_args(annotation)}
    kind: Any = next((kind for kind in (bool, int, float) if kind in types), str)
    help_ = text or option_help(key)
    flag = typer.Option(f"--{key}", help=help_, show_default=False)
    option = flag if kind is bool else typer.Option(help=help_)
    return inspect.Parameter(
        key, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, option]
    )


class Command(TyperCommand):
    """A command that tells the new name of an option that was renamed."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]  # typer's context is click's
        """Read the arguments."""
        try:
            return super().parse_args(ctx, args)
        except NoSuchOption as error:
            new = RENAMED.get(error.option_name.lstrip("-").replace("-", "_"), "")
            option = f"--{new.replace('_', '-')}"
            if not any(option in parameter.opts for parameter in self.params):
                raise
            text = f"option '{error.option_name}' is now called '{option}'."
            raise NoSuchOption(error.option_name, text, ctx=ctx) from None


def exit_if_interrupted(statuses: Iterable[str]) -> None:
    """End the command if a run was interrupted."""
    if "interrupted" in statuses:
        errors.print("Interrupted; finished runs are kept, and the same command continues.")
        raise typer.Exit(INTERRUPTED)


def default_workers(experiment: Experiment) -> int:
    """Return how many runs are made at once: one per core, unless one run takes them all."""
    alone = experiment.device != "cpu" or experiment.engine in ("processes", "flower")
    return 1 if alone else max(1, count_cores() // experiment.threads)


def prefetch(experiment: Experiment) -> None:
    """Load the data before the live view of the runs: a download shows its own bar."""
    from fednorm.experiment.build import load_data

    try:
        load_data(experiment, experiment.seeds[0])
    except FednormError:
        raise
    except (ValueError, TypeError) as error:
        raise ConfigError(f"data set {experiment.data.name!r}: {error}") from error
