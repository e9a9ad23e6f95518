"""`fednorm doctor`."""

from pathlib import Path
from typing import Annotated, Any

import typer

from fednorm.cli.options import Set, console, take_settings
from fednorm.experiment.load import override_settings

_OPTIONS = (
    "model",
    "data",
    "partition",
    "clients",
    "participation",
    "batch_size",
    "batches",
    "evaluate",
)


@take_settings(
    _OPTIONS,
    {
        "data": "measure the clients on this data; see `fednorm list data`",
        "evaluate": "'clients' if each client is tested on its own data",
    },
)
def doctor(  # noqa: PLR0913 (each option is one choice)
    given: dict[str, Any],
    *,
    model: Annotated[str, typer.Argument(help="a model's name, or package.module:function")],
    batches: Annotated[int, typer.Option(help="batches of each client that are measured")] = 4,
    shape: Annotated[str | None, typer.Option(help="of a sample, without data: 3,32,32")] = None,
    classes: Annotated[int | None, typer.Option(min=1, help="how many, without data")] = None,
    seed: Annotated[int, typer.Option(help="of data, partition and initial weights")] = 0,
    settings: Set = None,
    json: Annotated[
        str | None, typer.Option(metavar="FILE", help="write the report as JSON; - prints it")
    ] = None,
) -> None:
    """Measure what happens to a model in federated learning.

    For example:

    - `fednorm doctor resnet`

    - `fednorm doctor resnet --data digits --partition dirichlet=0.1 --clients 20`

    - `fednorm doctor mine.models:net --shape 3,32,32 --json report.json`
    """
    from fednorm.doctor import examine, read_shape, save
    from fednorm.doctor import show as show_report

    values = override_settings({"model": model, **given}, settings or [])
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
