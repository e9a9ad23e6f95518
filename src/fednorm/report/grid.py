"""Heat maps of a comparison that was swept: attacks down, defences across, one map a strategy.

What an entry sets for itself says where its cell is: keys that say what clients do wrong make the
rows, keys that say how the server combines replies make the columns. A key that is the same in all
entries makes neither. The number of a cell is the final accuracy in per cent.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

from fednorm.experiment.result import Comparison
from fednorm.report.heat import HeatMap, heat_grid
from fednorm.report.numbers import finite

_WRONG = ("attack", "attack_target", "byzantine", "dropout")
_RIGHT = ("aggregate", "aggregate_statistics", "minimum_replies")


def grid_maps(comparison: Comparison) -> list[HeatMap]:
    """Return one map for each strategy, or none if entries differ in rows or columns alone."""
    swept = _swept(comparison)
    rows, columns = (_differing(swept, keys) for keys in (_WRONG, _RIGHT))
    if not rows or not columns:
        return []
    finals = {s.strategy: finite(s.accuracy) for s in comparison.summaries()}
    found: dict[str, dict[tuple[str, str], float]] = {}
    for entry in swept:
        accuracy = finals.get(entry["label"])
        if accuracy is not None:
            place = _words(entry, rows), _words(entry, columns)
            found.setdefault(entry["name"], {})[place] = 100 * accuracy
    # All maps have the same rows and columns, so that cells can be compared by their place.
    down = tuple(dict.fromkeys(_words(entry, rows) for entry in swept))
    across = tuple(dict.fromkeys(_words(entry, columns) for entry in swept))
    return [HeatMap(name, down, across, cells) for name, cells in found.items()]


def is_full(comparison: Comparison) -> bool:
    """Return whether every strategy was to be run in every row and column."""
    swept = _swept(comparison)
    rows, columns = (_differing(swept, keys) for keys in (_WRONG, _RIGHT))
    places = {(e["name"], _words(e, rows), _words(e, columns)) for e in swept}
    runs = Counter(name for name, _, _ in places)
    maps = grid_maps(comparison)
    return bool(maps) and all(runs[m.title] == len(m.rows) * len(m.columns) for m in maps)


def _swept(comparison: Comparison) -> list[Mapping[str, Any]]:
    entries = [e for e in comparison.config.get("strategies", []) if isinstance(e, Mapping)]
    return [e for e in entries if e.get("label") and any(key in e for key in _WRONG + _RIGHT)]


def grid_figure(comparison: Comparison, ink: str) -> Figure:
    """Draw the maps; the darker a cell, the higher the accuracy."""
    title = f"final {comparison.metric}, %"
    return heat_grid(grid_maps(comparison), title, ink, colours=("Blues", 0.0, 100.0), sign="")


def _differing(entries: Sequence[Mapping[str, Any]], keys: Sequence[str]) -> list[str]:
    return [key for key in keys if len({_word(entry.get(key)) for entry in entries}) > 1]


def _words(entry: Mapping[str, Any], keys: Sequence[str]) -> str:
    """Return the values of the keys, each once: a rule for updates and statistics is one rule."""
    told = (
        _word(entry[key]) if isinstance(entry[key], str | Mapping) else f"{key} {entry[key]}"
        for key in keys
        if key in entry
    )
    return ", ".join(dict.fromkeys(told))


def _word(value: Any) -> str:
    return str(value.get("name")) if isinstance(value, Mapping) else str(value)
