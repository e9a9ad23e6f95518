"""The table of published and measured numbers, for the terminal and for the page."""

from fednorm.report.agreement import Agreement, Row
from fednorm.report.numbers import MISSING, mean_and_spread, points
from fednorm.report.tables import STRATEGY, Cell


def compared(found: Agreement) -> list[dict[str, Cell]]:
    """Return a row for each method, by column."""
    return [_row(row) for row in found.rows]


def _row(row: Row) -> dict[str, Cell]:
    mean = None if row.measured is None else row.measured / 100
    before = MISSING if row.published is None else f"{row.published:.1f}"
    return {
        STRATEGY: Cell(row.label),
        "published %": Cell(before, row.published),
        "measured %": Cell(mean_and_spread(mean, row.spread / 100, row.seeds), row.measured),
        "gap": Cell(points(row.gap), row.gap),
        "seeds": Cell(str(row.seeds), row.seeds),
    }
