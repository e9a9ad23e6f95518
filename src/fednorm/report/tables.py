"""Tables with one row for each strategy, for the terminal and the page.

A comparison has measured numbers; a published figure adds the published ones and says whether the
order of methods is the same.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from textwrap import fill
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from fednorm.experiment.results import Comparison, FigureResult, PanelResult, RunResult, Summary
from fednorm.experiment.summary.result_table import (
    MISSING,
    format_mean,
    format_percent,
    format_points,
    keep_finite,
)
from fednorm.report.format import (
    Column,
    capitalize,
    format_bytes,
    format_figure,
    format_number,
    format_ratio,
    make_table,
)
from fednorm.report.ranking import is_level, is_personal, is_uniform, measure_lead, rank
from fednorm.report.styles import choose_style
from fednorm.report.verdict import Agreement, Row, compare_published

STRATEGY, NOTE = "strategy", "note"  # the columns of text; all others hold numbers
_DELTA, _WORST, _SUCCESS, _EPSILON = "Δ", "worst client %", "attack success %", "ε"
# Left out first where a terminal is too narrow; then the user's metrics, the last one first.
_LEAST = ("s / run", "exchanges / round", "down / round", "up / round", "best %")
_LABEL_LENGTH = 24  # longer ones wrap
_NOTE_LENGTH = 60  # the page has the whole message under "Failures"


@dataclass(frozen=True)
class RowGroup:
    """Rows whose numbers may be compared with each other."""

    title: str
    rows: tuple[dict[str, "Cell"], ...]
    best: frozenset[str]  # strategies: the best one and those level with it; none if all are,
    # or if their data differ


@dataclass(frozen=True)
class Cell:
    """The text of a cell, and the number by which rows are sorted."""

    text: str
    value: float | None = None


def list_columns(comparison: Comparison) -> list[str]:
    """Return the titles of the columns; optional ones only if they were measured."""
    titles = [
        STRATEGY,
        _name_final(comparison),
        _DELTA,
        "best %",
        *_list_metrics(comparison),
        _WORST,
        _SUCCESS,
        _EPSILON,
        "exchanges / round",
        "up / round",
        "down / round",
        "s / run",
        NOTE,
    ]
    summaries, ranking = comparison.summaries(), rank(comparison)
    measured = {
        _DELTA: ranking.reference is not None
        and bool(ranking.federated)
        and is_uniform(comparison),
        _WORST: any(s.worst_client is not None for s in summaries),
        _SUCCESS: any(s.attack_success is not None for s in summaries),
        _EPSILON: any(run.delta is not None for run in comparison.runs),
    }
    shown = [title for title in titles if measured.get(title, True)]
    return [STRATEGY, *_list_tuned(comparison), *shown[1:]]


def _list_tuned(comparison: Comparison) -> list[str]:
    return list(dict.fromkeys(key for values in comparison.chosen.values() for key in values))


def _list_metrics(comparison: Comparison) -> list[str]:
    """Return the names of the user's metrics."""
    return list(dict.fromkeys(name for s in comparison.summaries() for name in s.metrics))


def fill_cells(comparison: Comparison) -> list[dict[str, Cell]]:
    """Return the rows by column, in the order in which the strategies were run."""
    titles = list_columns(comparison)
    seeds = len({run.seed for run in comparison.runs})
    final, reference = _name_final(comparison), rank(comparison).reference
    filled = [
        _fill_row(s, final, seeds) | {_DELTA: _fill_delta(s, reference)}
        for s in comparison.summaries()
    ]
    for row in filled:
        chosen = comparison.chosen.get(row[STRATEGY].text, {})
        row |= {key: _write_choice(chosen.get(key)) for key in _list_tuned(comparison)}
    return [{title: row.get(title, Cell(MISSING)) for title in titles} for row in filled]


def _fill_delta(summary: Summary, reference: Summary | None) -> Cell:
    """Return the points above the reference; none of what is not tested as the reference is."""
    same = reference is None or summary.strategy == reference.strategy
    if reference is None or same or is_personal(summary) or keep_finite(summary.accuracy) is None:
        return Cell(MISSING)
    points = 100 * measure_lead(summary, reference)
    return Cell(format_points(points), points)


def group_rows(comparison: Comparison) -> list[RowGroup]:
    """Return the rows of global models, then those of personal ones."""
    ranking, rows = rank(comparison), fill_cells(comparison)
    personal = {s.strategy for s in comparison.summaries() if is_personal(s)}
    title = f"Personal models: mean over clients, each on {comparison.tested_on}"
    groups = []
    for kind, heading in ((ranking.federated, ""), (ranking.personal, title)):
        own = tuple(row for row in rows if (row[STRATEGY].text in personal) == bool(heading))
        best = frozenset(s.strategy for s in kind if is_level(s, kind[0]))
        told = len(best) < len(kind) and is_uniform(comparison)
        groups.append(RowGroup(heading, own, best if told else frozenset()))
    return [group for group in groups if group.rows]


def _write_choice(value: Any) -> Cell:
    number = isinstance(value, int | float)
    return Cell(MISSING if value is None else str(value), float(value) if number else None)


def fill_rows(comparison: Comparison) -> list[dict[str, str]]:
    """Return the rows as text."""
    return [{title: cell.text for title, cell in row.items()} for row in fill_cells(comparison)]


def build_table(comparison: Comparison, width: int | None = None) -> Table:
    """Return the table for the terminal, without the columns that do not fit into `width`."""
    rows = fill_rows(comparison)
    columns = {title: _make_column(title, rows) for title in list_columns(comparison)}
    left_out = []
    for title in [*_LEAST, *reversed(_list_metrics(comparison))]:
        if width is None or _measure_width(columns, rows) <= width:
            break
        if columns.pop(title, None):
            left_out.append(title)
    caption = f"\n{write_caption(comparison)}"
    if left_out:
        caption += f" Not shown at this width: {', '.join(left_out)}."
    cells = [[row[title] for title in columns] for row in rows]
    return _color_labels(list(columns.values()), cells, caption=caption)


def _make_column(title: str, rows: Iterable[Mapping[str, str]]) -> Column:
    """Return a column whose title is no wider than its cells and words: terminals are narrow."""
    widest = max(len(cell) for cell in (*title.split(), *(row[title] for row in rows)))
    wraps = title == NOTE or (title == STRATEGY and widest > _LABEL_LENGTH)
    text = title in {STRATEGY, NOTE}
    return Column(fill(title, widest, break_long_words=False), numbers=not text, wraps=wraps)


def _measure_width(columns: Mapping[str, Column], rows: Sequence[Mapping[str, str]]) -> int:
    """Return the least width of a table: cells of text may wrap between words."""
    total = len(columns) - 1
    for title, column in columns.items():
        cells = [row[title] for row in rows]
        parts = [word for cell in cells for word in cell.split()] if column.wraps else cells
        total += max(map(len, [*column.title.split("\n"), *parts]))
    return total


def color_label(label: str) -> Text:
    """Return the label of a method in the colour that it has in plots."""
    return Text(label, style=f"bold {choose_style(label).color}")


def write_caption(comparison: Comparison) -> str:
    """Explain the numbers of the table."""
    seeds = len({run.seed for run in comparison.runs})
    over = f"mean ± sample standard deviation over {seeds} seeds" if seeds > 1 else "one seed"
    metric = capitalize(comparison.metric)
    reference = rank(comparison).reference
    told = reference is not None and _DELTA in list_columns(comparison)
    delta = f" Δ: points above {reference.strategy}." if reference and told else ""
    text = (
        f"{metric}: {over}.{delta} Up and down: bytes that one client sends and receives per round."
    )
    deltas = sorted({run.delta for run in comparison.runs if run.delta is not None})
    at = " or ".join(f"{delta:g}" for delta in deltas)
    return (
        f"{text} ε: of the whole run, at δ = {at}, if one client is added or removed."
        if at
        else text
    )


def _name_final(comparison: Comparison) -> str:
    return f"final {comparison.metric} %"


def _fill_row(summary: Summary, final: str, seeds: int) -> dict[str, Cell]:
    evaluated = sum(bool(run.history) for run in summary.runs)
    mean = format_mean(summary.accuracy, summary.spread, evaluated)
    started = [run for run in summary.runs if run.rounds]
    numbers = {
        "best %": (format_percent, summary.best),
        _WORST: (format_percent, summary.worst_client),
        _SUCCESS: (format_percent, summary.attack_success),
        _EPSILON: (format_ratio, summary.epsilon),
        "exchanges / round": (format_number, _average(run.exchanges_per_round for run in started)),
        "up / round": (format_bytes, _average(run.bytes_up_per_round for run in started)),
        "down / round": (format_bytes, _average(run.bytes_down_per_round for run in started)),
        "s / run": (format_number, _average(run.seconds for run in summary.runs)),
    }
    written = {
        title: Cell(write(value), keep_finite(value)) for title, (write, value) in numbers.items()
    }
    written[final] = Cell(mean, keep_finite(summary.accuracy))
    for name, (value, spread) in summary.metrics.items():
        written[name] = Cell(format_figure(value, spread, evaluated), keep_finite(value))
    note = Cell("; ".join(_list_notes(summary, seeds)))
    return {STRATEGY: Cell(summary.strategy), **written, NOTE: note}


def _average(values: Iterable[float]) -> float | None:
    listed = list(values)
    return fmean(listed) if listed else None


def _list_notes(summary: Summary, seeds: int) -> list[str]:
    notes = ["mean over clients"] if any(run.personal for run in summary.runs) else []
    if summary.untrained is not None:
        trained, untrained = (format_percent(x) for x in (summary.trained, summary.untrained))
        notes = [f"mean over clients ({trained} % trained, {untrained} % untrained)"]
    if len(summary.runs) < seeds:
        notes.append(f"{len(summary.runs)} of {seeds} seeds")
    alike: dict[str, list[RunResult]] = {}
    for run in summary.failures:
        alike.setdefault(_describe_failure(run), []).append(run)
    for failure, runs in alike.items():
        listed = ", ".join(str(run.seed) for run in runs)
        notes.append(f"seed{'s' if len(runs) > 1 else ''} {listed} {failure}")
    if early := [run for run in summary.runs if run.status == "stopped early"]:
        who = ", ".join(sorted({run.stopped_by or "" for run in early}))
        ends = ", ".join(str(run.rounds) for run in early)
        notes.append(f"stopped by {who} after round{'s' if len(early) > 1 else ''} {ends}")
    for count, one, more, what in (
        (sum(run.rejected for run in summary.runs), "reply", "replies", "rejected"),
        (sum(run.dropped_out for run in summary.runs), "reply", "replies", "lost"),
        (sum(run.retries for run in summary.runs), "attempt", "attempts", "repeated"),
    ):
        notes += [f"{count} {one if count == 1 else more} {what}"] if count else []
    return notes


def _describe_failure(run: RunResult) -> str:
    message = " ".join((run.error or "").split())
    if len(message) > _NOTE_LENGTH:
        start = message[:_NOTE_LENGTH]
        message = (start.rsplit(" ", 1)[0] if " " in start else start) + " …"
    return f"{run.status}: {message}" if message else run.status


def compare_accuracies(found: Agreement, *, best: bool) -> list[dict[str, Cell]]:
    """Return a row for each method, by column."""
    return [_compare_row(row, "best measured %" if best else "measured %") for row in found.rows]


def _compare_row(row: Row, measured: str) -> dict[str, Cell]:
    mean = None if row.measured is None else row.measured / 100
    before = MISSING if row.published is None else f"{row.published:.1f}"
    if row.published_std is not None:
        before += f" ± {row.published_std:.1f}"
    return {
        STRATEGY: Cell(row.label),
        "published %": Cell(before, row.published),
        measured: Cell(format_mean(mean, row.spread / 100, row.seeds), row.measured),
        "gap": Cell(format_points(row.gap), row.gap),
        "seeds": Cell(str(row.seeds), row.seeds),
    }


def compare_exchanges(panel: PanelResult) -> list[dict[str, Cell]]:
    """Return published and measured exchanges of each method; none if none are published."""
    rows = []
    for summary in panel.comparison.summaries() if panel.published_exchanges else ():
        before = panel.published_exchanges.get(summary.strategy)
        counted = fmean(run.exchanges_per_round for run in summary.runs)
        numbers = {"published": before, "measured": counted}
        cells = {title: Cell(format_number(value), value) for title, value in numbers.items()}
        rows.append({STRATEGY: Cell(summary.strategy), **cells})
    return rows


def build_figure_table(figure: FigureResult, width: int | None = None) -> Group:
    """Return the panels one below the other."""
    return Group(
        *(part for panel in figure.panels for part in (*_show_panel(panel, width), Text()))
    )


def _show_panel(panel: PanelResult, width: int | None) -> Iterator[RenderableType]:
    found = compare_published(panel)
    if rows := compare_exchanges(panel):
        yield Text("Exchanges per round, published and measured", style="bold")
        yield _build_comparison(rows)
    title = f"{panel.title}: " if panel.title else ""
    if not found:
        yield Text(f"{title}{panel.comparison.metric}", style="bold")
        yield build_table(panel.comparison, width)
        return
    yield Text(f"{title}{panel.comparison.metric}, published and measured", style="bold")
    yield _build_comparison(compare_accuracies(found, best=panel.best))
    yield Text(found.describe())


def _build_comparison(rows: Sequence[Mapping[str, Cell]]) -> Table:
    columns = [
        Column(title, numbers=title != STRATEGY, wraps=title == STRATEGY) for title in rows[0]
    ]
    return _color_labels(columns, [[cell.text for cell in row.values()] for row in rows])


def _color_labels(
    columns: Sequence[Column], rows: Iterable[Sequence[str]], caption: str = ""
) -> Table:
    """Return a table whose first column names methods in the colours of the plots."""
    colored: list[list[str | Text]] = [[color_label(label), *cells] for label, *cells in rows]
    return make_table(columns, colored, caption=caption)
