"""Writes a comparison into its folder: each file is there as a whole or not at all."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fednorm.experiment.result import Comparison, without_nan
from fednorm.report.page import page
from fednorm.report.plots import curves


def write(comparison: Comparison, folder: Path) -> Path:
    """Write results.json, curves.png and report.html; return the path of the page."""
    folder.mkdir(parents=True, exist_ok=True)
    report = folder / "report.html"
    with replacing(folder / "results.json") as path:
        record = without_nan(comparison.to_json())
        text = json.dumps(record, indent=2, allow_nan=False)
        path.write_text(text + "\n", encoding="utf-8")
    with replacing(folder / "curves.png") as path:
        curves(comparison, path)
    with replacing(report) as path:
        path.write_text(page(comparison), encoding="utf-8")
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
