"""Plot accuracy by round, final values by panel, and the values that `--diagnose` records."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from math import ceil
from textwrap import fill
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from fednorm.experiment.results import Comparison, FigureResult, RunResult
from fednorm.experiment.summary.result_table import keep_finite
from fednorm.report.annotations import label_ends, mark_freezing
from fednorm.report.series import (
    Curve,
    Finals,
    Plot,
    Plots,
    collect_sensitivity,
    invert,
    summarize_rounds,
)
from fednorm.report.styles import (
    Style,
    choose_styles,
    frame_axes,
    name_method,
    render_svg,
    use_log_scale,
)

WIDE, NARROW = (7.2, 3.7), (4.2, 3.1)  # inches: a single panel; one of several, or on a phone
_SMALL = (3.1, 2.3)  # inches: a plot of diagnostics
_EMPTY, _LEGEND_LINE = 1.5, 0.22  # inches
_IN_A_ROW = 3  # panels
_LETTERS = 12  # per inch of the legend
_TICK_LETTERS = 44  # of all tick labels that fit without rotation
_KEY = 9  # width of a legend's line and gaps, in letters
_LONGEST = 32  # longer labels are cut
_MARKS = 8  # markers on a line
_CLOSE = 0.03  # ends of curves, in heights of the plot
_ROUNDING = 1e-9
_DIVERGED, _PUBLISHED = "diverged", "published"
_BESIDE = (1.015, 1.06)  # where published numbers are marked, in widths of the plot

_TITLES = {
    "drift": "drift",
    "deviation": "deviation",
    "statistics_variance": "variance of statistics",
    "gradient_deviation": "gradient deviation",
}
_MEANINGS = {
    "drift": "Drift: how far the shared statistics moved in a round, ‖S(t+1) − S(t)‖₁.",
    "deviation": "Deviation: how far the clients' batch statistics were from them, ‖S_i − S(t)‖₁.",
    "statistics_variance": "Variance of statistics: how much each client's batch statistics S_i "
    "varied over the last 200 rounds, summed over channels, mean over clients.",
    "gradient_deviation": "Gradient deviation: distance of the clients' mean gradient from that of "
    "BatchNorm on their merged batches, with the same dropout masks, relative to it; values "
    "below 0.001 are drawn at 0.001.",
}
# Rounding errors are far smaller and would take most of the plot.
_FLOOR = {"gradient_deviation": 1e-3}
_MOST = 150  # points of a curve; more are indistinguishable and make the page heavy


def draw_figure(plots: Plots, *, ink: str, title: str = "") -> Figure:
    """Draw all panels, the title above and the legend below them."""
    first = int(plots.finals is not None)
    count = max(1, first + len(plots.panels))
    columns = min(count, _IN_A_ROW)
    alone = count == 1
    width, height = WIDE if alone else (NARROW[0] * columns, NARROW[1] * ceil(count / columns))
    result = Figure(figsize=(width, height), layout="constrained")
    wrapped = fill(title, int(_LETTERS * width))
    result.suptitle(wrapped, x=0.01, ha="left", color=ink, fontsize=9 if alone else 11)
    grid = result.subplots(ceil(count / columns), columns, squeeze=False).flatten()
    if plots.finals:
        draw_final_values(grid[0], plots, ink)
    for axes, plot in zip(grid[first:], plots.panels, strict=False):
        axes.set_title(plot.title, loc="left", color=ink, fontsize=10)
        _draw_panel(axes, plots, plot, ink)
    for axes in grid[first + len(plots.panels) :]:
        axes.set_axis_off()
    if plots.drawn:
        _add_legend(result, _make_keys(plots, ink), ink)
    else:
        result.set_figheight(_EMPTY)
    return result


def render_panel(plots: Plots, plot: Plot, size: tuple[float, float]) -> str:
    """Render the curves of one panel as an SVG element of `size` inches."""
    shown = size if plots.drawn else (size[0], _EMPTY)
    name = f"{plots.panels.index(plot)} {size}"
    drawn = partial(_draw_panel, plots=plots, plot=plot, labeled=size == WIDE)
    return _render_alone(drawn, shown, name)


def render_errors(plots: Plots, plot: Plot, size: tuple[float, float]) -> str:
    """Render the errors of one panel on a logarithmic axis as an SVG element."""
    name = f"errors {plots.panels.index(plot)} {size}"
    return _render_alone(partial(_draw_errors, plots=plots, plot=plot), size, name)


def overlap(plots: Plots, plot: Plot) -> bool:
    """Return whether curves end too close to each other to be told apart."""
    ends = sorted((line.mean[-1] for line in plot.lines.values()), reverse=True)
    close = _CLOSE * (plots.y[1] - plots.y[0])
    return any(above - below < close for above, below in pairwise(ends))


def render_final_values(plots: Plots, size: tuple[float, float]) -> str:
    """Render the final values of all panels as an SVG element of `size` inches."""
    return _render_alone(partial(draw_final_values, plots=plots), size, f"finals {size}")


def _render_alone(draw: Callable[..., None], size: tuple[float, float], name: str) -> str:
    """Render one plot without title and legend; the page has both as text."""

    def draw_alone(ink: str) -> Figure:
        result = Figure(figsize=size, layout="constrained")
        draw(result.add_subplot(), ink=ink)
        return result

    return render_svg(draw_alone, name)


def draw_final_values(axes: Axes, plots: Plots, ink: str) -> None:
    """Draw final values with their range over seeds; hollow markers are published values."""
    if plots.finals is None:
        return
    frame_axes(axes, ink)
    drawn, styles, number = plots.finals, plots.styles, plots.numbers
    for label, line in drawn.lines.items():
        around = np.abs(np.array([line.low, line.high]) - line.mean)
        gid = name_method(number[label])
        axes.errorbar(line.rounds, line.mean, around, **styles[label].options, gid=gid)
    for label, points in drawn.published.items():
        _mark(axes, points, styles[label], number[label], markersize=9, markerfacecolor="none")
    long = max(map(len, drawn.ticks)) * len(drawn.ticks) > _TICK_LETTERS
    axes.set_xticks(range(len(drawn.ticks)), drawn.ticks)
    for tick in axes.get_xticklabels() if long else ():
        tick.set(rotation=30, horizontalalignment="right")
    axes.set_xlabel(drawn.axis, color=ink)
    axes.set_ylabel(f"final {drawn.metric} (%)", color=ink)


def _draw_errors(axes: Axes, plots: Plots, plot: Plot, ink: str) -> None:
    """Draw 100 % minus the curves; zeros are drawn at half of the smallest error above zero."""
    frame_axes(axes, ink)
    errors = {label: invert(line) for label, line in plot.lines.items()}
    least = min((v for line in errors.values() for v in line.low if v > _ROUNDING), default=1.0)
    for label, line in errors.items():
        spans = (line.mean, line.low, line.high)
        shown = Curve(line.rounds, *(tuple(max(v, least / 2) for v in of) for of in spans))
        _draw_curve(axes, shown, plots.styles[label], plots.numbers[label])
    axes.set_xlim(plot.x)
    axes.set_ylabel(f"100 % − {plot.metric} (%)", color=ink)
    use_log_scale(axes)
    mark_freezing(axes, plots, plot, worded=False)


def _draw_panel(axes: Axes, plots: Plots, plot: Plot, ink: str, *, labeled: bool = False) -> None:
    """Draw a mean line and a band from minimum to maximum over seeds for each method."""
    if not plot.lines:
        axes.set_axis_off()
        message = "Nothing to plot: no run was evaluated."
        axes.text(0.5, 0.5, message, color=ink, ha="center", transform=axes.transAxes)
        return
    frame_axes(axes, ink)
    axes.patch.set_gid("area")
    axes.set_ylabel(f"{plot.metric} (%)", color=ink)
    axes.set(xlim=plot.x, ylim=plots.y)
    for label, line in plot.lines.items():
        _draw_curve(axes, line, plots.styles[label], plots.numbers[label])
    beside = {
        "transform": axes.get_yaxis_transform(), "clip_on": False, "markerfacecolor": "none",
        "markevery": [1], "linestyle": (0, (2, 1)), "linewidth": 1.4,
    }  # fmt: skip
    for label, value in plot.published.items():
        pair = [(x, value) for x in _BESIDE]
        _mark(axes, pair, plots.styles[label], plots.numbers[label], **beside)
    crossed = {"marker": "x", "markersize": 9, "zorder": 4}
    for label, points in plot.ends.items():
        _mark(axes, points, plots.styles[label], plots.numbers[label], **crossed)
    mark_freezing(axes, plots, plot)
    if labeled:
        label_ends(axes, plots, plot)


def _draw_curve(axes: Axes, line: Curve, style: Style, number: int) -> None:
    """Draw the curve of method `number`."""
    rounds, color, gid = line.rounds, style.color, name_method(number)
    if len(rounds) == 1:  # a band needs two rounds to be seen
        axes.vlines(rounds, line.low, line.high, color=color, alpha=0.4, linewidth=5, gid=gid)
    axes.fill_between(rounds, line.low, line.high, color=color, alpha=0.14, linewidth=0, gid=gid)
    every = ceil(len(rounds) / _MARKS)
    axes.plot(
        rounds,
        line.mean,
        **style.options,
        markevery=(number % every, every),  # lines that coincide show their markers in turn
        gid=gid,
    )


def _mark(
    axes: Axes, points: Sequence[tuple[float, float]], style: Style, number: int, **changes: Any
) -> None:
    """Mark points of method `number`, without a line unless `changes` of its style have one."""
    options = style.options | {"linestyle": ""} | changes
    axes.plot(*zip(*points, strict=True), **options, gid=name_method(number))


def _make_keys(plots: Plots, ink: str) -> dict[str, Line2D]:
    """Return the entries of the legend: methods, and marks shared by all methods."""
    keys = {
        _shorten(label): Line2D([], [], **style.options) for label, style in plots.drawn.items()
    }
    if any(plot.ends for plot in plots.panels):
        keys[_DIVERGED] = Line2D([], [], color=ink, marker="x", markersize=7, linestyle="")
    if any(plot.published for plot in plots.panels):
        keys[_PUBLISHED] = Line2D([], [], color=ink, linestyle=(0, (2, 1)), linewidth=1.4)
    return keys


def _shorten(label: str) -> str:
    return label if len(label) <= _LONGEST else label[: _LONGEST - 1] + "…"


def _add_legend(result: Figure, keys: Mapping[str, Line2D], ink: str) -> None:
    """Add the legend below the plots and enlarge the figure by its height."""
    columns = _count_columns(list(keys), int(_LETTERS * result.get_figwidth()))
    result.set_figheight(result.get_figheight() + ceil(len(keys) / columns) * _LEGEND_LINE)
    result.legend(
        list(keys.values()),
        list(keys),
        loc="outside lower center",
        ncols=columns,
        frameon=False,
        labelcolor=ink,
        handlelength=3,
        columnspacing=1.6,
    )


def _count_columns(labels: Sequence[str], letters: int) -> int:
    """Return the largest number of columns that fit; they are filled from top to bottom."""
    for number in range(len(labels), 1, -1):
        columns = np.array_split([_KEY + len(label) for label in labels], number)
        if sum(int(column.max()) for column in columns) <= letters:
            return number
    return 1


def render_diagnostics(
    comparison: Comparison, styles: Mapping[str, Style], name: str
) -> dict[str, str]:
    """Render each quantity that `--diagnose` recorded as an SVG element, by title."""
    return {
        _TITLES[key]: _render_alone(
            partial(_draw_diagnostic, lines=lines, styles=styles), _SMALL, f"{key} {name}"
        )
        for key, lines in _collect_recorded(comparison).items()
    }


def list_diagnosed(comparison: Comparison) -> set[str]:
    """Return the methods with recorded diagnostics."""
    return {label for lines in _collect_recorded(comparison).values() for label in lines}


def explain_diagnostics(comparison: Comparison) -> str:
    """Return the caption of the plots."""
    sentences = [_MEANINGS[key] for key in _collect_recorded(comparison)]
    width = _choose_width(comparison.runs)
    if width > 1:
        sentences.append(f"Each point is the mean over {width} rounds.")
    return " ".join([*sentences, "Logarithmic scale; zeros are left out."])


def _collect_recorded(comparison: Comparison) -> dict[str, dict[str, Curve]]:
    """Return the curves of each recorded quantity, by strategy."""
    width = _choose_width(comparison.runs)
    lines = {
        key: {s.strategy: _average(s.runs, key, width) for s in comparison.summaries()}
        for key in _TITLES
    }
    seen = {key: {k: line for k, line in of.items() if line.rounds} for key, of in lines.items()}
    return {key: of for key, of in seen.items() if of}


def _choose_width(runs: Sequence[RunResult]) -> int:
    """Return how many rounds are averaged into one point."""
    return max(1, ceil(max((len(run.diagnostics) for run in runs), default=0) / _MOST))


def _average(runs: Sequence[RunResult], key: str, width: int) -> Curve:
    found = (
        (width * ceil(number / width), keep_finite(record.get(key)))
        for run in runs
        for number, record in enumerate(run.diagnostics, start=1)
    )
    least = _FLOOR.get(key, 0.0)
    return summarize_rounds((number, max(value, least)) for number, value in found if value)


def _draw_diagnostic(
    axes: Axes, lines: Mapping[str, Curve], styles: Mapping[str, Style], ink: str
) -> None:
    frame_axes(axes, ink)
    for number, (label, style) in enumerate(styles.items()):
        if label in lines:
            _draw_curve(axes, lines[label], style, number)
    use_log_scale(axes)


# Sensitivity curves: final values against each key that an experiment was swept over.


@dataclass(frozen=True)
class Sensitivity:
    """The plot of one key: a line for each strategy, in two sizes."""

    title: str
    styles: Mapping[str, Style]
    wide: str
    narrow: str
    caption: str


def render_sensitivity(figure: FigureResult) -> list[Sensitivity]:
    """Render a plot for each key that a comparison was swept over, or tuned."""
    return [
        _render_sensitivity(found, panel.title, where)
        for panel in figure.panels
        for where, compared in (
            ("test data", panel.comparison),
            ("validation data", panel.comparison.validation),
        )
        if compared
        for found in collect_sensitivity(compared)
    ]


def _render_sensitivity(found: Finals, panel: str, where: str) -> Sensitivity:
    styles = choose_styles(found.lines)
    plots = Plots(styles=styles, panels=(), y=(0.0, 100.0), finals=found)
    # The page's script numbers the methods of the other plots.
    wide, narrow = (
        re.sub(r' data-method="\d+"', "", render_final_values(plots, size))
        for size in (WIDE, NARROW)
    )
    title = f"Sensitivity: {found.metric} on {where} by {found.axis}"
    caption = "At the last evaluation; bars reach from the lowest to the highest seed."
    return Sensitivity(" – ".join(filter(None, (panel, title))), styles, wide, narrow, caption)
