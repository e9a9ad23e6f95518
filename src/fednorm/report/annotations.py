"""Words inside a plot: a label at the end of each curve, and where statistics freeze."""

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes

from fednorm.report.series import Plot, Plots
from fednorm.report.styles import name_method

_MOST = 14  # labels; more do not fit
_GAP = 0.05  # between labels, in heights of the plot
_LONGEST = 22  # letters
_SIZE = 8  # points
_BESIDE = 1.015  # where labels begin, in widths of the plot; published numbers are marked before
_BEYOND_PUBLISHED = 1.075
_LOWEST, _LINE = 0.03, 0.06  # where notes are written, in heights of the plot


def label_ends(axes: Axes, plots: Plots, plot: Plot) -> None:
    """Write each method's name where its curve ends, moved apart where curves meet."""
    if len(plot.lines) > _MOST:
        return
    low, high = plots.y
    ends = {label: (line.mean[-1] - low) / (high - low) for label, line in plot.lines.items()}
    start = _BEYOND_PUBLISHED if plot.published else _BESIDE
    for label, height in spread_apart(ends).items():
        color, gid = plots.styles[label].color, name_method(plots.numbers[label])
        axes.plot(
            [start - 0.01, start + 0.012], [ends[label], height], color=color, linewidth=0.8,
            transform=axes.transAxes, clip_on=False, gid=gid,
        )  # fmt: skip
        text = label if len(label) <= _LONGEST else label[: _LONGEST - 1] + "…"
        axes.text(
            start + 0.017, height, text, color=color, fontsize=_SIZE, va="center",
            transform=axes.transAxes, gid=gid,
        )  # fmt: skip


def spread_apart(heights: Mapping[str, float]) -> dict[str, float]:
    """Move heights apart until none are closer than a line, the lowest first.

    >>> spread_apart({"a": 0.5, "b": 0.5, "c": 0.1})
    {'c': 0.1, 'a': 0.475, 'b': 0.525}
    >>> spread_apart({"a": 1.0, "b": 1.0})
    {'a': 0.95, 'b': 1.0}
    """
    groups: list[tuple[float, list[str]]] = []  # the middle of labels that touch each other
    for label, height in sorted(heights.items(), key=lambda item: item[1]):
        groups.append((height, [label]))
        while len(groups) > 1 and _find_bottom(groups[-1]) - _find_top(groups[-2]) < _GAP - 1e-9:
            (upper, above), (lower, below) = groups.pop(), groups.pop()
            middle = (upper * len(above) + lower * len(below)) / (len(above) + len(below))
            groups.append(_keep_inside(middle, [*below, *above]))
    return {
        label: round(_find_bottom(group) + place * _GAP, 6)
        for group in groups
        for place, label in enumerate(group[1])
    }


def _find_bottom(group: tuple[float, Sequence[str]]) -> float:
    return group[0] - _GAP * (len(group[1]) - 1) / 2


def _find_top(group: tuple[float, Sequence[str]]) -> float:
    return group[0] + _GAP * (len(group[1]) - 1) / 2


def _keep_inside(middle: float, labels: list[str]) -> tuple[float, list[str]]:
    half = _GAP * (len(labels) - 1) / 2
    return max(half, min(middle, 1 - half)), labels


def mark_freezing(axes: Axes, plots: Plots, plot: Plot, *, worded: bool = True) -> None:
    """Mark the first round with frozen statistics, and say whose they are."""
    first, last = plot.x
    for line, (label, rounds) in enumerate(plot.frozen.items()):
        color, gid = plots.styles[label].color, name_method(plots.numbers[label])
        for number in rounds:
            axes.axvline(number, color=color, linewidth=1, linestyle=":", gid=gid)
        right = rounds[0] > (first + last) / 2  # more room on the left
        until = "" if len(rounds) == 1 else f" to {rounds[-1]}"
        axes.annotate(
            f"{label} frozen from round {rounds[0]}{until}" if worded else "",
            (rounds[0], _LOWEST + line * _LINE), xytext=(-4 if right else 4, 0),
            xycoords=axes.get_xaxis_transform(), textcoords="offset points", color=color,
            fontsize=_SIZE, ha="right" if right else "left", va="bottom", gid=gid,
        )  # fmt: skip
