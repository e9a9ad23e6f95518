"""The live view of a comparison, and its end by Ctrl-C."""

import logging
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

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

from fednorm.experiment.results import Event
from fednorm.experiment.run import Callback
from fednorm.experiment.schema.config import Experiment
from fednorm.experiment.tuning import make_validation


@contextmanager
def show_conversions(console: Console) -> Iterator[None]:
    """Print what the conversion of a model replaced, a line for each strategy."""
    log, handler = logging.getLogger("fednorm.conversion"), logging.Handler()
    handler.emit = lambda record: console.print(  # type: ignore[method-assign]
        record.getMessage(), style="dim", highlight=False, markup=False
    )
    level = log.level
    log.setLevel(logging.INFO)
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(level)


@contextmanager
def show_progress(experiment: Experiment, console: Console) -> Iterator[Callback]:
    """Show one bar for the whole comparison and one for each run under way."""
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
    parts = [make_validation(experiment), experiment] if experiment.tune else [experiment]
    rounds = {e.title: part.for_entry(e).rounds for part in parts for e in part.strategies}
    every = sum(len(p.seeds) * sum(rounds[e.title] for e in p.strategies) for p in parts)
    total = bar.add_task("all rounds", total=every, news="")
    shown: dict[str, TaskID] = {}
    done: dict[str, int] = {}

    def on_round(event: Event) -> None:
        name = f"{event.strategy} seed {event.seed}"
        if name not in shown:
            shown[name] = bar.add_task(name, total=rounds[event.strategy], news="")
        done[name] = event.round
        bar.update(total, completed=sum(done.values()))
        bar.update(shown[name], completed=event.round)
        if event.evaluation is not None:
            accuracy, loss = event.evaluation.accuracy, event.evaluation.loss
            bar.update(shown[name], news=f"accuracy {accuracy:.1%}  loss {loss:.3f}")
        if event.round == rounds[event.strategy]:
            bar.update(shown[name], visible=False)

    with bar:
        yield on_round


@contextmanager
def catch_interrupts() -> Iterator[threading.Event]:
    """Yield a flag that the first Ctrl-C, or SIGTERM, sets; only the main thread can catch signals.

    Python raises KeyboardInterrupt wherever the program happens to be; in a destructor or a
    callback from compiled code the exception is lost. So the first one only sets a flag, which a
    run checks after each round; the second one interrupts at once.
    """
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def handle(number: int, frame: Any) -> None:
        if stop.is_set():
            signal.default_int_handler(number, frame)
        stop.set()
        sys.stderr.write("Stopping after this round; Ctrl-C again stops at once.\n")

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, old in before.items():
            signal.signal(number, old)
