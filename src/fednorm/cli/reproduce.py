"""`fednorm reproduce` and `fednorm ring`."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from fednorm.cli.options import (
    Fresh,
    Set,
    Workers,
    default_workers,
    exit_if_interrupted,
    option_help,
    prefetch,
)
from fednorm.cli.terminal import catch_interrupts, console, errors
from fednorm.errors import ConfigError
from fednorm.experiment.schema.config import Experiment
from fednorm.report.format import Column, make_table
from fednorm.reproduce.figure import SCALES, Scale, list_figures

if TYPE_CHECKING:
    from fednorm.experiment.callbacks.base import Monitor
    from fednorm.reproduce.run_figure import FigureRequest


def reproduce(  # noqa: PLR0913, PLR0917 (each option is one choice)
    name: Annotated[
        str | None,
        typer.Argument(
            help="a table or figure that --list shows",
            autocompletion=lambda incomplete: [
                f for f in list_figures() if f.startswith(incomplete)
            ],
        ),
    ] = None,
    scale: Annotated[
        Scale, typer.Option(help="; ".join(f"{key}: {text}" for key, text in SCALES.items()))
    ] = "short",
    rounds: Annotated[
        int | None,
        typer.Option(min=1, help="rounds of every run; schedules and freezing rounds follow"),
    ] = None,
    panels: Annotated[
        list[str] | None,
        typer.Option("--panel", help="run this panel only; more than once for several"),
    ] = None,
    settings: Set = None,
    data_dir: Annotated[Path | None, typer.Option(help="folder with your copy of the data")] = None,
    device: Annotated[str | None, typer.Option(help=option_help("device"))] = None,
    partition: Annotated[
        str | None,
        typer.Option(help="another partition; a name alone keeps the value of each panel"),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="folder [default: results/NAME-SCALE-SETTINGS]")
    ] = None,
    workers: Workers = None,
    fresh: Fresh = False,
    listed: Annotated[
        bool, typer.Option("--list", help="list the tables and figures, and stop")
    ] = False,
) -> None:
    """Run a published table or figure and compare our numbers with the published ones.

    Called again, it continues where it stopped: finished runs are not repeated.

    For example:

    - `fednorm reproduce --list`

    - `fednorm reproduce fbn-fig3`

    - `fednorm reproduce fixbn-table1 --scale full --device cuda`

    - `fednorm reproduce fbn-fig3 --scale full --rounds 1000 --panel "γ = 0"`

    - `fednorm reproduce fbn-fig5 --partition dirichlet_unbalanced`
    """
    if listed or name is None:
        console.print(_list_known())
        return
    from fednorm.experiment.run_folder import RESULTS, name_folder
    from fednorm.reproduce.figure import find_figure
    from fednorm.reproduce.run_figure import FigureRequest

    figure = find_figure(name)
    length = [f"rounds={rounds}"] if rounds else []
    changed = [*([partition] if partition else []), *length, *(panels or []), *(settings or [])]
    folder = out or RESULTS / name_folder("-".join([Path(name).stem, scale, *changed]))
    if figure.ring is not None:
        if settings or panels or partition:
            raise ConfigError(f"{name} trains nothing; it takes --rounds and --out only.")
        ring(out=folder, rounds=rounds or figure.ring.get("rounds", 100), seed=0)
        return
    given = {"data.root": data_dir, "device": device, "partition": partition}
    chosen = [f"{key}={value}" for key, value in given.items() if value is not None]
    request = FigureRequest(name, scale, [*chosen, *length, *(settings or [])], panels or ())
    run_panels(request, folder, workers, fresh=fresh)


def run_panels(
    request: "FigureRequest", folder: Path, workers: int | None, *, fresh: bool = False
) -> None:
    """Run all panels; the report grows with each of them."""
    from fednorm.experiment.run_folder import clear_folder, link_latest
    from fednorm.report.tables import build_figure_table
    from fednorm.report.write import write_figure
    from fednorm.reproduce.run_figure import reproduce as run_figure

    if fresh:
        for panel in folder.glob("*/config.toml"):
            clear_folder(panel.parent)
    experiments = [experiment for _, experiment in request.experiments]
    for experiment in {e.data.model_dump_json(): e for e in experiments}.values():
        prefetch(experiment)
    count = workers or default_workers(experiments[0])
    result = report = None
    for result in run_figure(request, folder, shown=_show_panel, workers=count):
        report = write_figure(result, folder)
        link_latest(folder)
    if result is None:
        raise ConfigError(f"{request.name} has no panels at the scale {request.scale!r}.")
    console.print(build_figure_table(result, console.width))
    for cut in result.cuts:
        console.print(f"- {cut}", highlight=False, markup=False)
    console.print(f"Report: {report}", soft_wrap=True, markup=False)
    exit_if_interrupted(run.status for panel in result.panels for run in panel.comparison.runs)


@contextmanager
def _show_panel(title: str, experiment: Experiment) -> Iterator["Monitor"]:
    from fednorm.experiment.callbacks.base import Monitor
    from fednorm.experiment.callbacks.progress import show_progress

    console.print(title, style="bold", markup=False)
    with show_progress(experiment, console, errors) as progress, catch_interrupts() as stop:
        yield Monitor([progress], stop)


def _list_known() -> Table:
    from fednorm.reproduce.figure import list_figures

    known = list_figures()
    if not known:
        raise ConfigError("there are no configs; install fednorm from its source tree or a wheel.")
    columns = [Column("name"), Column("title", wraps=True), Column("question", wraps=True)]
    rows = ([name, figure.title, figure.question] for name, figure in known.items())
    return make_table(columns, rows, ruled=False)


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
    from fednorm.reproduce.ring import build_ring_table, run_ring, write_ring

    result = run_ring(rounds, seed)
    paths = write_ring(result, out)
    console.print(build_ring_table(result))
    console.print(f"Written: {', '.join(str(path) for path in paths)}", soft_wrap=True)
