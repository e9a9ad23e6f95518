"""Plot accuracy by round, and final values against the parameter that differs between panels."""

from collections.abc import Mapping, Sequence
from math import ceil
from textwrap import fill
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from fednorm.report.series import Curve, Plot, Plots
from fednorm.report.styles import Style, frame_axes, name_method, render_svg

WIDE, NARROW = (7.2, 3.7), (4.2, 3.1)  # inches: a single panel; one of several, or on a phone
_EMPTY, _LEGEND_LINE = 1.5, 0.22  # inches
_IN_A_ROW = 3  # panels
_LETTERS = 12  # per inch of the legend
_TICK_LETTERS = 44  # of all tick labels that fit without rotation
_KEY = 9  # width of a legend's line and gaps, in letters
_LONGEST = 32  # longer labels are cut
_MARKS = 8  # markers on a line
_DIVERGED, _PUBLISHED = "diverged", "published"
_BESIDE = (1.015, 1.06)  # where published numbers are marked, in widths of the plot


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
    name = f"{plots.panels.index(plot)} {size}"
    return render_svg(lambda ink: _draw_alone(plots, plot, size, ink), name)


def _draw_alone(plots: Plots, plot: Plot, size: tuple[float, float], ink: str) -> Figure:
    """Draw one panel without title and legend; the page has both as text."""
    empty = not plots.drawn
    result = Figure(figsize=(size[0], _EMPTY if empty else size[1]), layout="constrained")
    axes = result.add_subplot()
    _draw_panel(axes, plots, plot, ink)
    axes.patch.set_gid("area")
    return result


def render_final_values(plots: Plots, size: tuple[float, float]) -> str:
    """Render the final values of all panels as an SVG element of `size` inches."""

    def draw(ink: str) -> Figure:
        result = Figure(figsize=size, layout="constrained")
        draw_final_values(result.add_subplot(), plots, ink)
        return result

    return render_svg(draw, f"finals {size}")


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


def _draw_panel(axes: Axes, plots: Plots, plot: Plot, ink: str) -> None:
    """Draw a mean line and a band from minimum to maximum over seeds for each method."""
    if not plot.lines:
        axes.set_axis_off()
        message = "Nothing to plot: no run was evaluated."
        axes.text(0.5, 0.5, message, color=ink, ha="center", transform=axes.transAxes)
        return
    frame_axes(axes, ink)
    axes.set_ylabel(f"{plot.metric} (%)", color=ink)
    axes.set(xlim=plot.x, ylim=plots.y)
    for label, line in plot.lines.items():
        draw_curve(axes, line, plots.styles[label], plots.numbers[label])
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


def draw_curve(axes: Axes, line: Curve, style: Style, number: int) -> None:
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
