"""The figure of a comparison: accuracy against rounds, the legend below it."""

from collections.abc import Mapping, Sequence
from math import ceil
from textwrap import fill

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from fednorm.experiment.result import Comparison
from fednorm.report.colors import Style, styles
from fednorm.report.curve import Curve, breaks, curve

_WIDTH, _HEIGHT, _EMPTY, _LEGEND_LINE = 7.2, 3.9, 1.5, 0.22  # inches
_LETTERS = 88  # that fit beside each other in the legend
_KEY = 9  # letters that a legend's line and gaps take
_LONGEST = 32  # longer labels are cut
_MARKS = 8  # markers on a line
_NARROW, _WIDEN, _WIDE = 4, 1.6, 100  # ratios of the ends of a logarithmic axis
_DIVERGED = "diverged"


def figure(comparison: Comparison, *, ink: str, title: str = "") -> Figure:
    """Draw a mean line and a band from minimum to maximum over seeds for each strategy."""
    chosen = styles(run.strategy for run in comparison.runs)
    lines = {s.strategy: curve(s.runs) for s in comparison.summaries()}
    lines = {label: line for label, line in lines.items() if line.rounds}
    result = Figure(figsize=(_WIDTH, _HEIGHT), layout="constrained")
    axes = result.add_subplot()
    axes.set_title(fill(title, _LETTERS), loc="left", color=ink, fontsize=9, pad=10)
    if not lines:
        result.set_figheight(_EMPTY)
        axes.set_axis_off()
        message = "Nothing to plot: no run came to an evaluation."
        axes.text(0.5, 0.5, message, color=ink, ha="center", transform=axes.transAxes)
        return result
    frame(axes, ink)
    axes.set_ylabel("accuracy (%)", color=ink)
    for index, (label, line) in enumerate(lines.items()):
        draw(axes, line, chosen[label], index)
    keys = legend_keys({label: chosen[label] for label in lines})
    if _cross(axes, comparison, chosen):
        keys[_DIVERGED] = Line2D([], [], color=ink, marker="x", markersize=7, linestyle="")
    legend(result, keys, ink)
    return result


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


def draw(axes: Axes, line: Curve, look: Style, index: int) -> None:
    """Draw one strategy, the `index`-th of its plot."""
    if len(line.rounds) == 1:  # a band needs two rounds to be seen
        axes.vlines(line.rounds, line.low, line.high, color=look.color, alpha=0.4, linewidth=5)
    axes.fill_between(line.rounds, line.low, line.high, color=look.color, alpha=0.14, linewidth=0)
    every = ceil(len(line.rounds) / _MARKS)
    axes.plot(
        line.rounds,
        line.mean,
        color=look.color,
        linestyle=look.line,
        marker=look.marker,
        markevery=(index % every, every),  # lines that coincide show their markers in turn
        markersize=5,
        linewidth=1.8,
    )


def _cross(axes: Axes, comparison: Comparison, chosen: Mapping[str, Style]) -> bool:
    """Mark where diverged runs end, and return whether there are any."""
    found = [(s.strategy, point) for s in comparison.summaries() for point in breaks(s.runs)]
    for label, (number, accuracy) in found:
        color = chosen[label].color
        axes.plot(number, accuracy, color=color, marker="x", markersize=9, zorder=4)
    return bool(found)


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
    columns = _columns(list(keys))
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


def _columns(labels: Sequence[str]) -> int:
    """Return the largest number of columns that fit; they are filled from top to bottom."""
    for number in range(len(labels), 1, -1):
        columns = np.array_split([_KEY + len(label) for label in labels], number)
        if sum(int(column.max()) for column in columns) <= _LETTERS:
            return number
    return 1
