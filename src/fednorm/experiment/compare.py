"""Strategies side by side: every strategy with every seed, in turn or several at once."""

import multiprocessing
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.queues import SimpleQueue
from multiprocessing.synchronize import Event as Flag
from pathlib import Path
from typing import Any

import torch

from fednorm.experiment.config import Experiment
from fednorm.experiment.entry import StrategyEntry
from fednorm.experiment.environment import environment
from fednorm.experiment.prepare import ModelSource, Prepared, prepare
from fednorm.experiment.record import keep, metrics, open_folder, recorded
from fednorm.experiment.result import Comparison, RunResult
from fednorm.experiment.run import Event, OnRound, run

_POLL = 0.2  # seconds between looks at the workers


@dataclass(frozen=True)
class Job:
    """One run of a comparison."""

    experiment: Experiment
    entry: StrategyEntry
    seed: int
    folder: Path | None = None


def run_all(
    experiment: Experiment,
    *,
    folder: Path | None = None,
    on_round: OnRound = lambda _: None,
    model: ModelSource | None = None,
    workers: int = 1,
) -> Comparison:
    """Run every strategy with every seed.

    With a folder, each run is recorded there, and runs that it already holds are not repeated.
    Everything is checked before the first run starts. Ctrl-C ends the comparison with what it has.
    """
    for entry in experiment.strategies:
        prepare(experiment, entry, experiment.seeds[0], model)
    if folder is not None:
        open_folder(folder, experiment)
    jobs = [Job(experiment, e, s, folder) for e in experiment.strategies for s in experiment.seeds]
    # A model object has no name by which a record of it could be told from another's.
    known = [None if model is not None else _recorded(job) for job in jobs]
    done = {i: result for i, result in enumerate(known) if result is not None}
    for result in done.values():
        on_round(Event(result.strategy, result.seed, result.rounds, 0.0, evaluation=result.final))
    missing = [i for i in range(len(jobs)) if i not in done]
    workers = min(workers, len(missing))
    if workers > 1:
        results = _in_processes([jobs[i] for i in missing], workers, on_round)
    else:
        results = _in_turn([jobs[i] for i in missing], on_round, model)
    done |= {missing[i]: result for i, result in results}
    runs = tuple(done[i] for i in sorted(done))
    return Comparison(experiment.model_dump(mode="json", exclude_none=True), environment(), runs)


def _recorded(job: Job) -> RunResult | None:
    if job.folder is None:
        return None
    return recorded(job.folder, job.experiment, job.entry, job.seed)


def execute(job: Job, on_round: OnRound, model: ModelSource | None = None) -> RunResult:
    """Make one run and record it."""
    with threads(job.experiment.threads):
        prepared = prepare(job.experiment, job.entry, job.seed, model)
        if job.folder is None:
            return run(prepared, on_round)
        result = _recorded_run(job, prepared, on_round)
        if result.status != "interrupted" and model is None:
            keep(job.folder, job.experiment, job.entry, result)
        return result


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Compute with so many threads, and leave the process as it was."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _recorded_run(job: Job, prepared: Prepared, on_round: OnRound) -> RunResult:
    folder = job.folder or Path()
    with metrics(folder, job.entry, job.seed) as write:

        def both(event: Event) -> None:
            write(event)
            on_round(event)

        return run(prepared, both)


def _in_turn(
    jobs: Sequence[Job], on_round: OnRound, model: ModelSource | None
) -> Iterator[tuple[int, RunResult]]:
    for i, job in enumerate(jobs):
        result = execute(job, on_round, model)
        yield i, result
        if result.status == "interrupted":
            return


# What a worker process shares with its parent; set once when the worker starts.
_shared: dict[str, Any] = {}


def _start_worker(events: "SimpleQueue[Event]", stop: Flag) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # where it could not be blocked
    _shared.update(events=events, stop=stop)


def _work(job: Job) -> RunResult:
    def on_round(event: Event) -> None:
        _shared["events"].put(event)
        if _shared["stop"].is_set():
            raise KeyboardInterrupt

    return execute(job, on_round)


def _in_processes(
    jobs: Sequence[Job], workers: int, on_round: OnRound
) -> Iterator[tuple[int, RunResult]]:
    context = multiprocessing.get_context("spawn")
    # Without a buffer: when a run is done, all its events are there to be read.
    events: SimpleQueue[Event] = context.SimpleQueue()
    stop = context.Event()
    with ProcessPoolExecutor(workers, context, _start_worker, (events, stop)) as pool:
        with _without_ctrl_c():
            futures = {pool.submit(_work, job): i for i, job in enumerate(jobs)}
        try:
            _watch(set(futures), lambda: _drain(events, on_round))
        except BaseException as error:
            stop.set()
            for future in futures:
                future.cancel()
            # Workers that are about to end still report, and wait until somebody reads.
            _wait(set(futures), lambda: _drain(events, lambda _: None))
            if not isinstance(error, KeyboardInterrupt):
                raise
    yield from ((i, f.result()) for f, i in futures.items() if not f.cancelled())


@contextmanager
def _without_ctrl_c() -> Iterator[None]:
    """Start processes that never see Ctrl-C, not even while they start; it is for the parent."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _watch(futures: set[Future[RunResult]], look: Callable[[], None]) -> None:
    """Look until all runs are done; raise what went wrong in one of them."""
    while futures:
        finished, futures = wait(futures, timeout=_POLL, return_when=FIRST_COMPLETED)
        look()
        for future in finished:
            future.result()


def _wait(futures: set[Future[RunResult]], look: Callable[[], None]) -> None:
    """Look until nothing runs any more, whatever came of it."""
    while futures:
        _, futures = wait(futures, timeout=_POLL, return_when=FIRST_COMPLETED)
        look()


def _drain(events: "SimpleQueue[Event]", on_round: OnRound) -> None:
    while not events.empty():
        on_round(events.get())
