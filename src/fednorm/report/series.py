"""The data of all plots: curves by round, and final values by panel.

All panels share one scale, and a method has the same style in each of them.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, TypeAlias

from fednorm.experiment.results import FigureResult, PanelResult, RunResult
from fednorm.report.format import keep_finite
from fednorm.report.styles import Style, choose_styles

Limits: TypeAlias = tuple[float, float]

_DIGITS = 3  # of the values that the page holds, in per cent


@dataclass(frozen=True)
class Curve:
    """A quantity, such as accuracy in per cent, for every round that any seed has."""

    rounds: tuple[int, ...]
    mean: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]


@dataclass(frozen=True)
class Plot:
    """The curves of one panel, by method; values in per cent."""

    title: str
    metric: str
    lines: Mapping[str, Curve]
    ends: Mapping[str, list[tuple[int, float]]]  # where diverged runs were last evaluated
    published: Mapping[str, float]
    frozen: Mapping[str, tuple[int, ...]]  # first rounds with frozen statistics, over seeds
    x: Limits


@dataclass(frozen=True)
class Finals:
    """Final values: one line for each method; the x value of a panel is its index."""

    axis: str
    metric: str
    ticks: tuple[str, ...]
    lines: Mapping[str, Curve]
    published: Mapping[str, tuple[tuple[int, float], ...]]


@dataclass(frozen=True)
class Plots:
    """All plots of a figure; the number of a method is its position in `styles`."""

    styles: Mapping[str, Style]
    panels: tuple[Plot, ...]
    y: Limits
    finals: Finals | None = None

    @property
    def drawn(self) -> dict[str, Style]:
        """The styles of the methods that are shown in at least one panel."""
        shown = {label for plot in self.panels for label in (*plot.lines, *plot.published)}
        shown |= set(self.finals.lines) if self.finals else set()
        return {label: style for label, style in self.styles.items() if label in shown}

    @property
    def numbers(self) -> dict[str, int]:
        """The number of each method."""
        return {label: number for number, label in enumerate(self.styles)}

    def to_json(self) -> dict[str, Any]:
        """Return the data for the page's script."""
        return {
            "methods": list(self.styles),
            "y": self.y,
            "panels": [self._record_plot(plot) for plot in self.panels],
        }

    def _record_plot(self, plot: Plot) -> dict[str, Any]:
        curves: list[dict[str, Any]] = []
        for label, line in plot.lines.items():
            values = {"mean": line.mean, "low": line.low, "high": line.high}
            rounded = {key: [round(v, _DIGITS) for v in of] for key, of in values.items()}
            curves.append({"method": self.numbers[label], "rounds": line.rounds, **rounded})
        return {"title": plot.title, "metric": plot.metric, "x": plot.x, "curves": curves}


def collect_plots(figure: FigureResult) -> Plots:
    """Collect the data of all plots."""
    drawn = tuple(_collect_plot(panel) for panel in figure.curve_panels)
    runs = (run.strategy for panel in figure.panels for run in panel.comparison.runs)
    only_published = (label for panel in figure.panels for label in panel.published)
    lines = [line for plot in drawn for line in plot.lines.values()]
    values = [value for line in lines for value in (*line.low, *line.high)]
    values += [value for plot in drawn for value in plot.published.values()]
    return Plots(
        styles=choose_styles([*runs, *only_published]),
        panels=drawn,
        y=_find_limits(values, margin=0.05),
        finals=_collect_finals(figure),
    )


def _collect_plot(panel: PanelResult) -> Plot:
    summaries = panel.comparison.summaries()
    lines = {s.strategy: average_accuracy(s.runs) for s in summaries}
    ends = {s.strategy: find_divergences(s.runs) for s in summaries}
    return Plot(
        title=panel.title,
        metric=panel.comparison.metric,
        x=_find_limits((number for line in lines.values() for number in line.rounds), margin=0.02),
        lines={label: line for label, line in lines.items() if line.rounds},
        ends={label: points for label, points in ends.items() if points},
        published={k: v for k, v in panel.published.items() if keep_finite(v) is not None},
        frozen={s.strategy: rounds for s in summaries if (rounds := _find_freezing(s.runs))},
    )


def _find_freezing(runs: Sequence[RunResult]) -> tuple[int, ...]:
    return tuple(sorted({run.frozen_from for run in runs if run.frozen_from is not None}))


def average_accuracy(runs: Sequence[RunResult]) -> Curve:
    """Return mean, minimum and maximum over the runs, ignoring values that are not finite."""
    found = ((e.round, keep_finite(e.accuracy)) for run in runs for e in run.history)
    return summarize_rounds((number, 100 * value) for number, value in found if value is not None)


def invert(curve: Curve) -> Curve:
    """Return the errors of a curve of accuracies, both in per cent.

    >>> invert(Curve((1,), (90.0,), (80.0,), (95.0,)))
    Curve(rounds=(1,), mean=(10.0,), low=(5.0,), high=(20.0,))
    """
    mean, low, high = (
        tuple(100 - value for value in of) for of in (curve.mean, curve.high, curve.low)
    )
    return Curve(curve.rounds, mean, low, high)


def summarize_rounds(points: Iterable[tuple[int, float]]) -> Curve:
    """Return mean, minimum and maximum of the values of each round."""
    values: dict[int, list[float]] = {}
    for number, value in points:
        values.setdefault(number, []).append(value)
    rounds = tuple(sorted(values))
    return Curve(
        rounds=rounds,
        mean=tuple(fmean(values[number]) for number in rounds),
        low=tuple(min(values[number]) for number in rounds),
        high=tuple(max(values[number]) for number in rounds),
    )


def find_divergences(runs: Sequence[RunResult]) -> list[tuple[int, float]]:
    """Return round and accuracy in per cent where diverged runs were last evaluated."""
    finals = (run.final for run in runs if run.status == "diverged")
    return [
        (f.round, 100 * f.accuracy) for f in finals if f and keep_finite(f.accuracy) is not None
    ]


def _collect_finals(figure: FigureResult) -> Finals | None:
    """Collect final values, or return None if they are not plotted."""
    if not figure.finals or not figure.panels:
        return None
    points: dict[str, list[tuple[int, float]]] = {}
    published: dict[str, list[tuple[int, float]]] = {}
    for place, panel in enumerate(figure.panels):
        for run in panel.comparison.runs:
            if run.final and keep_finite(run.final.accuracy) is not None:
                points.setdefault(run.strategy, []).append((place, 100 * run.final.accuracy))
        for label, value in panel.published.items():
            published.setdefault(label, []).append((place, value))
    return Finals(
        axis=figure.finals,
        metric=figure.panels[0].comparison.metric,
        ticks=_shorten_titles([panel.title for panel in figure.panels]),
        lines={label: summarize_rounds(of) for label, of in points.items()},
        published={label: tuple(of) for label, of in published.items()},
    )


def _shorten_titles(titles: Sequence[str]) -> tuple[str, ...]:
    """Shorten titles such as "γ = 0" to their values if all name the same parameter.

    >>> _shorten_titles(["γ = 0", "γ = 0.01"]), _shorten_titles(["iid", "E = 1"])
    (('0', '0.01'), ('iid', 'E = 1'))
    """
    parts = [title.partition(" = ") for title in titles]
    alike = len({name for name, _, _ in parts}) == 1 and all(value for _, _, value in parts)
    return tuple(value for _, _, value in parts) if alike else tuple(titles)


def _find_limits(values: Iterable[float], margin: float) -> Limits:
    """Return the limits of an axis; `margin` is a fraction of the range."""
    listed = list(values) or [0.0]
    low, high = min(listed), max(listed)
    space = margin * (high - low) or 1.0
    return low - space, high + space
