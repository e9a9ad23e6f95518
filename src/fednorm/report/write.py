"""Write a report into its folder; each file is replaced as a whole."""

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import IO, Any

from fednorm.experiment.results import SCHEMA, Comparison, FigureResult, PanelResult, replace_nan
from fednorm.report.curves import draw_figure
from fednorm.report.format import describe_setting
from fednorm.report.heatmaps import (
    collect_gap_maps,
    draw_gap_maps,
    draw_grid_maps,
    find_swept,
    is_full,
)
from fednorm.report.page import render_page
from fednorm.report.series import collect_plots
from fednorm.report.styles import write_png
from fednorm.report.verdict import compare_published
from fednorm.system import atomic_write

DRAWN = ("finals", "curves", "heat", "smoke")  # how a figure is drawn, unless as usual
QUESTION = "Which normalization survives these clients?"


def write_comparison(comparison: Comparison, folder: Path) -> Path:
    """Write results.json, curves.png and report.html; return the path of the page."""
    return _write(wrap_comparison(comparison), comparison.to_json(), folder)


def wrap_comparison(comparison: Comparison) -> FigureResult:
    """Wrap a comparison that reproduces nothing: one panel without a title."""
    return FigureResult(
        title="",
        question=QUESTION,
        command="fednorm run config.toml",
        panels=(PanelResult("", comparison),),
    )


def write_figure(figure: FigureResult, folder: Path) -> Path:
    """Write results.json with all panels, curves.png and report.html; return the page's path."""
    record = {
        "schema": SCHEMA,
        "title": figure.title,
        "question": figure.question,
        "source": figure.source,
        "command": figure.command,
        "cuts": list(figure.cuts),
        **{key: value for key in DRAWN if (value := getattr(figure, key))},
        "panels": [_record_panel(panel) for panel in figure.panels],
    }
    return _write(figure, record, folder)


def _record_panel(panel: PanelResult) -> dict[str, Any]:
    found = compare_published(panel)
    return {
        "title": panel.title,
        "published": dict(panel.published),
        "published_std": dict(panel.published_std),
        "published_exchanges": dict(panel.published_exchanges),
        **({"best": True} if panel.best else {}),
        "agreement": found.to_json() if found else None,
        **panel.comparison.to_json(),
    }


def _write(figure: FigureResult, record: Mapping[str, Any], folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    report = folder / "report.html"
    with atomic_write(folder / "results.json") as file:
        text = json.dumps(replace_nan(record), indent=2, allow_nan=False)
        file.write(f"{text}\n".encode())
    with atomic_write(folder / "curves.png") as file:
        write_curves(figure, file)
    with atomic_write(report) as file:
        file.write(render_page(figure, (folder / "curves.png").read_bytes()).encode())
    return report


def write_curves(figure: FigureResult, file: IO[bytes]) -> None:
    """Write the curves of all panels as one PNG, or the heat maps of a swept grid."""
    compared = [panel.comparison for panel in figure.panels]
    title = figure.title or " – ".join(describe_setting(c.config, c.label_counts) for c in compared)
    maps = collect_gap_maps(figure)
    if (swept := find_swept(figure)) and is_full(swept):
        write_png(partial(draw_grid_maps, swept), file)
    elif figure.heat and maps and not figure.curve_panels:
        write_png(partial(draw_gap_maps, maps, figure.heat), file)
    else:
        write_png(lambda ink: draw_figure(collect_plots(figure), ink=ink, title=title), file)
