"""Writes a report into its folder: each file is there as a whole or not at all."""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fednorm.experiment.result import SCHEMA, Comparison, without_nan
from fednorm.experiment.story import Panel, Story
from fednorm.report.agreement import agreement
from fednorm.report.page import page
from fednorm.report.plain import as_story
from fednorm.report.plots import curves


def write(comparison: Comparison, folder: Path) -> Path:
    """Write results.json, curves.png and report.html; return the path of the page."""
    return _write(as_story(comparison), comparison.to_json(), folder)


def write_story(story: Story, folder: Path) -> Path:
    """Write results.json with all panels, curves.png and report.html; return the page's path."""
    record = {
        "schema": SCHEMA,
        "title": story.title,
        "question": story.question,
        "source": story.source,
        "command": story.command,
        "cuts": list(story.cuts),
        "panels": [_panel(panel) for panel in story.panels],
    }
    return _write(story, record, folder)


def _panel(panel: Panel) -> dict[str, Any]:
    found = agreement(panel)
    return {
        "title": panel.title,
        "published": dict(panel.published),
        "published_std": dict(panel.published_std),
        "published_exchanges": dict(panel.published_exchanges),
        "agreement": found.to_json() if found else None,
        **panel.comparison.to_json(),
    }


def _write(story: Story, record: Mapping[str, Any], folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    report = folder / "report.html"
    with replacing(folder / "results.json") as path:
        text = json.dumps(without_nan(record), indent=2, allow_nan=False)
        path.write_text(text + "\n", encoding="utf-8")
    with replacing(folder / "curves.png") as path:
        curves(story, path)
    with replacing(report) as path:
        path.write_text(page(story), encoding="utf-8")
    return report


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give a temporary path beside the real one, which it replaces if all goes well."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
