"""`fednorm report` and `fednorm export`: what finished experiments hold, without running them."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from fednorm.cli.options import complete_words
from fednorm.cli.terminal import console, errors
from fednorm.errors import ConfigError

if TYPE_CHECKING:
    from fednorm.experiment.results import FigureResult

Folders = Annotated[
    list[Path], typer.Argument(help="folders of experiments, such as results/latest")
]
Together = Annotated[bool, typer.Option("--together", help="one panel, even if settings differ")]


def report(
    folders: Folders,
    out: Annotated[
        Path | None, typer.Option(help="folder of the report [FOLDER, or below results/]")
    ] = None,
    together: Together = False,
) -> None:
    """Write the report of a folder again, or one report of several folders.

    Experiments that differ in strategies and seeds alone become one table and one plot. Others
    become panels of one page, named after the settings in which they differ. Nothing is run.

    For example:

    - `fednorm report results/latest`

    - `fednorm report results/compare results/compare-iid --out results/skew`
    """
    from fednorm.report.tables import build_figure_table, build_table
    from fednorm.report.write import write_comparison, write_figure

    figure = _read(folders, together=together)
    target = out or _choose_target(folders, "report")
    if len(folders) > 1 and (target / "config.toml").exists():
        raise ConfigError(f"{str(target)!r} holds an experiment with its own report; choose --out.")
    alone = len(figure.panels) == 1 and not figure.title
    compared = figure.panels[0].comparison
    if alone and len(folders) == 1:
        page = write_comparison(compared, target)
    else:
        page = write_figure(figure, target)
    width = console.width
    console.print(build_table(compared, width) if alone else build_figure_table(figure, width))
    console.print(f"Report: {page}", soft_wrap=True, markup=False)


def export(  # noqa: PLR0913, PLR0917 (each option is one choice)
    folders: Folders,
    formats: Annotated[
        str,
        typer.Option(
            "--format",
            help="csv, latex, pdf, svg, png; several with commas",
            autocompletion=complete_words("csv", "latex", "pdf", "svg", "png"),
        ),
    ] = "csv,latex,pdf",
    columns: Annotated[
        Literal["one", "two"], typer.Option(help="width of figures: one 3.25 in, two 6.75 in")
    ] = "one",
    spread: Annotated[
        Literal["std", "ci95"],
        typer.Option(help="after ±: sample standard deviation, or 95 % confidence interval"),
    ] = "std",
    against: Annotated[
        str | None, typer.Option(help="strategy that others are compared with [naive if run]")
    ] = None,
    test: Annotated[
        Literal["t", "permutation", "none"],
        typer.Option(help="of differences, paired over seeds; Holm's correction"),
    ] = "t",
    out: Annotated[Path | None, typer.Option(help="folder of the files [export in FOLDER]")] = None,
    together: Together = False,
) -> None:
    """Write tables and figures for a paper.

    - csv: runs.csv has a row for each run, strategies.csv one for each strategy, unrounded

    - latex: table.tex is a booktabs table; its caption names setting, seeds, spread and test

    - pdf, svg, png: curves and final values; captions.txt says what they show

    For example:

    - `fednorm export results/latest`

    - `fednorm export results/latest --format pdf,png --columns two --spread ci95`

    - `fednorm export results/latest --format latex --against gn --test permutation`
    """
    from typing import cast

    from fednorm.experiment.summary.significance import TableSpec
    from fednorm.report.export import ExportRequest, Format, check_reference, export_figure

    names = tuple(dict.fromkeys(name.strip() for name in formats.split(",") if name.strip()))
    spec = TableSpec(spread, against, test)
    request = ExportRequest(cast("tuple[Format, ...]", names), columns, spec)
    figure = _read(folders, together=together)
    check_reference(figure, spec)
    target = out or _choose_target(folders, "export")
    for path in export_figure(figure, target, request):
        console.print(str(path), soft_wrap=True, markup=False, highlight=False)


def _read(folders: list[Path], *, together: bool) -> "FigureResult":
    """Load the folders, and warn of what they lack."""
    from fednorm.report.join import join_folders

    figure = join_folders(folders, together=together)
    runs = [run for panel in figure.panels for run in panel.comparison.runs]
    missing = [name for panel in figure.panels for name in panel.comparison.missing]
    if missing:
        errors.print(
            f"Warning: {len(missing)} of {len(missing) + len(runs)} runs are not finished and left "
            f"out: {', '.join(missing)}. `fednorm run FOLDER/config.toml --out FOLDER` makes them.",
            markup=False, highlight=False, soft_wrap=True,
        )  # fmt: skip
    if len({run.seed for run in runs}) == 1:
        errors.print(
            "Note: with one seed there is neither a spread nor a p value; --seeds 3 gives both.",
            markup=False, highlight=False, soft_wrap=True,
        )  # fmt: skip
    return figure


def _choose_target(folders: list[Path], kind: str) -> Path:
    """Return the folder itself, or its folder `export`; of several a new one below results."""
    from fednorm.experiment.run_folder import RESULTS, name_folder

    if len(folders) == 1:
        return folders[0] if kind == "report" else folders[0] / kind
    names = [folder.resolve().name for folder in folders]
    return RESULTS / name_folder("-".join([kind, *names]))
