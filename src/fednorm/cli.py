"""The command line: reads options, calls the library, prints. No logic of its own."""

import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from fednorm import catalogue
from fednorm.core.registry import UnknownNameError
from fednorm.doctor import examine, read_shape, save
from fednorm.doctor import show as show_report
from fednorm.experiment.compare import run_all
from fednorm.experiment.config import Experiment
from fednorm.experiment.environment import cores
from fednorm.experiment.interrupt import between_rounds
from fednorm.experiment.load import ConfigError, build, override, read, sweep
from fednorm.experiment.record import clear
from fednorm.experiment.ring import ring as on_the_ring
from fednorm.report import table, write
from fednorm.report.progress import progress
from fednorm.report.ring import ring_table, write_ring

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_show_locals=False,
    help="Normalization layers that are right in federated learning.\n\n"
    "Try `fednorm compare`: it shows in a minute, on embedded data, why BatchNorm breaks in "
    "federated learning and which strategies mend it.",
)
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
Workers = Annotated[
    int | None, typer.Option(min=1, help="runs at once, each a process [default: all cores]")
]


def _help(key: str) -> str:
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
}


@app.command()
def compare(  # noqa: PLR0913, PLR0917 (each option is one key of the schema)
    strategies: Annotated[str | None, typer.Option(help=_help("strategies"))] = None,
    data: Annotated[str | None, typer.Option(help=_help("data"))] = None,
    model: Annotated[str | None, typer.Option(help=_help("model"))] = None,
    partition: Annotated[str | None, typer.Option(help=_help("partition"))] = None,
    clients: Annotated[int | None, typer.Option(help=_help("clients"))] = None,
    participation: Annotated[float | None, typer.Option(help=_help("participation"))] = None,
    algorithm: Annotated[str | None, typer.Option(help=_help("algorithm"))] = None,
    lr: Annotated[float | None, typer.Option(help="learning rate [default: 0.05]")] = None,
    momentum: Annotated[
        float | None, typer.Option(help="momentum of the optimiser [default: 0.9]")
    ] = None,
    rounds: Annotated[int | None, typer.Option(help=_help("rounds"))] = None,
    batch: Annotated[int | None, typer.Option(help=_help("batch"))] = None,
    steps: Annotated[int | None, typer.Option(help=_help("steps"))] = None,
    epochs: Annotated[int | None, typer.Option(help=_help("epochs"))] = None,
    seeds: Annotated[
        str | None, typer.Option(help="how many seeds, or a list such as 0,7 [default: 3]")
    ] = None,
    eval_every: Annotated[int | None, typer.Option(help=_help("eval_every"))] = None,
    evaluate: Annotated[str | None, typer.Option(help=_help("evaluate"))] = None,
    diagnose: Annotated[
        bool | None, typer.Option("--diagnose", help=_help("diagnose"), show_default=False)
    ] = None,
    device: Annotated[str | None, typer.Option(help=_help("device"))] = None,
    threads: Annotated[int | None, typer.Option(help=_help("threads"))] = None,
    config: Annotated[Path | None, typer.Option(help="TOML file to start from")] = None,
    settings: Set = None,
    swept: Annotated[
        str | None,
        typer.Option("--sweep", help="several values of a field, e.g. strategy.momentum=0.1,none"),
    ] = None,
    out: Out = Path("results/compare"),
    workers: Workers = None,
    fresh: Fresh = False,
) -> None:
    """Run strategies side by side and write a table, a plot and a report.

    Without options: 8×8 digits, 10 clients with one digit each, 600 rounds, 3 seeds.

    For example:

    - `fednorm compare --strategies centralized,naive,fbn --partition dirichlet=0.1`

    - `fednorm compare --model resnet --algorithm fedavg --steps 5 --rounds 100 --clients 20`

    - `fednorm compare --config mine.toml --set algorithm.lr=0.1`
    """
    options = {key: value for key, value in locals().items() if key in Experiment.model_fields}
    given = {key: value for key, value in options.items() if value is not None}
    # A flag changes only what it names: another algorithm keeps learning rate and momentum.
    parts = {"name": given.pop("algorithm", None), "lr": lr, "momentum": momentum}
    extra = [f"algorithm.{key}={value}" for key, value in parts.items() if value is not None]
    values = {**(read(config) if config else {}), **given}
    values = override(values, [*extra, *(settings or [])])
    _run(sweep(values, swept) if swept else values, out, workers, fresh=fresh)


@app.command()
def run(
    config: Annotated[Path, typer.Argument(help="TOML file that describes the experiment")],
    settings: Set = None,
    out: Annotated[Path | None, typer.Option(help="folder [default: results/NAME]")] = None,
    workers: Workers = None,
    fresh: Fresh = False,
) -> None:
    """Run an experiment from a TOML file, as `compare` writes it beside its results.

    Example: `fednorm run results/compare/config.toml --set rounds=100 --out results/short`
    """
    folder = out or Path("results") / config.stem
    _run(override(read(config), settings or []), folder, workers, fresh=fresh)


def _run(values: dict[str, Any], out: Path, workers: int | None, *, fresh: bool) -> None:
    experiment = build(values)
    if fresh:
        clear(out)
    with progress(experiment, console) as show_round, between_rounds(show_round) as on_round:
        comparison = run_all(
            experiment,
            folder=out,
            on_round=on_round,
            workers=workers or _workers(experiment),
        )
    report = write(comparison, out)
    console.print(table(comparison))
    console.print(f"Report: {report}", soft_wrap=True)
    if any(result.status == "interrupted" for result in comparison.runs):
        errors.print("Interrupted; what was finished is kept, and the same command goes on.")
        raise typer.Exit(INTERRUPTED)


def _workers(experiment: Experiment) -> int:
    return max(1, cores() // experiment.threads) if experiment.device == "cpu" else 1


@app.command()
def ring(
    out: Annotated[
        Path, typer.Option(help="folder for ring.json, figure1.png, figure2.png")
    ] = Path("results/ring"),
    rounds: Annotated[int, typer.Option(min=2, help="rounds of normalization")] = 100,
    seed: Annotated[int, typer.Option(min=0, help="seed of the points")] = 0,
) -> None:
    """Draw Figures 1 and 2 of the paper on FBN: points on a ring under one layer.

    Ten clients, one class each; how far from centralized BatchNorm does each method normalise?
    """
    result = on_the_ring(rounds, seed)
    paths = write_ring(result, out)
    console.print(ring_table(result))
    console.print(f"Written: {', '.join(str(path) for path in paths)}", soft_wrap=True)


@app.command()
def doctor(  # noqa: PLR0913, PLR0917 (most options are keys of the schema)
    model: Annotated[str, typer.Argument(help="a model's name, or package.module:function")],
    data: Annotated[
        str | None, typer.Option(help="measure the clients on this data; see `fednorm list data`")
    ] = None,
    partition: Annotated[str | None, typer.Option(help=_help("partition"))] = None,
    clients: Annotated[int | None, typer.Option(help=_help("clients"))] = None,
    participation: Annotated[float | None, typer.Option(help=_help("participation"))] = None,
    batch: Annotated[int | None, typer.Option(help=_help("batch"))] = None,
    batches: Annotated[int, typer.Option(help="batches of each client that are measured")] = 4,
    evaluate: Annotated[
        str | None, typer.Option(help="'clients' if each client is tested on its own data")
    ] = None,
    shape: Annotated[str | None, typer.Option(help="of a sample, without data: 3,32,32")] = None,
    classes: Annotated[int | None, typer.Option(min=1, help="how many, without data")] = None,
    seed: Annotated[int, typer.Option(help="of data, partition and initial weights")] = 0,
    settings: Set = None,
    json: Annotated[
        str | None, typer.Option(metavar="FILE", help="write the report as JSON; - prints it")
    ] = None,
) -> None:
    """Tell in numbers what will happen to a model in federated learning.

    For example:

    - `fednorm doctor resnet`

    - `fednorm doctor resnet --data digits --partition dirichlet=0.1 --clients 20`

    - `fednorm doctor mine.models:net --shape 3,32,32 --json report.json`
    """
    options = {key: value for key, value in locals().items() if key in Experiment.model_fields}
    given = {key: value for key, value in options.items() if value is not None}
    values = override(given, settings or [])
    report = examine(
        values.pop("model"),
        shape=read_shape(shape) if shape else None,
        classes=classes,
        batches=batches,
        seed=seed,
        **values,
    )
    if json == "-":
        typer.echo(report.to_json())
        return
    console.print(show_report(report))
    if json:
        save(report, Path(json))


@app.command("list")
def list_(
    kind: Annotated[
        str | None, typer.Argument(help=f"one of {', '.join(catalogue.KINDS)}; all if not given")
    ] = None,
) -> None:
    """List what can be chosen: strategies, algorithms, partitions, data sets and models."""
    for name in [catalogue.kind(kind)] if kind else list(catalogue.KINDS):
        console.print(catalogue.listing(name))


@app.command()
def show(
    kind: Annotated[str, typer.Argument(help=f"one of {', '.join(catalogue.KINDS)}")],
    name: Annotated[str, typer.Argument(help="a name that `fednorm list` shows")],
) -> None:
    """Show what a method does, its paper and its parameters.

    Example: `fednorm show strategy fbn`
    """
    console.print(catalogue.description(catalogue.kind(kind), name))


def main() -> None:
    """Run the command line; a mistake of the user's gets a message, not a traceback."""
    try:
        app()
    except (ConfigError, UnknownNameError, OSError) as error:
        errors.print(f"[bold red]Error:[/] {error}", markup=True, highlight=False, soft_wrap=True)
        sys.exit(2)
    except KeyboardInterrupt:
        errors.print("Interrupted before the first run; nothing was written.")
        sys.exit(INTERRUPTED)
