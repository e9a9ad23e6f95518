"""Write a report into its folder; each file is replaced as a whole."""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from fednorm.experiment.results import SCHEMA, Comparison, FigureResult, PanelResult, replace_nan
from fednorm.report.agreement import compare_published
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

QUESTION = "Which normalization survives these clients?"


def write_comparison(comparison: Comparison, folder: Path) -> Path:
    """Write results.json, curves.png and report.html; return the path of the page."""
    return _write(tell_story(comparison), comparison.to_json(), folder)


def tell_story(comparison: Comparison) -> FigureResult:
    """Wrap a comparison that reproduces nothing: one panel without a title."""
    return FigureResult(
        title="",
        question=QUESTION,
        command="fednorm run config.toml",
        panels=(PanelResult("", comparison),),
    )


def write_story(story: FigureResult, folder: Path) -> Path:
    """Write results.json with all panels, curves.png and report.html; return the page's path."""
    record = {
        "schema": SCHEMA,
        "title": story.title,
        "question": story.question,
        "source": story.source,
        "command": story.command,
        "cuts": list(story.cuts),
        "panels": [_record_panel(panel) for panel in story.panels],
    }
    return _write(story, record, folder)


def _record_panel(panel: PanelResult) -> dict[str, Any]:
    found = compare_published(panel)
    return {
        "title": panel.title,
        "published": dict(panel.published),
        "published_std": dict(panel.published_std),
        "published_exchanges": dict(panel.published_exchanges),
        "agreement": found.to_json() if found else None,
        **panel.comparison.to_json(),
    }


def _write(story: FigureResult, record: Mapping[str, Any], folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    report = folder / "report.html"
    with replace_file(folder / "results.json") as path:
        text = json.dumps(replace_nan(record), indent=2, allow_nan=False)
        path.write_text(text + "\n", encoding="utf-8")
    with replace_file(folder / "curves.png") as path:
        write_curves(story, path)
    with replace_file(report) as path:
        path.write_text(render_page(story), encoding="utf-8")
    return report


def write_curves(story: FigureResult, path: Path) -> None:
    """Write the curves of all panels as one PNG, or the heat maps of a swept grid."""
    title = story.title or " – ".join(describe_setting(p.comparison.config) for p in story.panels)
    maps = collect_gap_maps(story)
    if (swept := find_swept(story)) and is_full(swept):
        write_png(partial(draw_grid_maps, swept), path)
    elif story.heat and maps and not story.curve_panels:
        write_png(partial(draw_gap_maps, maps, story.heat), path)
    else:
        write_png(lambda ink: draw_figure(collect_plots(story), ink=ink, title=title), path)


@contextmanager
def replace_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path, which replaces `path` on success."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
