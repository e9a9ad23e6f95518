"""The data of all plots: curves by round, and final values by panel or by a swept key.

All panels share one scale, and a method has the same style in each of them.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, TypeAlias

from fednorm.experiment.results import Comparison, FigureResult, PanelResult, RunResult
from fednorm.experiment.summary.result_table import keep_finite
from fednorm.experiment.summary.significance import Spread, measure_spread
from fednorm.report.format import flatten
from fednorm.report.styles import Style, choose_styles

Limits: TypeAlias = tuple[float, float]

_LOWEST = -100.0  # per cent; curves stop there, as an R² far below zero would flatten the others
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


def average_accuracy(runs: Sequence[RunResult], spread: Spread | None = None) -> Curve:
    """Return mean and range, or spread, over the runs, ignoring values that are not finite."""
    found = ((e.round, keep_finite(e.accuracy)) for run in runs for e in run.history)
    points = ((number, _to_percent(value)) for number, value in found if value is not None)
    return summarize_rounds(points, spread)


def _to_percent(value: float) -> float:
    return max(100 * value, _LOWEST)


def invert(curve: Curve) -> Curve:
    """Return the errors of a curve of accuracies, both in per cent.

    >>> invert(Curve((1,), (90.0,), (80.0,), (95.0,)))
    Curve(rounds=(1,), mean=(10.0,), low=(5.0,), high=(20.0,))
    """
    mean, low, high = (
        tuple(100 - value for value in of) for of in (curve.mean, curve.high, curve.low)
    )
    return Curve(curve.rounds, mean, low, high)


def summarize_rounds(points: Iterable[tuple[int, float]], spread: Spread | None = None) -> Curve:
    """Return the mean of the values of each round, between minimum and maximum or ± the spread."""
    values: dict[int, list[float]] = {}
    for number, value in points:
        values.setdefault(number, []).append(value)
    rounds = tuple(sorted(values))
    if spread is not None:
        means = [fmean(values[number]) for number in rounds]
        around = [measure_spread(values[number], spread) for number in rounds]
        low, high = (
            tuple(mean + sign * one for mean, one in zip(means, around, strict=True))
            for sign in (-1, 1)
        )
        return Curve(rounds, tuple(means), low, high)
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
        (f.round, _to_percent(f.accuracy))
        for f in finals
        if f and keep_finite(f.accuracy) is not None
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
                points.setdefault(run.strategy, []).append((place, _to_percent(run.final.accuracy)))
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


# Final values by a key that was swept.

_ENTRY_NAMES = {"name", "label"}


def collect_sensitivity(comparison: Comparison) -> Iterator[Finals]:
    """Yield the final values by each key in which entries of one strategy differ."""
    entries = [_describe_entry(entry) for entry in comparison.config.get("strategies", [])]
    keys = dict.fromkeys(key for _, _, own in entries for key in own)
    for key in keys:
        values = _sort_values({_write_value(own[key]) for _, _, own in entries if key in own})
        lines = dict(_collect_lines(comparison, entries, key, values))
        if len(values) > 1 and any(len(line.rounds) > 1 for line in lines.values()):
            axis = key.rpartition(".")[2]
            yield Finals(axis, comparison.metric, tuple(values), lines, {})


def _describe_entry(entry: Any) -> tuple[str, str, dict[str, Any]]:
    """Return an entry's name, its title, and all that it sets, by dotted key."""
    table = {"name": entry} if isinstance(entry, str) else dict(entry)
    own = flatten({key: value for key, value in table.items() if key not in _ENTRY_NAMES})
    return table["name"], table.get("label") or table["name"], own


def _collect_lines(
    comparison: Comparison,
    entries: list[tuple[str, str, dict[str, Any]]],
    key: str,
    values: list[str],
) -> Iterator[tuple[str, Curve]]:
    """Yield the lines of a plot: entries that differ in nothing but the key."""
    points: dict[str, list[tuple[int, float]]] = {}
    for name, title, own in entries:
        if key not in own:
            continue
        others = (f"{k.rpartition('.')[2]}={_write_value(v)}" for k, v in own.items() if k != key)
        line = points.setdefault(" ".join([name, *others]), [])
        for run in comparison.runs:
            accuracy = keep_finite(run.final.accuracy) if run.final else None
            if run.strategy == title and accuracy is not None:
                line.append((values.index(_write_value(own[key])), 100 * accuracy))
    for label, found in points.items():
        if found:
            yield label, summarize_rounds(found)


def _write_value(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _sort_values(values: set[str]) -> list[str]:
    """Sort numbers by size, and texts as they are.

    >>> _sort_values({"0.1", "0.02"}), _sort_values({"iid", "gamma=0"})
    (['0.02', '0.1'], ['gamma=0', 'iid'])
    """
    try:
        return sorted(values, key=float)
    except ValueError:
        return sorted(values)
