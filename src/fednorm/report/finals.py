"""Final values against what the panels differ in, such as accuracy against heterogeneity."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes

from fednorm.experiment.result import Summary
from fednorm.experiment.story import Story
from fednorm.report.colors import Style
from fednorm.report.curve import Curve
from fednorm.report.numbers import finite

_LETTERS = 44  # of ticks that fit beside each other


@dataclass(frozen=True)
class Finals:
    """One line for each method; the place of a panel on the axis is its number."""

    axis: str
    metric: str
    ticks: tuple[str, ...]
    lines: Mapping[str, Curve]
    published: Mapping[str, tuple[tuple[int, float], ...]]


def finals(story: Story) -> Finals | None:
    """Return what is drawn, or None if the story does not ask for it."""
    if not story.finals or not story.panels:
        return None
    points: dict[str, list[tuple[int, float, float, float]]] = {}
    published: dict[str, list[tuple[int, float]]] = {}
    for place, panel in enumerate(story.panels):
        for summary in panel.comparison.summaries():
            if found := _point(summary):
                points.setdefault(summary.strategy, []).append((place, *found))
        for label, value in panel.published.items():
            published.setdefault(label, []).append((place, value))
    return Finals(
        axis=story.finals,
        metric=story.panels[0].comparison.metric,
        ticks=_ticks([panel.title for panel in story.panels]),
        lines={label: Curve(*zip(*of, strict=True)) for label, of in points.items()},
        published={label: tuple(of) for label, of in published.items()},
    )


def _point(summary: Summary) -> tuple[float, float, float] | None:
    """Return mean, minimum and maximum over seeds, in per cent."""
    values = [finite(run.final.accuracy) for run in summary.runs if run.final]
    found = [100 * value for value in values if value is not None]
    return (sum(found) / len(found), min(found), max(found)) if found else None


def _ticks(titles: Sequence[str]) -> tuple[str, ...]:
    """Return the values of titles that differ in one value alone, else the titles.

    >>> _ticks(["γ = 0", "γ = 0.01"]), _ticks(["iid", "E = 1"])
    (('0', '0.01'), ('iid', 'E = 1'))
    """
    parts = [title.partition(" = ") for title in titles]
    alike = len({name for name, _, _ in parts}) == 1 and all(value for _, _, value in parts)
    return tuple(value for _, _, value in parts) if alike else tuple(titles)


def draw_finals(axes: Axes, drawn: Finals, looks: Mapping[str, Style], ink: str) -> None:
    """Draw final values with their range over seeds; hollow markers are published ones."""
    number = {label: place for place, label in enumerate(looks)}
    for label, line in drawn.lines.items():
        look = looks[label]
        around = [
            [m - low for m, low in zip(line.mean, line.low, strict=True)],
            [high - m for m, high in zip(line.mean, line.high, strict=True)],
        ]
        axes.errorbar(
            line.rounds,
            line.mean,
            yerr=around,
            color=look.color,
            linestyle=look.line,
            marker=look.marker,
            markersize=5,
            linewidth=1.8,
            gid=f"method-{number[label]}",
        )
    for label, points in drawn.published.items():
        places, values = zip(*points, strict=True)
        look = looks[label]
        axes.plot(
            places,
            values,
            color=look.color,
            linestyle="",
            marker=look.marker,
            markersize=9,
            markerfacecolor="none",
            gid=f"method-{number[label]}",
        )
    long = max(map(len, drawn.ticks)) * len(drawn.ticks) > _LETTERS
    axes.set_xticks(range(len(drawn.ticks)), drawn.ticks)
    for tick in axes.get_xticklabels() if long else ():
        tick.set(rotation=30, horizontalalignment="right")
    axes.set_xlabel(drawn.axis, color=ink)
    axes.set_ylabel(f"final {drawn.metric} (%)", color=ink)
