"""Sensitivity curves: final values against each key that an experiment was swept over."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from fednorm.experiment.results import Comparison, FigureResult
from fednorm.report.curves import NARROW, WIDE, render_final_values
from fednorm.report.format import flatten, keep_finite
from fednorm.report.series import Curve, Finals, Plots, summarize_rounds
from fednorm.report.styles import Style, choose_styles

_NAMES = {"name", "label"}


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
        _render(found, panel.title, where)
        for panel in figure.panels
        for where, compared in (
            ("test data", panel.comparison),
            ("validation data", panel.comparison.validation),
        )
        if compared
        for found in collect_sensitivity(compared)
    ]


def _render(found: Finals, panel: str, where: str) -> Sensitivity:
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


def collect_sensitivity(comparison: Comparison) -> Iterator[Finals]:
    """Yield the final values by each key in which entries of one strategy differ."""
    entries = [_describe_entry(entry) for entry in comparison.config.get("strategies", [])]
    keys = dict.fromkeys(key for _, _, own in entries for key in own)
    for key in keys:
        values = _sort_values({_write(own[key]) for _, _, own in entries if key in own})
        lines = dict(_collect_lines(comparison, entries, key, values))
        if len(values) > 1 and any(len(line.rounds) > 1 for line in lines.values()):
            axis = key.rpartition(".")[2]
            yield Finals(axis, comparison.metric, tuple(values), lines, {})


def _describe_entry(entry: Any) -> tuple[str, str, dict[str, Any]]:
    """Return an entry's name, its title, and all that it sets, by dotted key."""
    table = {"name": entry} if isinstance(entry, str) else dict(entry)
    own = flatten({key: value for key, value in table.items() if key not in _NAMES})
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
        others = (f"{k.rpartition('.')[2]}={_write(v)}" for k, v in own.items() if k != key)
        line = points.setdefault(" ".join([name, *others]), [])
        for run in comparison.runs:
            accuracy = keep_finite(run.final.accuracy) if run.final else None
            if run.strategy == title and accuracy is not None:
                line.append((values.index(_write(own[key])), 100 * accuracy))
    for label, found in points.items():
        if found:
            yield label, summarize_rounds(found)


def _write(value: Any) -> str:
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
