"""`fednorm doctor`, which examines a model, and `fednorm check`, which examines your class."""

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
    complete_key,
    list_overrides,
    take_settings,
)
from fednorm.cli.terminal import catch_interrupts, console, errors
from fednorm.experiment.schema.load import override_settings

if TYPE_CHECKING:
    from collections.abc import Callable

    from fednorm.experiment.results import Event


_OPTIONS = (
    *("model", "data", "data_dir", "partition", "clients", "participation", "algorithm", "lr"),
    *("momentum", "rounds", "batch_size", "local_steps", "local_epochs", "budget", "batches"),
    *("device", "threads"),
)


@take_settings(_OPTIONS, {"data": "race and measure on this data; see `fednorm list data`"})
def doctor(  # noqa: PLR0913 (each option is one choice)
    given: dict[str, Any],
    *,
    model: Annotated[
        str,
        typer.Argument(
            help="a model's name, or package.module:function", autocompletion=complete_key("model")
        ),
    ],
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
    from fednorm.doctor import examine, read_budget, read_shape, save
    from fednorm.doctor import show as show_report
    from fednorm.experiment.callbacks.base import Monitor

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
def _show_race(seconds: float | None) -> "Iterator[Callable[[Event], None]]":
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


_KINDS = ("strategy", "algorithm", "aggregator", "pre-aggregation", "attack", "partition", "model")


def check(
    name: Annotated[
        str, typer.Argument(help="module:Class, with fields in brackets if it needs some")
    ],
    kind: Annotated[
        str | None,
        typer.Option(
            help=f"one of {', '.join(_KINDS)}, loss, metric [what the class derives from]",
            autocompletion=lambda incomplete: [k for k in _KINDS if k.startswith(incomplete)],
        ),
    ] = None,
    *,
    fast: Annotated[bool, typer.Option("--fast", help="start no worker processes")] = False,
) -> None:
    """Check whether a class of yours keeps the rules that fednorm's own keep.

    It trains on tiny clients, a few seconds long, and prints a line for each promise: ✓ if it is
    kept, ✗ with what is wrong and what to do. The exit code is 1 if one is broken. The file may be
    in the current directory; nothing needs to be installed.

    - `fednorm check mine:Mine`

    - `fednorm check "mine:Mine(alpha=0.5)"`

    - `fednorm check "mine:Split=0.3" --kind partition`

    - `fednorm check mine:focal --kind loss`

    A strategy is checked for: a round that is a pure function, a role for every tensor, strict
    loading, evaluation that depends on no other sample, engines that agree, export, and resumption.
    An aggregator: its result does not depend on the order of clients, and f Byzantine ones cannot
    move it far. A partition: every sample has one client, and the seed alone decides. See
    docs/plugins.md.
    """
    from fednorm.contract import examine_plugin, guess_kind
    from fednorm.report.format import Column, make_table

    kind = {"data": "data set"}.get(kind or "", kind) or guess_kind(name)
    findings = list(examine_plugin(name, kind, fast=fast))
    rows = [["✗" if one.problem else "✓", one.promise, one.problem] for one in findings]
    columns = [Column(""), Column("promise", wraps=True), Column("what is wrong", wraps=True)]
    console.print(make_table(columns, rows, title=f"{kind} {name}", ruled=False))
    broken = sum(bool(one.problem) for one in findings)
    if broken:
        console.print(f"{broken} of {len(findings)} promises are broken.")
        raise typer.Exit(1)
    console.print(f"All {len(findings)} promises are kept.")
