"""Plots of single clients: what data each has, and what each reaches with every strategy.

Nothing is drawn of private runs, whose results must not tell clients apart.
"""

from collections.abc import Sequence
from functools import partial
from typing import TypeAlias

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fednorm.experiment.results import Comparison
from fednorm.report.series import Plots
from fednorm.report.styles import frame_axes, name_method, render_svg

Counts: TypeAlias = Sequence[Sequence[int]]

_WIDTHS = {"wide": 7.2, "narrow": 4.2}  # inches
_MARGIN, _ROW = 0.75, 0.26  # inches, of the height
_TALLEST = 4.5  # inches
_POINTS = 72  # per inch
_INSIDE = 0.86  # of the width, without labels
_FILL = 0.92  # diameter of the largest circle, in cells
_CELLS = 600  # that are drawn; more are too small and make the page heavy
_TICKS = 20  # labels of classes
_LONGEST = 18  # letters
_BLUE = "#3a73d3"  # readable on light and dark


def render_labels(counts: Counts, name: str) -> dict[str, str]:
    """Render each client's samples by class as SVG elements of two widths."""
    height = min(_MARGIN + _ROW * len(counts[0]), _TALLEST)
    return {
        size: render_svg(partial(_draw_labels, counts, (width, height)), f"labels {name} {size}")
        for size, width in _WIDTHS.items()
    }


def describe_labels(comparison: Comparison) -> str:
    """Return the caption of the plot: what a circle is, the clients' sizes, what is not shown."""
    counts, config = comparison.label_counts, comparison.config
    sizes = [sum(row) for row in counts]
    least, most = min(sizes), max(sizes)
    has = f"{least}" if least == most else f"{least} to {most}"
    told = [f"Area: training samples of a class. A client has {has} of them in all."]
    if len(counts) > (shown := _count_shown(counts)):
        told.append(f"The first {shown} of {len(counts)} clients are shown.")
    if unseen := config.get("unseen_clients"):
        told.append(f"The last {unseen} of {len(counts)} clients never train.")
    if len(seeds := config.get("seeds", [])) > 1:
        told.append(f"This is seed {seeds[0]}; others divide the data anew.")
    return " ".join(told)


def _count_shown(counts: Counts) -> int:
    return min(len(counts), max(1, _CELLS // len(counts[0])))


def _draw_labels(counts: Counts, size: tuple[float, float], ink: str) -> Figure:
    result = Figure(figsize=size, layout="constrained")
    axes = result.add_subplot()
    shown = np.array(counts[: _count_shown(counts)])
    clients, classes = shown.shape
    x, y = np.nonzero(shown)
    width = size[0] * _INSIDE * _POINTS / clients
    cell = min(width, (size[1] - _MARGIN) * _POINTS / classes)
    areas = (_FILL * cell) ** 2 * shown[x, y] / shown.max()
    frame_axes(axes, ink)
    axes.scatter(x, y, s=areas, color=_BLUE, linewidths=0, zorder=2)
    axes.set(xlim=(-0.6, clients - 0.4), ylim=(-0.6, classes - 0.4))
    if classes <= _TICKS:
        axes.set_yticks(range(classes))
    axes.set_xlabel("client", color=ink)
    axes.set_ylabel("class", color=ink)
    return result


def list_client_values(comparison: Comparison) -> dict[str, list[float]]:
    """Return the clients' final values of all seeds in per cent, by strategy; none if private."""
    found: dict[str, list[float]] = {}
    for run in comparison.runs:
        if run.final and run.final.per_client and run.delta is None:
            found.setdefault(run.strategy, []).extend(100 * v for v in run.final.per_client)
    return found


def render_strip(comparison: Comparison, plots: Plots, name: str) -> dict[str, str]:
    """Render one dot per client and seed and a bar at their mean, a row for each strategy."""
    found = list_client_values(comparison)
    height = _MARGIN + _ROW * len(found)

    def draw(width: float, ink: str) -> Figure:
        result = Figure(figsize=(width, height), layout="constrained")
        axes = result.add_subplot()
        frame_axes(axes, ink)
        _draw_strip(axes, found, plots)
        axes.set_xlabel(f"{comparison.metric} (%)", color=ink)
        return result

    return {
        size: render_svg(partial(draw, width), f"strip {name} {size}")
        for size, width in _WIDTHS.items()
    }


def _draw_strip(axes: Axes, found: dict[str, list[float]], plots: Plots) -> None:
    for row, (label, values) in enumerate(found.items()):
        color, gid = plots.styles[label].color, name_method(plots.numbers[label])
        axes.scatter(values, [row] * len(values), s=36, color=color, alpha=0.45, linewidths=0,
                     zorder=2, gid=gid)  # fmt: skip
        axes.plot(
            [np.mean(values)] * 2, [row - 0.38, row + 0.38], color=color, linewidth=2, gid=gid
        )
    shortened = [x if len(x) <= _LONGEST else x[: _LONGEST - 1] + "…" for x in found]
    axes.set_yticks(range(len(found)), shortened)
    axes.set_ylim(len(found) - 0.4, -0.6)  # the first strategy is on top
