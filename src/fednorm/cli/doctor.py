"""`fednorm doctor`."""

from pathlib import Path
from typing import Annotated

import typer

from fednorm.cli.options import Set, console, option_help
from fednorm.doctor import examine, read_shape, save
from fednorm.doctor import show as show_report
from fednorm.experiment.config import Experiment
from fednorm.experiment.load import override_settings


def doctor(  # noqa: PLR0913, PLR0917 (most options are keys of the schema)
    model: Annotated[str, typer.Argument(help="a model's name, or package.module:function")],
    data: Annotated[
        str | None, typer.Option(help="measure the clients on this data; see `fednorm list data`")
    ] = None,
    partition: Annotated[str | None, typer.Option(help=option_help("partition"))] = None,
    clients: Annotated[int | None, typer.Option(help=option_help("clients"))] = None,
    participation: Annotated[float | None, typer.Option(help=option_help("participation"))] = None,
    batch_size: Annotated[int | None, typer.Option(help=option_help("batch_size"))] = None,
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
    values = override_settings(given, settings or [])
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
