"""`fednorm doctor`."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from fednorm.cli.options import (
    INTERRUPTED,
    DataDir,
    LearningRate,
    Momentum,
    Set,
    list_overrides,
    take_settings,
)
from fednorm.cli.terminal import console, errors
from fednorm.experiment.schema.load import override_settings

if TYPE_CHECKING:
    from fednorm.experiment.results import Event
    from fednorm.experiment.run import Callback

_OPTIONS = (
    *("model", "data", "data_dir", "partition", "clients", "participation", "algorithm", "lr"),
    *("momentum", "rounds", "batch_size", "local_steps", "local_epochs", "budget", "batches"),
    *("device", "threads"),
)


@take_settings(_OPTIONS, {"data": "race and measure on this data; see `fednorm list data`"})
def doctor(  # noqa: PLR0913 (each option is one choice)
    given: dict[str, Any],
    *,
    model: Annotated[str, typer.Argument(help="a model's name, or package.module:function")],
    data_dir: DataDir = None,
    lr: LearningRate = None,
    momentum: Momentum = None,
    budget: Annotated[
        str, typer.Option(help="of the race: 60s, 2m, 1h, or rounds (40r); 0 for none")
    ] = "60s",
    batches: Annotated[int, typer.Option(help="batches of each client that are measured")] = 4,
    shape: Annotated[str | None, typer.Option(help="of a sample, without data: 3,32,32")] = None,
    classes: Annotated[int | None, typer.Option(min=1, help="how many, without data")] = None,
    seed: Annotated[int, typer.Option(help="of data, partition and initial weights")] = 0,
    settings: Set = None,
    json: Annotated[
        str | None, typer.Option(metavar="FILE", help="write the report as JSON; - prints it")
    ] = None,
) -> None:
    """Recommend a strategy: race candidates in your setting, and measure model and clients.

    For example:

    - `fednorm doctor resnet --data digits --partition dirichlet=0.3 --algorithm fedavg \
      --local-epochs 1 --rounds 40`

    - `fednorm doctor resnet --data digits --partition gamma=0 --budget 5m --json report.json`

    - `fednorm doctor mine.models:net --shape 3,32,32`
    """
    from fednorm.cli.run_progress import catch_interrupts
    from fednorm.doctor import examine, read_budget, read_shape, save
    from fednorm.doctor import show as show_report
    from fednorm.experiment.run import Monitor

    limit = read_budget(budget)
    overrides = [*list_overrides(given, lr, momentum, data_dir), *(settings or [])]
    values = override_settings({"model": model, **given}, overrides)
    seconds = None if limit.rounds else limit.seconds
    with _show_race(seconds) as show_round, catch_interrupts() as stop:
        report = examine(
            values.pop("model"),
            shape=read_shape(shape) if shape else None,
            classes=classes,
            batches=batches,
            seed=seed,
            budget=limit,
            monitor=Monitor([show_round], stop),
            **values,
        )
    if json == "-":
        typer.echo(report.to_json())
    else:
        console.print(show_report(report), highlight=False)
    if json and json != "-":
        save(report, Path(json))
    if report.race and report.race.ended == "interrupted":
        raise typer.Exit(INTERRUPTED)


@contextmanager
def _show_race(seconds: float | None) -> "Iterator[Callback]":
    """Show how much of the budget the race has used, and who is running."""
    columns = (TextColumn("race"), BarColumn(), TextColumn("{task.description}"))
    bar = Progress(*columns, TimeElapsedColumn(), console=errors, transient=True)
    task = bar.add_task("preparing", total=seconds, start=False)
    begun: list[float] = []

    def on_round(event: "Event") -> None:
        if not begun:
            begun.append(perf_counter())
            bar.start_task(task)
        news = f"{event.strategy}, round {event.round}"
        if event.evaluation is not None:
            news += f", accuracy {event.evaluation.accuracy:.1%}"
        bar.update(task, description=news, completed=perf_counter() - begun[0])

    with bar:
        yield on_round
