"""Several runs at once, each in a process; one that dies is replaced and its run resumes.

Apart from the worker pool of engines (`engines/processes.py`), whose workers hold one task for a
whole run and get clients by shared memory: here a process gets whole runs and returns results. Both
share what is alike: the limit of deaths, the error, and that Ctrl-C is for the parent.
"""

import multiprocessing
import os
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.process import BaseProcess
from multiprocessing.queues import SimpleQueue
from multiprocessing.synchronize import Event as Flag
from typing import Any

from fednorm.engines.processes import DEATHS
from fednorm.engines.worker_process import (
    Surroundings,
    block_interrupts,
    check_guard,
    prepare_context,
    start_worker,
)
from fednorm.errors import WorkerError
from fednorm.experiment.job import Job, execute_job, log
from fednorm.experiment.results import Event, RunResult
from fednorm.experiment.run import Monitor
from fednorm.experiment.run_folder import run_folder
from fednorm.system import is_stopped

_POLL = 0.2  # seconds between looks at the workers

# What a worker process shares with its parent; set once when the worker starts.
_shared: dict[str, Any] = {}


def run_in_processes(
    jobs: Sequence[Job], workers: int, monitor: Monitor
) -> Iterator[tuple[int, RunResult]]:
    """Run the jobs in `workers` processes; yield number and result of each that ended."""
    left, deaths = dict(enumerate(jobs)), 0
    while left:
        done, died = _run_once(left, workers, monitor)
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
        log.warning("a worker process died; its runs resume in a new one.")


def _run_once(
    jobs: dict[int, Job], workers: int, monitor: Monitor
) -> tuple[dict[int, RunResult], bool]:
    """Run the jobs in one pool; return the results, and whether a worker died."""
    context = prepare_context()
    # Without a buffer: when a run is done, all its events can be read.
    events: SimpleQueue[Event] = context.SimpleQueue()
    stop = context.Event()
    died, shared = False, (events, stop, Surroundings())
    others = set(multiprocessing.active_children())
    with ProcessPoolExecutor(workers, context, _start_worker, shared) as pool:
        with block_interrupts():
            futures = {pool.submit(_work, job): number for number, job in jobs.items()}
        timeout = max(job.experiment.timeout for job in jobs.values())
        guard = _StopGuard(set(multiprocessing.active_children()) - others, timeout)
        try:
            _watch(set(futures), events, monitor, guard)
        except BrokenProcessPool:
            died = True
            guard.end_workers()
            check_guard(worker.exitcode for worker in guard.workers)
        except BaseException as error:
            _end(set(futures), events, stop)
            if not isinstance(error, KeyboardInterrupt):
                raise
    ended = {f: number for f, number in futures.items() if f.done() and not f.cancelled()}
    return {number: f.result() for f, number in ended.items() if f.exception() is None}, died


def _start_worker(events: "SimpleQueue[Event]", stop: Flag, surroundings: Surroundings) -> None:
    start_worker(surroundings)
    _shared.update(events=events, stop=stop, busy=threading.Lock(), orphaned=threading.Event())
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """End a worker whose parent was killed, after its current round is saved."""
    if parent := multiprocessing.parent_process():
        parent.join()
    _shared["orphaned"].set()
    with _shared["busy"]:
        os._exit(1)  # an ordinary end would report to the parent


class _StopWorker:
    """Set if the parent wants workers to stop, or was killed."""

    def is_set(self) -> bool:
        return bool(_shared["stop"].is_set() or _shared["orphaned"].is_set())


def _send(event: Event) -> None:
    if not _shared["orphaned"].is_set():  # its queue would fill up
        _shared["events"].put(event)


def _work(job: Job) -> RunResult:
    with _shared["busy"]:
        result = execute_job(job, Monitor([_send], _StopWorker()))
    # A network stays in its process; a folder can be read from everywhere.
    return result.keep_model(job.folder and run_folder(job.folder, job.entry, job.seed))


class _StopGuard:
    """Ends workers that have been stopped (SIGSTOP) for `timeout` seconds: they are replaced."""

    def __init__(self, workers: Iterable[BaseProcess], timeout: float) -> None:
        self.workers, self.timeout = list(workers), timeout
        self.since: dict[BaseProcess, float] = {}

    def look(self) -> None:
        for worker in self.workers:
            if not is_stopped(worker.pid or 0):
                self.since.pop(worker, None)
            elif time.monotonic() - self.since.setdefault(worker, time.monotonic()) > self.timeout:
                worker.kill()

    def end_workers(self) -> None:
        """End all workers, as a broken pool does; but its SIGTERM waits in a stopped one."""
        for worker in self.workers:
            worker.kill()


def _watch(
    futures: set[Future[RunResult]],
    events: "SimpleQueue[Event]",
    monitor: Monitor,
    guard: _StopGuard,
) -> None:
    """Report events until all runs are done; raise what went wrong in one of them."""
    while futures:
        guard.look()
        finished, futures = wait(futures, timeout=_POLL, return_when=FIRST_COMPLETED)
        while not events.empty():
            monitor.report(events.get())
        for future in finished:
            future.result()
        if monitor.stopped:
            raise KeyboardInterrupt


def _end(futures: set[Future[RunResult]], events: "SimpleQueue[Event]", stop: Flag) -> None:
    """Let all runs end after their round."""
    stop.set()
    for future in futures:
        future.cancel()
    while futures:
        _, futures = wait(futures, timeout=_POLL, return_when=FIRST_COMPLETED)
        while not events.empty():  # workers wait until their last events are read
            events.get()
