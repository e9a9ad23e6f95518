"""Export results for a paper: CSV, LaTeX tables, and figures in the width of a column.

Labels are never cut: a legend takes as many lines as it needs, and a label that is wider than the
figure is wrapped. Captions say what numbers and bands are, and over how many seeds.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import ceil
from pathlib import Path
from textwrap import fill
from typing import Any, Literal, TypeAlias

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from fednorm.errors import ConfigError
from fednorm.experiment.results import FigureResult, PanelResult, Summary
from fednorm.experiment.summary.result_table import (
    describe_spread,
    escape_latex,
    keep_finite,
    make_table,
    write_csv,
)
from fednorm.experiment.summary.significance import TableSpec, measure_spread, summarize_runs
from fednorm.report.format import capitalize, describe_setting
from fednorm.report.ranking import is_personal
from fednorm.report.series import average_accuracy
from fednorm.report.styles import Style, choose_styles, frame_axes, write_print
from fednorm.system import atomic_write

Format: TypeAlias = Literal["csv", "latex", "pdf", "svg", "png"]
Columns: TypeAlias = Literal["one", "two"]

FORMATS: tuple[Format, ...] = ("csv", "latex", "pdf", "svg", "png")
WIDTHS: dict[Columns, float] = {"one": 3.25, "two": 6.75}  # inches
_DRAWN = ("pdf", "svg", "png")
_CURVES_HEIGHT = {"one": 2.1, "two": 2.6}  # inches, of one panel
_ROW, _MARGIN = 0.2, 0.55  # inches: a line of final values, and their axis
_LETTER = 0.063  # inches, of tick labels
_PERCENT = (-4.0, 104.0)  # the widest y axis, with room for markers
_MARKS = 8  # on a curve
_THIN = {"linewidth": 1.1, "markersize": 3.2}


@dataclass(frozen=True)
class ExportRequest:
    """What is exported: file formats, width of figures, and the statistics of tables."""

    formats: tuple[Format, ...] = ("csv", "latex", "pdf")
    columns: Columns = "one"
    spec: TableSpec = field(default_factory=TableSpec)

    def __post_init__(self) -> None:
        """Check the names."""
        for name in self.formats:
            if name not in FORMATS:
                raise ConfigError(f"no format {name!r}; there are {', '.join(FORMATS)}.")
        if self.columns not in WIDTHS:
            raise ConfigError(f"columns must be one or two, but are {self.columns!r}.")

    @property
    def drawn(self) -> list[str]:
        """The formats of figures."""
        return [name for name in self.formats if name in _DRAWN]


def export_figure(figure: FigureResult, folder: Path, request: ExportRequest) -> list[Path]:
    """Write the files of a request into `folder`, and return their paths."""
    contents: dict[str, str] = {}
    if "csv" in request.formats:
        contents |= _write_rows(figure, request.spec)
    if "latex" in request.formats:
        contents["table.tex"] = _write_tables(figure, request.spec)
        if request.drawn:
            contents["figures.tex"] = _write_figures(figure, request)
    if request.drawn:
        contents["captions.txt"] = "\n".join(
            f"{name}: {text}" for name, text in describe_figures(figure, request.spec).items()
        ) + "\n"  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in contents.items():
        with atomic_write(folder / name) as file:
            file.write(text.encode())
    files = [folder / name for name in contents]
    for kind in request.drawn:
        for name, draw in _list_drawings(figure, request).items():
            files.append(folder / f"{name}.{kind}")
            with atomic_write(files[-1]) as file:
                write_print(draw, file, kind)
    return files


def _write_rows(figure: FigureResult, spec: TableSpec) -> dict[str, str]:
    """Return a row for each run, and one for each strategy; numbers are not rounded."""
    several = len(figure.panels) > 1
    runs, strategies = [], []
    for panel in figure.panels:
        title = {"panel": panel.title} if several else {}
        listed = panel.comparison.list_runs()
        runs += [{**title, **row} for row in listed]
        strategies += [{**title, **row} for row in summarize_runs(listed, _adapt(spec, panel))]
    return {"runs.csv": write_csv(runs), "strategies.csv": write_csv(strategies)}


def _adapt(spec: TableSpec, panel: PanelResult) -> TableSpec:
    """Leave out the comparison in a panel without the reference."""
    labels = {run.strategy for run in panel.comparison.runs}
    return spec if spec.against in {None, *labels} else replace(spec, against="")


def check_reference(figure: FigureResult, spec: TableSpec) -> None:
    """Refuse a reference that no panel has."""
    runs = [run for panel in figure.panels for run in panel.comparison.list_runs()]
    spec.find_reference(runs)


def _write_tables(figure: FigureResult, spec: TableSpec) -> str:
    several = len(figure.panels) > 1
    tables = []
    for number, panel in enumerate(figure.panels, start=1):
        if not panel.comparison.runs:
            continue
        table = make_table(panel.comparison.list_runs(), _adapt(spec, panel))
        caption = f"{_introduce(panel)} {table.caption}{_tell_missing(panel)}"
        label = f"tab:results-{number}" if several else "tab:results"
        tables.append(replace(table, caption=caption).to_latex(label))
    return "\n".join(tables)


def _introduce(panel: PanelResult) -> str:
    """Return setting of a panel after its title, as the first sentence of a caption."""
    compared = panel.comparison
    told = describe_setting(compared.config, compared.label_counts)
    return f"{panel.title}: {told}." if panel.title else f"{capitalize(told)}."


def _tell_missing(panel: PanelResult) -> str:
    missing = panel.comparison.missing
    return f" Not finished and left out: {', '.join(missing)}." if missing else ""


def describe_figures(figure: FigureResult, spec: TableSpec) -> dict[str, str]:
    """Return the captions of the figures by name: setting, metric, seeds, spread."""
    runs = [run for panel in figure.panels for run in panel.comparison.list_runs()]
    spread = describe_spread(_count_seeds(figure), spec.spread)
    known = spread.startswith("mean")
    metrics = " and ".join(dict.fromkeys(run["metric"] for run in runs))
    frozen = [
        f"{run.strategy} freezes its statistics from round {run.frozen_from}"
        for panel in figure.panels
        for run in panel.comparison.runs
        if run.frozen_from is not None
    ]
    about = " ".join(dict.fromkeys(_introduce(panel) for panel in figure.panels))
    personal = sorted({run["strategy"] for run in runs if run["personal"]})
    notes = f" Mean over clients with personal models: {', '.join(personal)}." if personal else ""
    notes += "".join(dict.fromkeys(_tell_missing(panel) for panel in figure.panels))
    dotted = f" Dotted: {'; '.join(dict.fromkeys(frozen))}." if frozen else ""
    band = f"lines and bands are {spread}" if known else spread
    bars = f"markers and bars are {spread}, small dots are seeds" if known else spread
    return {
        "curves": f"{about} {capitalize(metrics)} on test data by round; {band}.{dotted}{notes}",
        "finals": f"{about} {capitalize(metrics)} on test data at the last evaluation; "
        f"{bars}.{notes}",
    }


def _count_seeds(figure: FigureResult) -> list[int]:
    """Return the number of seeds behind each mean."""
    summaries = [s for panel in figure.panels for s in panel.comparison.summaries()]
    return [sum(bool(run.history) for run in s.runs) for s in summaries]


def _write_figures(figure: FigureResult, request: ExportRequest) -> str:
    """Return LaTeX that includes the figures with their captions."""
    one = request.columns == "one"
    kind, width = ("figure", r"\columnwidth") if one else ("figure*", r"\textwidth")
    name = next((n for n in ("pdf", "png") if n in request.formats), "pdf")
    parts = [
        "\n".join((
            rf"\begin{{{kind}}}",
            r"\centering",
            rf"\includegraphics[width={width}]{{{file}.{name}}}",
            rf"\caption{{{escape_latex(caption)}}}",
            rf"\label{{fig:{file}}}",
            rf"\end{{{kind}}}",
            "",
        ))
        for file, caption in describe_figures(figure, request.spec).items()
    ]  # fmt: skip
    return "% \\usepackage{graphicx}\n" + "\n".join(parts)


def _list_drawings(
    figure: FigureResult, request: ExportRequest
) -> dict[str, Callable[[str], Figure]]:
    return {
        "curves": partial(_draw_curves, figure, request),
        "finals": partial(_draw_finals, figure, request),
    }


def _draw_curves(figure: FigureResult, request: ExportRequest, ink: str) -> Figure:
    """Draw a panel for each setting, and one legend below all of them."""
    panels, styles = _list_drawn(figure), _choose_styles(figure)
    drawn, grid = _make_grid(panels, request, [_CURVES_HEIGHT[request.columns]] * len(panels), ink)
    shown: dict[str, None] = {}
    for axes, panel in zip(grid, panels, strict=True):
        frame_axes(axes, ink)
        axes.set_ylabel(f"{panel.comparison.metric} (%)", color=ink)
        for place, summary in enumerate(panel.comparison.summaries()):
            if _draw_curve(axes, summary, styles[summary.strategy], request.spec, place):
                shown[summary.strategy] = None
    keys = {label: Line2D([], [], **{**styles[label].options, **_THIN}) for label in shown}
    low, high = zip(*(axes.get_ylim() for axes in grid), strict=True)
    # A band of few seeds may leave what is possible; R² has no lower end.
    lowest = min(low) if any(p.comparison.metric == "R²" for p in panels) else _PERCENT[0]
    for axes in grid:
        axes.set_ylim(max(min(low), lowest), min(max(high), _PERCENT[1]))
    _add_legend(drawn, keys, ink)
    return drawn


def _draw_curve(axes: Axes, summary: Summary, style: Style, spec: TableSpec, place: int) -> bool:
    line = average_accuracy(summary.runs, spec.spread)
    if not line.rounds:
        return False
    axes.fill_between(line.rounds, line.low, line.high, color=style.color, alpha=0.18, linewidth=0)
    every = ceil(len(line.rounds) / _MARKS)
    markers = {"markevery": (place % every, every)}
    axes.plot(line.rounds, line.mean, **{**style.options, **_THIN, **markers})
    for frozen in {run.frozen_from for run in summary.runs} - {None}:
        axes.axvline(float(frozen or 0), color=style.color, linewidth=0.8, linestyle=":")
    return True


def _draw_finals(figure: FigureResult, request: ExportRequest, ink: str) -> Figure:
    """Draw a row for each strategy: the mean with its spread, and a small dot for each seed."""
    panels, styles = _list_drawn(figure), _choose_styles(figure)
    letters = int(0.38 * _find_width(panels, request) / _LETTER)
    listed = [_list_rows(panel, letters) for panel in panels]
    heights = [_MARGIN + _ROW * sum(text.count("\n") + 1 for text, _ in rows) for rows in listed]
    drawn, grid = _make_grid(panels, request, heights, ink)
    for axes, panel, rows in zip(grid, panels, listed, strict=True):
        frame_axes(axes, ink)
        axes.grid(visible=False)
        axes.grid(axis="x", color=ink, alpha=0.15, linewidth=0.8)
        axes.set_xlabel(f"final {panel.comparison.metric} (%)", color=ink)
        for place, (_, summary) in enumerate(rows):
            _draw_row(axes, summary, styles[summary.strategy], request.spec, place)
        axes.set_yticks(range(len(rows)), [text for text, _ in rows])
        axes.set_ylim(len(rows) - 0.4, -0.6)
    low, high = zip(*(axes.get_xlim() for axes in grid), strict=True)
    for axes in grid:
        axes.set_xlim(min(low), max(high))
    return drawn


def _list_rows(panel: PanelResult, letters: int) -> list[tuple[str, Summary]]:
    """Return the strategies with their labels in full, wrapped; personal models are last."""
    found = [s for s in panel.comparison.summaries() if keep_finite(s.accuracy) is not None]
    return [(fill(s.strategy, letters), s) for s in sorted(found, key=is_personal)]


def _draw_row(axes: Axes, summary: Summary, style: Style, spec: TableSpec, place: int) -> None:
    finals = [keep_finite(run.final.accuracy) for run in summary.runs if run.final]
    values = [100 * value for value in finals if value is not None]
    spread = measure_spread(values, spec.spread)
    if len(values) > 1:
        seeds: Any = {"s": 7, "facecolors": "none", "edgecolors": style.color, "linewidths": 0.6}
        axes.scatter(values, [place + 0.22] * len(values), **seeds)
    axes.errorbar(
        [sum(values) / len(values)], [place], xerr=[spread], color=style.color,
        marker=style.marker, markersize=4, linewidth=1.1, capsize=2 if spread else 0,
    )  # fmt: skip


def _list_drawn(figure: FigureResult) -> list[PanelResult]:
    return [panel for panel in figure.panels if any(run.history for run in panel.comparison.runs)]


def _choose_styles(figure: FigureResult) -> Mapping[str, Style]:
    return choose_styles(run.strategy for panel in figure.panels for run in panel.comparison.runs)


def _find_width(panels: Sequence[PanelResult], request: ExportRequest) -> float:
    """Return the width of one panel in inches."""
    side = 2 if request.columns == "two" and len(panels) > 1 else 1
    return WIDTHS[request.columns] / side


def _make_grid(
    panels: Sequence[PanelResult], request: ExportRequest, heights: Sequence[float], ink: str
) -> tuple[Figure, list[Axes]]:
    """Return a figure of the requested width with axes for each panel."""
    if not panels:
        raise ConfigError("there is nothing to draw, as no run was evaluated.")
    width, panel_width = WIDTHS[request.columns], _find_width(panels, request)
    side = round(width / panel_width)
    rows = [max(heights[start : start + side]) for start in range(0, len(panels), side)]
    titles = [fill(panel.title, int(panel_width / _LETTER) - 4) for panel in panels]
    lines = max(title.count("\n") + 1 if title else 0 for title in titles)
    drawn = Figure(figsize=(width, sum(rows) + 0.15 * lines * len(rows)), layout="constrained")
    grid = drawn.subplots(len(rows), side, squeeze=False, height_ratios=rows).flatten().tolist()
    for axes in grid[len(panels) :]:
        axes.set_axis_off()
    for axes, title in zip(grid, titles, strict=False):
        axes.set_title(title, loc="left", color=ink)
    return drawn, grid[: len(panels)]


def _add_legend(drawn: Figure, keys: Mapping[str, Line2D], ink: str) -> None:
    """Add a legend below the axes, with as many columns as fit; long labels are wrapped."""
    canvas, width = FigureCanvasAgg(drawn), drawn.get_figwidth() * drawn.dpi
    for columns, labels in _list_layouts(list(keys), drawn.get_figwidth()):
        legend = drawn.legend(
            list(keys.values()), labels, loc="outside lower center", ncols=columns, frameon=False,
            labelcolor=ink, handlelength=2.6, columnspacing=1.2, borderaxespad=0.2,
        )  # fmt: skip
        size = legend.get_window_extent(canvas.get_renderer())  # type: ignore[no-untyped-call]
        if size.width <= width or columns == 1:
            drawn.set_figheight(drawn.get_figheight() + size.height / drawn.dpi)
            return
        legend.remove()


def _list_layouts(labels: list[str], width: float) -> Iterator[tuple[int, list[str]]]:
    """Yield numbers of columns, the largest first, and the labels as they are then written."""
    for columns in range(len(labels), 1, -1):
        yield columns, labels
    yield 1, [fill(label, int(width / _LETTER) - 10) for label in labels]
