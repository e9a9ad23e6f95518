"""Files inside the page: tables as CSV, the figure, and the configuration, as data links.

The page is one file that works without a network, so its downloads are part of it.
"""

import csv
from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence
from io import StringIO
from typing import Any

import tomli_w

from fednorm.experiment.results import FigureResult
from fednorm.report.tables import fill_rows

_BY_ROUND = ("panel", "strategy", "seed", "round", "accuracy", "loss", "train_loss")


def list_downloads(figure: FigureResult, *, png: bytes, svg: str) -> dict[str, str]:
    """Return the links by file name; a figure that is not given has none."""
    files: dict[str, tuple[str, bytes]] = {
        "results.csv": ("text/csv", _write_results(figure).encode()),
        "curves.csv": ("text/csv", _write_curves(figure).encode()),
        "curves.svg": ("image/svg+xml", svg.encode()),
        "curves.png": ("image/png", png),
    }
    if len(figure.panels) == 1:
        config = tomli_w.dumps(_drop_missing(figure.panels[0].comparison.config))
        files["config.toml"] = ("application/toml", config.encode())
    return {
        name: f"data:{kind};base64,{b64encode(content).decode()}"
        for name, (kind, content) in files.items()
        if content
    }


def _write_results(figure: FigureResult) -> str:
    rows = [
        {"panel": panel.title, **row}
        for panel in figure.panels
        for row in fill_rows(panel.comparison)
    ]
    return _write_csv(list(dict.fromkeys(key for row in rows for key in row)), rows)


def _write_curves(figure: FigureResult) -> str:
    """Write every evaluation of every run; accuracies are fractions, unrounded."""
    values = (
        (panel.title, run.strategy, run.seed, e.round, e.accuracy, e.loss, e.train_loss)
        for panel in figure.panels
        for run in panel.comparison.runs
        for e in run.history
    )
    return _write_csv(_BY_ROUND, (dict(zip(_BY_ROUND, row, strict=True)) for row in values))


def _write_csv(columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> str:
    text = StringIO()
    writer = csv.DictWriter(text, columns, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _drop_missing(value: Any) -> Any:
    """Leave out keys without a value, which TOML cannot write."""
    if isinstance(value, Mapping):
        return {key: _drop_missing(item) for key, item in value.items() if item is not None}
    return [_drop_missing(item) for item in value] if isinstance(value, list | tuple) else value
