"""What is drawn of a story: a plot for each panel, all with the same scale and the same looks."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from fednorm.experiment.story import Panel, Story
from fednorm.report.colors import Style, styles
from fednorm.report.curve import Curve, breaks, curve
from fednorm.report.finals import Finals, finals
from fednorm.report.numbers import finite

Limits: TypeAlias = tuple[float, float]

_DIGITS = 3  # of the values that the page holds, in per cent


@dataclass(frozen=True)
class Plot:
    """The curves of one panel, by method; values in per cent."""

    title: str
    metric: str
    lines: Mapping[str, Curve]
    ends: Mapping[str, list[tuple[int, float]]]  # where diverged runs were last evaluated
    published: Mapping[str, float]
    x: Limits


@dataclass(frozen=True)
class Plots:
    """All plots of a story. A method is known by its place in `looks`."""

    looks: Mapping[str, Style]
    panels: tuple[Plot, ...]
    y: Limits
    finals: Finals | None = None

    @property
    def drawn(self) -> dict[str, Style]:
        """The looks of those methods that have something to show in at least one panel."""
        shown = {label for plot in self.panels for label in (*plot.lines, *plot.published)}
        shown |= set(self.finals.lines) if self.finals else set()
        return {label: look for label, look in self.looks.items() if label in shown}

    @property
    def number(self) -> dict[str, int]:
        """The place of each method."""
        return {label: number for number, label in enumerate(self.looks)}

    def to_json(self) -> dict[str, Any]:
        """Return what the page's script reads."""
        return {
            "methods": list(self.looks),
            "y": self.y,
            "panels": [self._panel(plot) for plot in self.panels],
        }

    def _panel(self, plot: Plot) -> dict[str, Any]:
        curves = (
            {
                "method": self.number[label],
                "rounds": line.rounds,
                "mean": _rounded(line.mean),
                "low": _rounded(line.low),
                "high": _rounded(line.high),
            }
            for label, line in plot.lines.items()
        )
        return {"title": plot.title, "metric": plot.metric, "x": plot.x, "curves": list(curves)}


def plots(story: Story) -> Plots:
    """Return what is drawn of a story."""
    drawn = tuple(_plot(panel) for panel in story.curve_panels)
    runs = (run.strategy for panel in story.panels for run in panel.comparison.runs)
    only_published = (label for panel in story.panels for label in panel.published)
    lines = [line for plot in drawn for line in plot.lines.values()]
    values = [value for line in lines for value in (*line.low, *line.high)]
    values += [value for plot in drawn for value in plot.published.values()]
    return Plots(
        looks=styles([*runs, *only_published]),
        panels=drawn,
        y=_limits(values, margin=0.05),
        finals=finals(story),
    )


def _plot(panel: Panel) -> Plot:
    summaries = panel.comparison.summaries()
    lines = {s.strategy: curve(s.runs) for s in summaries}
    ends = {s.strategy: breaks(s.runs) for s in summaries}
    return Plot(
        title=panel.title,
        metric=panel.comparison.metric,
        x=_limits((number for line in lines.values() for number in line.rounds), margin=0.02),
        lines={label: line for label, line in lines.items() if line.rounds},
        ends={label: points for label, points in ends.items() if points},
        published={k: v for k, v in panel.published.items() if finite(v) is not None},
    )


def _limits(values: Iterable[float], margin: float) -> Limits:
    """Return the ends of an axis that leaves a margin on both sides, as a share of its length."""
    listed = list(values) or [0.0]
    low, high = min(listed), max(listed)
    space = margin * (high - low) or 1.0
    return low - space, high + space


def _rounded(values: Iterable[float]) -> list[float]:
    return [round(value, _DIGITS) for value in values]
