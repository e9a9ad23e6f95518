"""The table of a comparison: one row for each strategy, for the terminal and for the page."""

from collections.abc import Iterable
from dataclasses import dataclass
from statistics import fmean
from textwrap import fill
from typing import Literal

from rich import box
from rich.table import Table
from rich.text import Text

from fednorm.experiment.result import Comparison, RunResult, Summary
from fednorm.report.colors import style
from fednorm.report.numbers import finite, mean_and_spread, percent, plain, sentence_case, size

STRATEGY, NOTE = "strategy", "note"  # the columns of text; all others hold numbers
_WORST, _SUCCESS = "worst client %", "attack success %"
_NOTE_LENGTH = 60  # the page has the whole message under "Failures"


@dataclass(frozen=True)
class Cell:
    """What is written, and the number behind it by which rows are sorted."""

    text: str
    value: float | None = None


def columns(comparison: Comparison) -> list[str]:
    """Return the titles of the columns; some are there only if it was measured."""
    titles = [
        STRATEGY,
        _final(comparison),
        "best %",
        _WORST,
        _SUCCESS,
        "exchanges / round",
        "up / round",
        "down / round",
        "s / run",
        NOTE,
    ]
    summaries = comparison.summaries()
    measured = {
        _WORST: any(s.worst_client is not None for s in summaries),
        _SUCCESS: any(s.attack_success is not None for s in summaries),
    }
    return [title for title in titles if measured.get(title, True)]


def cells(comparison: Comparison) -> list[dict[str, Cell]]:
    """Return the rows by column, in the order in which the strategies were run."""
    titles = columns(comparison)
    seeds = len({run.seed for run in comparison.runs})
    filled = [
        {_final(comparison): _accuracy(summary), **_row(summary, seeds)}
        for summary in comparison.summaries()
    ]
    return [{title: row[title] for title in titles} for row in filled]


def rows(comparison: Comparison) -> list[dict[str, str]]:
    """Return the rows as text."""
    return [{title: cell.text for title, cell in row.items()} for row in cells(comparison)]


def table(comparison: Comparison) -> Table:
    """Return the table for the terminal."""
    result = Table(
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        padding=0,  # the box itself leaves one space; a line has 80 at worst
        caption=f"\n{caption(comparison)}",
        caption_justify="left",
    )
    filled = rows(comparison)
    for title in columns(comparison):
        header = _narrow(title, [row[title] for row in filled])
        justify: Literal["left", "right"] = "left" if title in {STRATEGY, NOTE} else "right"
        # Names and notes may wrap; a number that is cut would be read as another number.
        wraps = title in (STRATEGY, NOTE)
        width = None if wraps else max((len(row[title]) for row in filled), default=None)
        result.add_column(
            header, justify=justify, no_wrap=not wraps, min_width=width, overflow="fold"
        )
    for row in filled:
        label = Text(row[STRATEGY], style=f"bold {style(row[STRATEGY]).color}")
        result.add_row(label, *(Text(cell) for title, cell in row.items() if title != STRATEGY))
    return result


def _narrow(title: str, cells: Iterable[str]) -> str:
    """Break a title into lines no wider than its cells: terminals are narrow."""
    widest = max(len(text) for text in (*cells, *title.split()))
    return fill(title, widest, break_long_words=False)


def caption(comparison: Comparison) -> str:
    """Return what the numbers of the table mean."""
    seeds = len({run.seed for run in comparison.runs})
    over = f"mean ± standard deviation over {seeds} seeds" if seeds > 1 else "of one seed"
    metric = sentence_case(comparison.metric)
    return f"{metric}: {over}. Up and down: what one client sends and receives in a round."


def _final(comparison: Comparison) -> str:
    return f"final {comparison.metric} %"


def _accuracy(summary: Summary) -> Cell:
    evaluated = sum(bool(run.history) for run in summary.runs)
    text = mean_and_spread(summary.accuracy, summary.spread, evaluated)
    return Cell(text, finite(summary.accuracy))


def _row(summary: Summary, seeds: int) -> dict[str, Cell]:
    started = [run for run in summary.runs if run.rounds]
    numbers = {
        "best %": (percent, summary.best),
        _WORST: (percent, summary.worst_client),
        _SUCCESS: (percent, summary.attack_success),
        "exchanges / round": (plain, _mean(run.exchanges_per_round for run in started)),
        "up / round": (size, _mean(run.bytes_up_per_round for run in started)),
        "down / round": (size, _mean(run.bytes_down_per_round for run in started)),
        "s / run": (plain, _mean(run.seconds for run in summary.runs)),
    }
    written = {
        title: Cell(write(value), finite(value)) for title, (write, value) in numbers.items()
    }
    note = Cell("; ".join(_notes(summary, seeds)))
    return {STRATEGY: Cell(summary.strategy), **written, NOTE: note}


def _mean(values: Iterable[float]) -> float | None:
    listed = list(values)
    return fmean(listed) if listed else None


def _notes(summary: Summary, seeds: int) -> list[str]:
    notes = ["mean over clients"] if any(run.personal for run in summary.runs) else []
    if summary.untrained is not None:
        both = f"{percent(summary.trained)} % trained, {percent(summary.untrained)} % untrained"
        notes = [f"mean over clients ({both})"]
    if len(summary.runs) < seeds:
        notes.append(f"{len(summary.runs)} of {seeds} seeds")
    alike: dict[str, list[RunResult]] = {}
    for run in summary.failures:
        alike.setdefault(_failure(run), []).append(run)
    for failure, runs in alike.items():
        listed = ", ".join(str(run.seed) for run in runs)
        notes.append(f"seed{'s' if len(runs) > 1 else ''} {listed} {failure}")
    for what, count in _lost(summary.runs).items():
        if count:
            notes.append(f"{count} {'reply' if count == 1 else 'replies'} {what}")
    if repeated := sum(run.repeated for run in summary.runs):
        notes.append(f"{repeated} {'attempt' if repeated == 1 else 'attempts'} repeated")
    return notes


def _lost(runs: Iterable[RunResult]) -> dict[str, int]:
    listed = list(runs)
    return {
        "rejected": sum(run.rejected for run in listed),
        "lost": sum(run.vanished for run in listed),
    }


def _failure(run: RunResult) -> str:
    message = " ".join((run.error or "").split())
    if len(message) > _NOTE_LENGTH:
        start = message[:_NOTE_LENGTH]
        message = (start.rsplit(" ", 1)[0] if " " in start else start) + " …"
    return f"{run.status}: {message}" if message else run.status
