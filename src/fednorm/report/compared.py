"""The table of published and measured numbers, for the terminal and for the page."""

from statistics import fmean

from fednorm.experiment.story import Panel
from fednorm.report.agreement import Agreement, Row
from fednorm.report.numbers import MISSING, mean_and_spread, plain, points
from fednorm.report.tables import STRATEGY, Cell


def compared(found: Agreement, *, best: bool) -> list[dict[str, Cell]]:
    """Return a row for each method, by column."""
    return [_row(row, "best measured %" if best else "measured %") for row in found.rows]


def _row(row: Row, measured: str) -> dict[str, Cell]:
    mean = None if row.measured is None else row.measured / 100
    before = MISSING if row.published is None else f"{row.published:.1f}"
    if row.published_std is not None:
        before += f" ± {row.published_std:.1f}"
    return {
        STRATEGY: Cell(row.label),
        "published %": Cell(before, row.published),
        measured: Cell(mean_and_spread(mean, row.spread / 100, row.seeds), row.measured),
        "gap": Cell(points(row.gap), row.gap),
        "seeds": Cell(str(row.seeds), row.seeds),
    }


def compared_exchanges(panel: Panel) -> list[dict[str, Cell]]:
    """Return published and counted exchanges of each method; nothing if none were published."""
    if not panel.published_exchanges:
        return []
    rows = []
    for summary in panel.comparison.summaries():
        before = panel.published_exchanges.get(summary.strategy)
        counted = fmean(run.exchanges_per_round for run in summary.runs)
        rows.append(
            {
                STRATEGY: Cell(summary.strategy),
                "published": Cell(plain(before), before),
                "counted": Cell(plain(counted), counted),
            }
        )
    return rows
