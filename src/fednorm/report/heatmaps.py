"""Heat maps: the gap between two methods, or attacks against defences.

A figure may plot the gap between two methods in every panel. The titles of the panels then locate
the cells: "ResNet-20, shards, E = 100" is the row "shards" and the column "E = 100" of the map
"ResNet-20".

A comparison swept over attacks and defences has one map for each strategy, with the final accuracy
in per cent. The keys that an entry overrides locate its cell: keys of client faults make the rows,
keys of the server's aggregation make the columns. A key with one value in all entries makes
neither.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import ceil
from typing import Any, TypeAlias

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fednorm.experiment.results import Comparison, FigureResult, PanelResult
from fednorm.experiment.summary.result_table import format_points, keep_finite
from fednorm.report.ranking import has_diverged
from fednorm.report.styles import render_svg

Colors: TypeAlias = tuple[
    str, float, float
]  # a colour map of matplotlib, and the ends of its scale

_CELL, _MARGIN = (0.8, 0.42), (1.6, 1.1)  # inches
_LETTER = 0.085  # inches per letter of a label
_IN_A_ROW = 2
_DARK = 0.6  # share of the scale from which a cell needs light digits
_FAULT_KEYS = ("attack", "attack_target", "byzantine", "client_dropout")
_DEFENSE_KEYS = ("aggregator", "statistics_aggregator", "min_replies")


@dataclass(frozen=True)
class HeatMap:
    """One map; a cell that was not run is missing."""

    title: str
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    cells: Mapping[tuple[str, str], float]  # points


def collect_gap_maps(figure: FigureResult) -> list[HeatMap]:
    """Return the maps of gaps, or none if the figure does not ask for them."""
    if figure.heat is None:
        return []
    ahead, behind = figure.heat
    found: dict[str, dict[tuple[str, str], float | None]] = {}
    for panel in figure.panels:
        title, row, column = _parse_title(panel.title)
        found.setdefault(title, {})[row, column] = _measure_gap(panel, ahead, behind)
    maps = []
    for title, cells in found.items():
        rows, columns = (tuple(dict.fromkeys(names)) for names in zip(*cells, strict=True))
        known = {place: value for place, value in cells.items() if value is not None}
        maps.append(HeatMap(title, rows, columns, known))
    return maps


def describe_gaps(figure: FigureResult) -> str:
    """Say in how many settings one method ends above the other."""
    gaps = [gap for one in collect_gap_maps(figure) for gap in one.cells.values()]
    if figure.heat is None or not gaps:
        return ""
    ahead, behind = figure.heat
    above = sum(gap > 0 for gap in gaps)
    return (
        f"{ahead} ends above {behind} in {above} of {len(gaps)} settings; the gap ranges from "
        f"{format_points(min(gaps))} to {format_points(max(gaps))} points."
    )


def _parse_title(title: str) -> tuple[str, str, str]:
    """Return map, row and column.

    >>> _parse_title("LeNet, 128 epochs, IID, E = 1"), _parse_title("IID, E = 1")
    (('LeNet, 128 epochs', 'IID', 'E = 1'), ('', 'IID', 'E = 1'))
    """
    *rest, row, column = ["", *title.split(", ")] if ", " in title else ["", "", title]
    return ", ".join(part for part in rest if part), row, column


def _measure_gap(panel: PanelResult, ahead: str, behind: str) -> float | None:
    finals = {s.strategy: keep_finite(s.accuracy) for s in panel.comparison.summaries()}
    one, other = finals.get(ahead), finals.get(behind)
    return None if one is None or other is None else 100 * (one - other)


def draw_gap_maps(maps: Sequence[HeatMap], heat: tuple[str, str], ink: str) -> Figure:
    """Draw the maps: green where the first method is behind, purple where it is ahead."""
    most = max((abs(v) for one in maps for v in one.cells.values()), default=0.0) or 1.0
    title = f"{heat[0]} minus {heat[1]}, points"
    return _draw_maps(maps, title, ink, colors=("PRGn_r", -most, most), write=format_points)


def render_gap_maps(figure: FigureResult) -> str:
    """Render the maps of two methods' difference as an SVG element, or nothing."""
    maps = collect_gap_maps(figure)
    if not figure.heat or not maps:
        return ""
    return render_svg(partial(draw_gap_maps, maps, figure.heat), "heat")


def collect_grid_maps(comparison: Comparison) -> list[HeatMap]:
    """Return one map per strategy; none unless entries differ in rows and in columns."""
    summaries = [s for s in comparison.summaries() if not has_diverged(s)]
    finals = {s.strategy: keep_finite(s.accuracy) for s in summaries}
    located = _locate_entries(comparison)
    # All maps have the same rows and columns, so that cells can be compared by their place.
    rows, columns = (tuple(dict.fromkeys(place[axis] for place in located)) for axis in (1, 2))
    found: dict[str, dict[tuple[str, str], float]] = {}
    for (name, *place), label in located.items():
        if (accuracy := finals.get(label)) is not None:
            found.setdefault(name, {})[place[0], place[1]] = 100 * accuracy
    return [HeatMap(name, rows, columns, cells) for name, cells in found.items()]


def describe_grid(comparison: Comparison) -> str:
    """Say which strategy and defence keep most in their worst case, and which least."""
    worst = {
        f"{one.title} with {column}": min(one.cells[row, column] for row in one.rows)
        for one in collect_grid_maps(comparison)
        for column in one.columns
        if all((row, column) in one.cells for row in one.rows)
    }
    if not worst:
        return ""
    most, least = max(worst, key=lambda name: worst[name]), min(worst, key=lambda name: worst[name])
    told = f"At worst, {most} keeps {worst[most]:.1f} %"
    return told if most == least else f"{told}; {least} keeps {worst[least]:.1f} %"


def is_full(comparison: Comparison) -> bool:
    """Return whether the entries cover every cell of every map."""
    runs = Counter(name for name, _, _ in _locate_entries(comparison))
    maps = collect_grid_maps(comparison)
    return bool(maps) and all(runs[m.title] == len(m.rows) * len(m.columns) for m in maps)


def _locate_entries(comparison: Comparison) -> dict[tuple[str, str, str], str]:
    """Return the label of each cell's entry, by map, row and column; none unless both differ."""
    listed = [e for e in comparison.config.get("strategies", []) if isinstance(e, Mapping)]
    keys = {*_FAULT_KEYS, *_DEFENSE_KEYS}
    swept = [e for e in listed if e.get("label") and keys & e.keys()]
    rows, columns = (_find_differing(swept, keys) for keys in (_FAULT_KEYS, _DEFENSE_KEYS))
    if not rows or not columns:
        return {}
    return {
        (e["name"], _describe_place(e, rows), _describe_place(e, columns)): e["label"]
        for e in swept
    }


def draw_grid_maps(comparison: Comparison, ink: str) -> Figure:
    """Draw the maps; the darker a cell, the higher the accuracy."""
    maps, title = collect_grid_maps(comparison), f"final {comparison.metric}, %"
    return _draw_maps(maps, title, ink, colors=("Blues", 0.0, 100.0), write="{:.1f}".format)


def render_grid_maps(figure: FigureResult) -> str:
    """Render the maps of a swept comparison as an SVG element, or nothing."""
    swept = find_swept(figure)
    return render_svg(partial(draw_grid_maps, swept), "grid") if swept else ""


def find_swept(figure: FigureResult) -> Comparison | None:
    """Return the only comparison of a figure if it was swept over attacks and defences."""
    only = figure.panels[0].comparison if len(figure.panels) == 1 else None
    return only if only and collect_grid_maps(only) else None


def _find_differing(entries: Sequence[Mapping[str, Any]], keys: Sequence[str]) -> list[str]:
    return [key for key in keys if len({_describe_value(entry.get(key)) for entry in entries}) > 1]


def _describe_place(entry: Mapping[str, Any], keys: Sequence[str]) -> str:
    """Join the values of the keys, each once: updates and statistics may share a rule."""
    found = {key: entry[key] for key in keys if key in entry}
    words = (
        _describe_value(value) if isinstance(value, str | Mapping) else f"{key} {value}"
        for key, value in found.items()
    )
    return ", ".join(dict.fromkeys(words))


def _describe_value(value: Any) -> str:
    return str(value.get("name")) if isinstance(value, Mapping) else str(value)


def _draw_maps(
    maps: Sequence[HeatMap], title: str, ink: str, *, colors: Colors, write: Callable[[float], str]
) -> Figure:
    """Draw maps side by side, each cell with its value."""
    columns = min(len(maps), _IN_A_ROW)
    words = max(len(word) for one in maps for word in one.columns)
    cell = max(_CELL[0], _LETTER * words)
    margin = max(_MARGIN[0], _LETTER * max(len(word) for one in maps for word in one.rows))
    widest = max(len(one.columns) for one in maps) * cell + margin
    highest = max(len(one.rows) for one in maps) * _CELL[1] + _MARGIN[1]
    size = (columns * widest, ceil(len(maps) / columns) * highest)
    result = Figure(figsize=size, layout="constrained")
    grid = result.subplots(ceil(len(maps) / columns), columns, squeeze=False).flatten()
    for axes in grid[len(maps) :]:
        axes.set_axis_off()
    for axes, one in zip(grid, maps, strict=False):
        _draw_map(axes, one, colors, ink)
        for (row, column), value in one.cells.items():
            # Both ends of a scale around 0 are dark; of one that begins at 0, the upper end is.
            dark = abs(value) > _DARK * max(map(abs, colors[1:]))
            x, y, color = (
                one.columns.index(column),
                one.rows.index(row),
                "white" if dark else "black",
            )
            axes.text(x, y, write(value), ha="center", va="center", color=color, fontsize=8)
    result.suptitle(title, x=0.01, ha="left", color=ink, fontsize=9)
    return result


def _draw_map(axes: Axes, one: HeatMap, colors: Colors, ink: str) -> None:
    values = np.full((len(one.rows), len(one.columns)), np.nan)
    for (row, column), value in one.cells.items():
        values[one.rows.index(row), one.columns.index(column)] = value
    # Drawn as shapes: the page's policy refuses images, even embedded ones.
    edges = [np.arange(len(names) + 1) - 0.5 for names in (one.columns, one.rows)]
    name, low, high = colors
    axes.pcolormesh(*edges, values, cmap=name, vmin=low, vmax=high)
    axes.invert_yaxis()
    axes.set_title(one.title, loc="left", color=ink, fontsize=10)
    axes.set_xticks(range(len(one.columns)), one.columns)
    axes.set_yticks(range(len(one.rows)), one.rows)
    axes.tick_params(colors=ink, length=0, labelsize=8)
    axes.spines[:].set_visible(False)
