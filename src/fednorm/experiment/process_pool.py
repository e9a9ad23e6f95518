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
from concurrent.futures import Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, TypeAlias

from fednorm.engines.processes import DEATHS
from fednorm.engines.worker_process import (
    Surroundings,
    block_interrupts,
    check_guard,
    prepare_context,
    start_worker,
)
from fednorm.errors import CallbackError, WorkerError
from fednorm.experiment.callbacks.base import Callback, Monitor, RunStart
from fednorm.experiment.job import Job, execute_job, log
from fednorm.experiment.results import Event, RunResult
from fednorm.experiment.run_folder import run_folder
from fednorm.objects import keep_objects, list_held
from fednorm.system import is_stopped

_POLL = 0.2  # seconds between looks at the workers
_UNHEARD = "the start was not heard"

Told: TypeAlias = RunStart | Event | RunResult

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
    # Pipes have no thread between: when a run is done, all that was told of it can be read.
    receiver, sender = context.Pipe(duplex=False)
    answers = [context.Pipe(duplex=False) for _ in range(workers)]
    places = context.SimpleQueue()
    for place in range(workers):
        places.put(place)
    shared = {"sender": sender, "lock": context.Lock(), "stop": context.Event(), "places": places}
    shared |= {"answers": [answer for answer, _ in answers], "waits": monitor.decides}
    ear = _Ear(receiver, [answer for _, answer in answers], monitor)
    died, begun = False, (shared, Surroundings(), list_held())
    others = set(multiprocessing.active_children())
    with ProcessPoolExecutor(workers, context, _start_worker, begun) as pool:
        with block_interrupts():
            futures = {pool.submit(_work, job): number for number, job in jobs.items()}
        timeout = max(job.experiment.timeout for job in jobs.values())
        guard = _StopGuard(set(multiprocessing.active_children()) - others, timeout)
        try:
            _watch(set(futures), ear, guard)
        except BrokenProcessPool:
            died = True
            guard.end_workers()
            check_guard(worker.exitcode for worker in guard.workers)
        except BaseException as error:
            shared["stop"].set()
            _end(set(futures), ear, heard=not isinstance(error, CallbackError))
            if not isinstance(error, KeyboardInterrupt):
                raise
    ended = {f: number for f, number in futures.items() if f.done() and not f.cancelled()}
    return {number: f.result() for f, number in ended.items() if f.exception() is None}, died


def _start_worker(shared: dict[str, Any], surroundings: Surroundings, held: dict[str, Any]) -> None:
    start_worker(surroundings)
    keep_objects(held)
    _shared.update(shared, busy=threading.Lock(), orphaned=threading.Event())
    _shared["place"] = shared["places"].get()
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


class _Forward(Callback):
    """Reports a run to the parent's callbacks, and waits for the answer if one may end the run.

    The answer is the name of the callback that ends the run. A start is always waited for, so that
    nothing of the run is reported if a callback fails there.
    """

    def on_start(self, start: RunStart) -> None:
        """Tell of a start."""
        self._send(start)
        if self._wait() == _UNHEARD:
            raise WorkerError("a callback failed at the start of this run.")

    def on_round(self, event: Event) -> bool:
        """Tell of a round; return whether the run ends."""
        self._send(event)
        self.name = self._wait() if _shared["waits"] else ""
        return bool(self.name)

    def on_end(self, result: RunResult) -> None:
        """Tell of an end."""
        self._send(result)

    @staticmethod
    def _wait() -> str:
        answers: Connection = _shared["answers"][_shared["place"]]
        while not answers.poll(_POLL):
            if _shared["orphaned"].is_set():
                os._exit(1)  # the round is repeated from the last checkpoint, and decided then
        return answers.recv() or ""

    @staticmethod
    def _send(told: Told) -> None:
        if not _shared["orphaned"].is_set():  # its pipe would fill up
            with _shared["lock"]:
                _shared["sender"].send((_shared["place"], told))


def _work(job: Job) -> RunResult:
    with _shared["busy"]:
        result = execute_job(job, Monitor([_Forward()], _StopWorker()))
    # A network stays in its process; a folder can be read from everywhere.
    return result.keep_model(job.folder and run_folder(job.folder, job.entry, job.seed))


@dataclass(frozen=True)
class _Ear:
    """Receives what workers report of their runs, and answers."""

    receiver: Connection
    answers: Sequence[Connection]  # to each worker
    monitor: Monitor

    def listen(self, *, heard: bool = True, seconds: float = 0.0) -> None:
        """Tell the callbacks all that has arrived, or answer only; wait for the first."""
        while self.receiver.poll(seconds):
            place, told = self.receiver.recv()
            seconds, answer = 0.0, _UNHEARD if isinstance(told, RunStart) else None
            try:
                answer = self._tell(told) if heard else answer
            finally:
                if isinstance(told, RunStart) or (self.monitor.decides and isinstance(told, Event)):
                    self.answers[place].send(answer)

    def _tell(self, told: Told) -> str | None:
        if isinstance(told, Event):
            return self.monitor.report(told)
        if isinstance(told, RunResult):
            self.monitor.end(told)
        else:
            self.monitor.start(told)
        return None


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


def _watch(futures: set[Future[RunResult]], ear: _Ear, guard: _StopGuard) -> None:
    """Tell callbacks of all runs until they are done; raise what went wrong in one of them."""
    while futures:
        guard.look()
        finished, futures = wait(futures, timeout=0)
        ear.listen(seconds=_POLL if futures else 0.0)
        for future in finished:
            future.result()
        if ear.monitor.stopped:
            raise KeyboardInterrupt


def _end(futures: set[Future[RunResult]], ear: _Ear, *, heard: bool) -> None:
    """Let all runs end after their round; workers wait until what they tell is heard."""
    for future in futures:
        future.cancel()
    while futures:
        _, futures = wait(futures, timeout=0)
        ear.listen(heard=heard, seconds=_POLL if futures else 0.0)
