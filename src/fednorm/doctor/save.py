"""Writes a report."""

from pathlib import Path

from fednorm.doctor.report import Report
from fednorm.experiment.load import ConfigError


def save(report: Report, path: Path) -> None:
    """Write a report as JSON."""
    try:
        path.write_text(report.to_json() + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{str(path)!r} cannot be written: {error.strerror}.") from None
