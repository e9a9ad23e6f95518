"""Several runs at once, each in a process; one that dies is replaced and its run goes on."""

import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.queues import SimpleQueue
from multiprocessing.synchronize import Event as Flag
from typing import Any

from fednorm.engines.processes import DEATHS, block_interrupts, start_worker
from fednorm.errors import WorkerError
from fednorm.experiment.job import Job, execute_job, log
from fednorm.experiment.results import RunResult
from fednorm.experiment.run import Event, OnRound

_POLL = 0.2  # seconds between looks at the workers

# What a worker process shares with its parent; set once when the worker starts.
_shared: dict[str, Any] = {}


def run_in_processes(
    jobs: Sequence[Job], workers: int, on_round: OnRound
) -> Iterator[tuple[int, RunResult]]:
    """Run the jobs; yield the number and result of each that came to an end."""
    left, deaths = dict(enumerate(jobs)), 0
    while left:
        done, died = _run_once(left, workers, on_round)
        yield from done.items()
        left = {number: job for number, job in left.items() if number not in done}
        if not died:
            return
        deaths = 1 if done else deaths + 1
        if deaths == DEATHS:
            raise WorkerError(
                f"worker processes died {deaths} times in a row, perhaps for lack of memory; "
                "what was done is kept. Try fewer --workers."
            )
        log.warning("a worker process died; its runs go on in a new one.")


def _run_once(
    jobs: dict[int, Job], workers: int, on_round: OnRound
) -> tuple[dict[int, RunResult], bool]:
    """Run the jobs in one pool; return what was done, and whether a worker died."""
    context = multiprocessing.get_context("spawn")
    # Without a buffer: when a run is done, all its events are there to be read.
    events: SimpleQueue[Event] = context.SimpleQueue()
    stop = context.Event()
    died = False
    with ProcessPoolExecutor(workers, context, _start_worker, (events, stop)) as pool:
        with block_interrupts():
            futures = {pool.submit(_work, job): number for number, job in jobs.items()}
        try:
            _watch(set(futures), lambda: _drain(events, on_round))
        except BrokenProcessPool:
            died = True
        except BaseException as error:
            stop.set()
            for future in futures:
                future.cancel()
            # Workers that are about to end still report, and wait until somebody reads.
            _wait(set(futures), lambda: _drain(events, lambda _: None))
            if not isinstance(error, KeyboardInterrupt):
                raise
    return {number: f.result() for f, number in futures.items() if _has_succeeded(f)}, died


def _has_succeeded(future: Future[RunResult]) -> bool:
    return future.done() and not future.cancelled() and future.exception() is None


def _start_worker(events: "SimpleQueue[Event]", stop: Flag) -> None:
    start_worker()
    _shared.update(events=events, stop=stop, busy=threading.Lock(), orphaned=threading.Event())
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """End a worker whose parent was killed, after the round that it is in is saved."""
    if parent := multiprocessing.parent_process():
        parent.join()
    _shared["orphaned"].set()
    with _shared["busy"]:
        os._exit(1)  # nobody would read what an ordinary end has to say


def _work(job: Job) -> RunResult:
    def on_round(event: Event) -> None:
        if _shared["stop"].is_set() or _shared["orphaned"].is_set():
            raise KeyboardInterrupt
        _shared["events"].put(event)

    with _shared["busy"]:
        return execute_job(job, on_round)


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
