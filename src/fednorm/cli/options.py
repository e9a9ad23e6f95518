"""Options that several commands share, made from the schema of an experiment."""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, TypeAlias, get_args, get_origin

import typer

from fednorm.cli.listing import KINDS, find_argument, read_fields, select_start
from fednorm.cli.terminal import errors
from fednorm.errors import ConfigError, FednormError
from fednorm.experiment.schema.config import Experiment
from fednorm.registry import Registry
from fednorm.system import count_cores

INTERRUPTED = 130

Complete: TypeAlias = Callable[[str], list[str]]  # offers on TAB what fits what was typed


def complete_key(key: str) -> Complete:
    """Return what completes the value of a key of the experiment.

    >>> complete_key("strategies")("gn,fixb"), complete_key("attack_target")("s")
    (['gn,fixbn'], ['statistics'])
    """

    def complete(incomplete: str) -> list[str]:
        return complete_words(*list_values(key))(incomplete)

    return complete


def list_values(key: str) -> list[str]:
    """Return the values of a key that have names.

    >>> list_values("partition")[:2]
    ['iid', 'gamma=']
    """
    kind = {"statistics_aggregator": "aggregators"}.get(key, key)
    kind = next((name for name in (kind, f"{kind}s", f"{kind}es") if name in KINDS), kind)
    registry = KINDS.get(kind, Registry(kind, "", {}))
    if key == "partition":
        own = [f"{name}=" if find_argument(name) else name for name in registry]
        return [*own, *registry.list_plugins()]
    if key == "device":
        return ["auto", "cpu", "cuda"]
    field = Experiment.model_fields.get(key)
    words = get_args(field.annotation) if field else ()
    if kind in KINDS:
        return registry.list_names()
    return [word for word in words if isinstance(word, str)]


def complete_setting(incomplete: str) -> list[str]:
    """Complete the key of `--set` and `--sweep`, a field of its table, or its value.

    >>> complete_setting("unseen_c"), complete_setting("algorithm.server_l")
    (['unseen_clients='], ['algorithm.server_lr='])
    >>> complete_setting("partition=iid,dirichlet_")
    ['partition=iid,dirichlet_unbalanced=']
    """
    key, assigned, value = incomplete.partition("=")
    if assigned:
        return [f"{key}={found}" for found in complete_key(key)(value)]
    table, dot, _ = incomplete.partition(".")
    if not dot:
        return select_start((f"{key}=" for key in Experiment.model_fields), incomplete)
    kind = {"strategy": "strategies"}.get(table, f"{table}s" if f"{table}s" in KINDS else table)
    known = KINDS.get(kind)
    places = [known.locate(name) for name in known] if known else []
    fields = (field.name for place in places for field in read_fields(*place))
    return select_start(dict.fromkeys(f"{table}.{field}=" for field in fields), incomplete)


def complete_words(*words: str) -> Complete:
    """Return what completes one or several of some words, with commas between.

    >>> complete_words("csv", "pdf", "png")("csv,p")
    ['csv,pdf', 'csv,png']
    """

    def complete(incomplete: str) -> list[str]:
        before, comma, last = incomplete.rpartition(",")
        return [f"{before}{comma}{word}" for word in select_start(words, last)]

    return complete


Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="any key of `fednorm list keys`, or table.key",
        autocompletion=complete_setting,
    ),
]
Out = Annotated[Path | None, typer.Option(help="folder of the results [below results/]")]
Fresh = Annotated[bool, typer.Option("--fresh", help="repeat runs that the folder already holds")]
Resume = Annotated[bool, typer.Option(help="continue runs that were stopped, or start over")]
CheckpointEvery = Annotated[
    int | None, typer.Option(min=1, help="rounds between checkpoints [every 10 seconds]")
]
Callbacks = Annotated[
    list[str] | None,
    typer.Option(
        "--callback",
        metavar="NAME",
        help="follows the runs: early_stopping(patience=5), or module:Class",
        autocompletion=complete_key("callbacks"),
    ),
]
KeepState = Annotated[
    bool, typer.Option("--keep-state", help="keep last states over 100 MB too, for run --extend")
]
DataDir = Annotated[Path | None, typer.Option(help="folder with your copy of the data")]
LearningRate = Annotated[float | None, typer.Option(help="learning rate [0.05]")]
Momentum = Annotated[float | None, typer.Option(help="momentum of the optimizer [0.9]")]
Workers = Annotated[int | None, typer.Option(min=1, help="processes [all cores]")]


def option_help(key: str) -> str:
    """Return the schema's description of a key up to the first semicolon, with its default.

    >>> option_help("byzantine")
    'number of Byzantine clients [0]'
    """
    shown = {"strategies": "centralized,naive,fixbn,fbn,gn", "algorithm": "dsgd"}
    default = shown.get(key, Experiment.model_fields[key].default)
    short = str(Experiment.model_fields[key].description).partition(";")[0]
    if default is None or default is False or default == []:
        return short
    return f"{short} [{default:g}]" if isinstance(default, float) else f"{short} [{default}]"


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
    plain = (kind for kind in (bool, int, float) if kind in types)
    kind: Any = str if get_origin(annotation) is list else next(plain, str)
    help_ = text or option_help(key)
    flag = typer.Option(f"--{key}", help=help_, show_default=False)
    value = typer.Option(help=help_, autocompletion=complete_key(key) if kind is str else None)
    option = flag if kind is bool else value
    return inspect.Parameter(
        key, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, option]
    )


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
