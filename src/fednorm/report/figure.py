"""The curves of a story: all panels in one figure, or one panel for the page."""

from collections.abc import Mapping, Sequence
from math import ceil
from textwrap import fill

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from fednorm.report.colors import Style
from fednorm.report.curve import Curve
from fednorm.report.finals import draw_finals
from fednorm.report.panels import Plot, Plots

WIDE, NARROW = (7.2, 3.7), (4.2, 3.1)  # inches: a panel alone, and one beside others or on a phone
_EMPTY, _LEGEND_LINE = 1.5, 0.22  # inches
_IN_A_ROW = 3  # panels
_LETTERS = 12  # that fit in an inch of the legend
_KEY = 9  # letters that a legend's line and gaps take
_LONGEST = 32  # longer labels are cut
_MARKS = 8  # markers on a line
_NARROW, _WIDEN, _WIDE = 4, 1.6, 100  # ratios of the ends of a logarithmic axis
_DIVERGED, _PUBLISHED = "diverged", "published"
_BESIDE = (1.015, 1.06)  # where published numbers stand, in widths of the plot


def figure(plots: Plots, *, ink: str, title: str = "") -> Figure:
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
        _finals(grid[0], plots, ink)
    for axes, plot in zip(grid[first:], plots.panels, strict=False):
        axes.set_title(plot.title, loc="left", color=ink, fontsize=10)
        _panel(axes, plots, plot, ink)
    for axes in grid[first + len(plots.panels) :]:
        axes.set_axis_off()
    if plots.drawn:
        legend(result, _keys(plots, ink), ink)
    else:
        result.set_figheight(_EMPTY)
    return result


def final_values(plots: Plots, size: tuple[float, float], ink: str) -> Figure:
    """Draw the final values of all panels by themselves."""
    result = Figure(figsize=size, layout="constrained")
    _finals(result.add_subplot(), plots, ink)
    return result


def _finals(axes: Axes, plots: Plots, ink: str) -> None:
    if plots.finals:
        frame(axes, ink)
        draw_finals(axes, plots.finals, plots.looks, ink)


def single(plots: Plots, plot: Plot, size: tuple[float, float], ink: str) -> Figure:
    """Draw one panel without title and legend, which the page has as text."""
    empty = not plots.drawn
    result = Figure(figsize=(size[0], _EMPTY if empty else size[1]), layout="constrained")
    axes = result.add_subplot()
    _panel(axes, plots, plot, ink)
    axes.patch.set_gid("area")
    return result


def _panel(axes: Axes, plots: Plots, plot: Plot, ink: str) -> None:
    """Draw a mean line and a band from minimum to maximum over seeds for each method."""
    if not plot.lines:
        axes.set_axis_off()
        message = "Nothing to plot: no run came to an evaluation."
        axes.text(0.5, 0.5, message, color=ink, ha="center", transform=axes.transAxes)
        return
    frame(axes, ink)
    axes.set_ylabel(f"{plot.metric} (%)", color=ink)
    axes.set(xlim=plot.x, ylim=plots.y)
    for label, line in plot.lines.items():
        draw(axes, line, plots.looks[label], plots.number[label])
    for label, value in plot.published.items():
        _publish(axes, value, plots.looks[label], plots.number[label])
    for label, points in plot.ends.items():
        _cross(axes, points, plots.looks[label], plots.number[label])


def _publish(axes: Axes, value: float, look: Style, number: int) -> None:
    """Mark a published number beside the plot."""
    axes.plot(
        _BESIDE,
        (value, value),
        color=look.color,
        linestyle=(0, (2, 1)),
        linewidth=1.4,
        marker=look.marker,
        markevery=[1],
        markersize=5,
        markerfacecolor="none",
        clip_on=False,
        transform=axes.get_yaxis_transform(),
        gid=_gid(number),
    )


def _cross(axes: Axes, points: Sequence[tuple[int, float]], look: Style, number: int) -> None:
    """Mark where diverged runs end."""
    rounds, values = zip(*points, strict=True)
    axes.plot(
        rounds,
        values,
        color=look.color,
        linestyle="",
        marker="x",
        markersize=9,
        zorder=4,
        gid=_gid(number),
    )


def _keys(plots: Plots, ink: str) -> dict[str, Line2D]:
    keys = legend_keys(plots.drawn)
    if any(plot.ends for plot in plots.panels):
        keys[_DIVERGED] = Line2D([], [], color=ink, marker="x", markersize=7, linestyle="")
    if any(plot.published for plot in plots.panels):
        keys[_PUBLISHED] = Line2D([], [], color=ink, linestyle=(0, (2, 1)), linewidth=1.4)
    return keys


def _gid(number: int) -> str:
    """Return the name by which the page's script finds all that is drawn of a method."""
    return f"method-{number}"


def frame(axes: Axes, ink: str) -> None:
    """Draw the axes of a plot against rounds."""
    axes.set_xlabel("round", color=ink)
    axes.tick_params(colors=ink, length=0)
    axes.grid(axis="y", color=ink, alpha=0.15, linewidth=0.8)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set(color=ink, alpha=0.5)
    axes.xaxis.set_major_locator(
        MaxNLocator(nbins=8, steps=[1, 2, 5, 10], integer=True, min_n_ticks=1)
    )
    axes.margins(x=0.02)


def plain_logarithmic(axes: Axes) -> None:
    """Give drawn values a logarithmic axis with plain numbers, at least one of them in sight."""
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    if high / low < _NARROW:
        low, high = low / _WIDEN, high * _WIDEN
        axes.set_ylim(low, high)
    between = (1.0,) if high / low > _WIDE else (1.0, 2.0, 5.0)
    axes.yaxis.set_major_locator(LogLocator(subs=between, numticks=8))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_locator(NullLocator())


def draw(axes: Axes, line: Curve, look: Style, number: int) -> None:
    """Draw one method, the `number`-th of the story."""
    rounds, color, gid = line.rounds, look.color, _gid(number)
    if len(rounds) == 1:  # a band needs two rounds to be seen
        axes.vlines(rounds, line.low, line.high, color=color, alpha=0.4, linewidth=5, gid=gid)
    axes.fill_between(rounds, line.low, line.high, color=color, alpha=0.14, linewidth=0, gid=gid)
    every = ceil(len(rounds) / _MARKS)
    axes.plot(
        rounds,
        line.mean,
        color=color,
        linestyle=look.line,
        marker=look.marker,
        markevery=(number % every, every),  # lines that coincide show their markers in turn
        markersize=5,
        linewidth=1.8,
        gid=gid,
    )


def legend_keys(chosen: Mapping[str, Style]) -> dict[str, Line2D]:
    """Return what stands in the legend for each label."""
    return {_cut(label): _key(look) for label, look in chosen.items()}


def _key(look: Style) -> Line2D:
    return Line2D(
        [],
        [],
        color=look.color,
        linestyle=look.line,
        marker=look.marker,
        markersize=5,
        linewidth=1.8,
    )


def _cut(label: str) -> str:
    return label if len(label) <= _LONGEST else label[: _LONGEST - 1] + "…"


def legend(result: Figure, keys: Mapping[str, Line2D], ink: str) -> None:
    """Write the legend below the plots, for which the figure grows."""
    columns = _columns(list(keys), int(_LETTERS * result.get_figwidth()))
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


def _columns(labels: Sequence[str], letters: int) -> int:
    """Return the largest number of columns that fit; they are filled from top to bottom."""
    for number in range(len(labels), 1, -1):
        columns = np.array_split([_KEY + len(label) for label in labels], number)
        if sum(int(column.max()) for column in columns) <= letters:
            return number
    return 1
