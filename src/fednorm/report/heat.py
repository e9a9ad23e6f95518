"""Heat maps: by how many points one method is ahead of another, panel by panel.

The titles of the panels say where a cell is: "ResNet-20, shards, E = 100" is the row "shards" and
the column "E = 100" of the map "ResNet-20".
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fednorm.experiment.story import Panel, Story
from fednorm.report.numbers import finite, points

_CELL, _MARGIN = (0.8, 0.42), (1.6, 1.1)  # inches
_LETTER = 0.085  # inches of a label's letter
_IN_A_ROW = 2
_DARK = 0.6  # share of the scale from which a cell needs light digits


@dataclass(frozen=True)
class HeatMap:
    """One map; a cell that was not run is missing."""

    title: str
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    cells: Mapping[tuple[str, str], float]  # points


def heat_maps(story: Story) -> list[HeatMap]:
    """Return the maps of a story, or none if it does not ask for them."""
    if story.heat is None:
        return []
    ahead, behind = story.heat
    found: dict[str, dict[tuple[str, str], float | None]] = {}
    for panel in story.panels:
        title, row, column = _place(panel.title)
        found.setdefault(title, {})[row, column] = _gap(panel, ahead, behind)
    return [_map(title, cells) for title, cells in found.items()]


def heat_verdict(story: Story) -> str:
    """Say in how many settings one method ends above the other."""
    gaps = [gap for one in heat_maps(story) for gap in one.cells.values()]
    if story.heat is None or not gaps:
        return ""
    ahead, behind = story.heat
    above = sum(gap > 0 for gap in gaps)
    return (
        f"{ahead} ends above {behind} in {above} of {len(gaps)} settings; the gap goes from "
        f"{points(min(gaps))} to {points(max(gaps))} points."
    )


def _map(title: str, cells: Mapping[tuple[str, str], float | None]) -> HeatMap:
    rows, columns = (tuple(dict.fromkeys(names)) for names in zip(*cells, strict=True))
    known = {place: value for place, value in cells.items() if value is not None}
    return HeatMap(title, rows, columns, known)


def _place(title: str) -> tuple[str, str, str]:
    """Return map, row and column.

    >>> _place("LeNet, 128 epochs, IID, E = 1"), _place("IID, E = 1")
    (('LeNet, 128 epochs', 'IID', 'E = 1'), ('', 'IID', 'E = 1'))
    """
    *rest, row, column = ["", *title.split(", ")] if ", " in title else ["", "", title]
    return ", ".join(part for part in rest if part), row, column


def _gap(panel: Panel, ahead: str, behind: str) -> float | None:
    finals = {s.strategy: finite(s.accuracy) for s in panel.comparison.summaries()}
    one, other = finals.get(ahead), finals.get(behind)
    return None if one is None or other is None else 100 * (one - other)


def heat_figure(maps: Sequence[HeatMap], heat: tuple[str, str], ink: str) -> Figure:
    """Draw the maps: green where the first method is behind, purple where it is ahead."""
    most = max((abs(v) for one in maps for v in one.cells.values()), default=0.0) or 1.0
    title = f"{heat[0]} minus {heat[1]}, points"
    return heat_grid(maps, title, ink, colours=("PRGn_r", -most, most), sign="+")


def heat_grid(
    maps: Sequence[HeatMap], title: str, ink: str, *, colours: tuple[str, float, float], sign: str
) -> Figure:
    """Draw maps side by side; `colours` are a colour map of matplotlib's and the ends of it."""
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
        _draw(axes, one, colours, ink)
        _write(axes, one, colours, sign)
    result.suptitle(title, x=0.01, ha="left", color=ink, fontsize=9)
    return result


def _draw(axes: Axes, one: HeatMap, colours: tuple[str, float, float], ink: str) -> None:
    values = np.full((len(one.rows), len(one.columns)), np.nan)
    for (row, column), value in one.cells.items():
        values[one.rows.index(row), one.columns.index(column)] = value
    # Drawn as shapes: the page's policy refuses pictures, even embedded ones.
    edges = [np.arange(len(names) + 1) - 0.5 for names in (one.columns, one.rows)]
    name, low, high = colours
    axes.pcolormesh(*edges, values, cmap=name, vmin=low, vmax=high)
    axes.invert_yaxis()
    axes.set_title(one.title, loc="left", color=ink, fontsize=10)
    axes.set_xticks(range(len(one.columns)), one.columns)
    axes.set_yticks(range(len(one.rows)), one.rows)
    axes.tick_params(colors=ink, length=0, labelsize=8)
    axes.spines[:].set_visible(False)


def _write(axes: Axes, one: HeatMap, colours: tuple[str, float, float], sign: str) -> None:
    _, low, high = colours
    for (row, column), value in one.cells.items():
        # Both ends of a scale around 0 are dark; of one that begins at 0, the upper end is.
        dark = abs(value) > _DARK * max(abs(low), abs(high))
        x, y = one.columns.index(column), one.rows.index(row)
        color = "white" if dark else "black"
        axes.text(x, y, f"{value:{sign}.1f}", ha="center", va="center", color=color, fontsize=8)
