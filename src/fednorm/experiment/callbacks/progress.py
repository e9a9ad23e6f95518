"""The live view of a comparison: bars in a terminal or a notebook, elsewhere plain lines."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from importlib.util import find_spec
from typing import ClassVar

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from fednorm.experiment.callbacks.base import Callback
from fednorm.experiment.comparison import make_validation
from fednorm.experiment.results import Event, RunResult
from fednorm.experiment.schema.config import Experiment

SECONDS, SHARE = 10.0, 0.1  # between lines: so long, or so much of all rounds
_SHORTEST = 1.0  # seconds between lines in any case


@contextmanager
def show_progress(
    experiment: Experiment, console: Console, lines: Console | None = None
) -> Iterator[Callback]:
    """Show how far a comparison is: bars if `console` can, else plain text in `lines`."""
    if not can_draw(console):
        write = partial((lines or console).print, markup=False, highlight=False, soft_wrap=True)
        yield PlainProgress(experiment, write)
        return
    bar = Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[news]}", markup=False),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
    )
    with bar:
        yield ProgressBars(experiment, bar)


def can_draw(console: Console) -> bool:
    """Return whether bars can move there: in a terminal, or a notebook with ipywidgets."""
    if console.is_jupyter:
        return find_spec("ipywidgets") is not None
    return console.is_terminal


class ProgressCount(Callback):
    """Counts the rounds of all runs of a comparison, those of the validation runs too."""

    observes: ClassVar[bool] = True

    def __init__(self, experiment: Experiment) -> None:
        parts = [make_validation(experiment), experiment] if experiment.tune else [experiment]
        self.rounds = {e.title: p.for_entry(e).rounds for p in parts for e in p.strategies}
        each = (len(p.seeds) * sum(self.rounds[e.title] for e in p.strategies) for p in parts)
        self.all = sum(each)
        self.done: dict[str, int] = {}

    @property
    def sum(self) -> int:
        """The rounds that are done."""
        return sum(self.done.values())

    def on_round(self, event: Event) -> None:
        """Show a round."""
        self.done[_name(event)] = event.round
        self.show(event)

    def on_end(self, result: RunResult) -> None:
        """Count the rounds that a run which has ended early need not make."""
        if result.status != "interrupted":
            self.done[_name(result)] = self.rounds[result.strategy]

    def on_skip(self, result: RunResult) -> None:
        """Count the rounds of a run that is not repeated."""
        self.on_end(result)

    def show(self, event: Event) -> None:
        """Show a round."""
        raise NotImplementedError


def _name(run: Event | RunResult) -> str:
    return f"{run.strategy} seed {run.seed}"


class ProgressBars(ProgressCount):
    """One bar for the whole comparison and one for each run under way."""

    def __init__(self, experiment: Experiment, bar: Progress) -> None:
        super().__init__(experiment)
        self.bar = bar
        self.total = bar.add_task("all rounds", total=self.all, news="")
        self.shown: dict[str, TaskID] = {}

    def show(self, event: Event) -> None:
        """Move the bars."""
        name = _name(event)
        if name not in self.shown:
            whole = self.rounds[event.strategy]
            self.shown[name] = self.bar.add_task(name, total=whole, news="")
        self.bar.update(self.total, completed=self.sum)
        self.bar.update(self.shown[name], completed=event.round)
        if event.evaluation is not None:
            accuracy, loss = event.evaluation.accuracy, event.evaluation.loss
            news = f"{event.metric} {accuracy:.1%}  loss {loss:.3f}"
            self.bar.update(self.shown[name], news=news)

    def on_end(self, result: RunResult) -> None:
        """Take the bar of a run away."""
        super().on_end(result)
        self.bar.update(self.total, completed=self.sum)
        if _name(result) in self.shown:
            self.bar.update(self.shown[_name(result)], visible=False)


class PlainProgress(ProgressCount):
    """A line every ten seconds, or for each tenth of all rounds."""

    def __init__(self, experiment: Experiment, write: Callable[[str], None]) -> None:
        super().__init__(experiment)
        self.write, self.begun = write, time.monotonic()
        self.last, self.told = self.begun, 0
        self.accuracy: dict[str, float] = {}

    def show(self, event: Event) -> None:
        """Write a line if it is time."""
        if event.evaluation is not None:
            self.accuracy[_name(event)] = event.evaluation.accuracy
        now = time.monotonic()
        enough = self.sum - self.told >= SHARE * self.all
        if now - self.last < (_SHORTEST if enough else SECONDS):
            return
        self.last, self.told = now, self.sum
        passed = timedelta(seconds=round(now - self.begun))
        known = self.accuracy.get(_name(event))
        news = "" if known is None else f", {event.metric} {known:.1%}"
        self.write(
            f"{self.sum} of {self.all} rounds after {passed}: {_name(event)}, "
            f"round {event.round}{news}"
        )
