"""Clients trained in worker processes.

The processes live as long as the run. A broadcast is written once, into memory that all of them
see; a client's reply into memory of its process. A process that is done gets the next client; the
last ones start together, so that no core waits while there is work. A process that dies is replaced
and its client trained again: a round is a function of its arguments. The result is that of the
loop, bit by bit, or that of stacked clients in one process.
"""

import contextlib
import dataclasses
import io
import math
import pickle
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any, ClassVar

import torch
from torch import Tensor, multiprocessing

from fednorm.core.messages import Batches, Broadcast, ClientState
from fednorm.core.task import Task
from fednorm.core.types import ClientId
from fednorm.engines import loop
from fednorm.engines.base import ClientSource, EngineRun, Progress, RoundResult
from fednorm.engines.stacked import ClientResults, StackedTrainer, choose_size
from fednorm.engines.worker_process import (
    Surroundings,
    block_interrupts,
    check_guard,
    prepare_context,
    start_worker,
)
from fednorm.errors import WorkerError
from fednorm.nn.copies import refuse_uncopyable
from fednorm.system import read_cpu_seconds

_BUSY = 0.01  # the least share of its time that a working process computes
_ALIGNED = 64  # bytes; suits every number format


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """Position of a tensor in a block."""

    start: int
    shape: tuple[int, ...]
    dtype: torch.dtype


class SharedBlock:
    """Memory shared with another process; it grows when it must."""

    def __init__(self) -> None:
        self.bytes = _allocate_shared(0)

    def write(self, value: Any) -> tuple[Any, Tensor | None]:
        """Write all tensors of `value`; return its plan, and the block if it is new."""
        found: list[tuple[Tensor, TensorPlace]] = []
        end = 0

        def place_tensor(tensor: Tensor) -> TensorPlace:
            nonlocal end
            place = TensorPlace(-(-end // _ALIGNED) * _ALIGNED, tuple(tensor.shape), tensor.dtype)
            end = place.start + tensor.nbytes
            found.append((tensor.detach(), place))
            return place

        plan = _map_values(value, Tensor, place_tensor)
        new = end > len(self.bytes)
        if new:
            self.bytes = _allocate_shared(2 * end)
        for tensor, place in found:
            _view(self.bytes, place).copy_(tensor)
        return plan, self.bytes if new else None


def read_plan(plan: Any, block: Tensor, *, copy: bool) -> Any:
    """Return the value of `plan`; without `copy` it is valid until the next write."""

    def read_tensor(place: TensorPlace) -> Tensor:
        view = _view(block, place)
        return view.clone() if copy else view

    return _map_values(plan, TensorPlace, read_tensor)


class BlockReader:
    """Reads what another process writes into its block."""

    block = torch.empty(0, dtype=torch.uint8)  # none is needed for a value without tensors

    def read(self, plan: Any, block: Tensor | None, *, copy: bool) -> Any:
        """Return the value of `plan`; `block` is given if it is new."""
        self.block = self.block if block is None else block
        return read_plan(plan, self.block, copy=copy)


def _allocate_shared(count: int) -> Tensor:
    block: Tensor = torch.empty(count, dtype=torch.uint8).share_memory_()  # type: ignore[no-untyped-call]
    return block


def _view(block: Tensor, place: TensorPlace) -> Tensor:
    end = place.start + math.prod(place.shape) * place.dtype.itemsize
    return block[place.start : end].view(place.dtype).view(place.shape)


def _map_values(value: Any, kind: type, change: Callable[[Any], Any]) -> Any:
    """Return `value` with every `kind` in it replaced, however deep."""
    if isinstance(value, kind):
        return change(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts = {
            field.name: _map_values(getattr(value, field.name), kind, change)
            for field in dataclasses.fields(value)
        }
        return dataclasses.replace(value, **parts)
    if isinstance(value, Mapping):
        return {key: _map_values(item, kind, change) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return type(value)(_map_values(item, kind, change) for item in value)
    return value


DEATHS = 3  # of worker processes over the same work, before a run gives up
_Group = tuple[ClientId, ...]  # clients that one process trains at once


@dataclass(frozen=True)
class ProcessEngine:
    """Clients in worker processes, one by one or, if `stacked`, several in one wide model."""

    stacked: bool = False
    name: ClassVar[str] = "processes"

    def why_not(self, run: EngineRun) -> str | None:
        """Return why clients cannot be trained in other processes, or None."""
        exchanges = run.task.strategy.exchanges  # which need all clients in one place
        if run.device.type == "cpu" and not exchanges and _is_picklable(run.task):
            return None
        return (
            "engine 'processes' needs device 'cpu', a strategy without exchanges in mid-round, and "
            "a model that can be pickled, hooks included"
        )

    def rounds(self, run: EngineRun, start: Progress | None = None) -> Iterator[RoundResult]:
        """Run the rounds of `run`, or those after `start`, in `run.processes` processes."""
        first = run.list_first_batches()
        size = max(2, choose_size(run.task, first)) if self.stacked else 1
        pool = WorkerPool(
            run.task,
            run.clients,
            min(run.processes, len(first)),
            stack=size,
            byzantine=run.faults.byzantine,
            timeout=run.timeout,
        )
        try:
            yield from loop.rounds(
                run.task, run.clients, run.rounds, start, train=pool.train, faults=run.faults
            )
        finally:
            pool.close()


def _is_picklable(task: Task) -> bool:
    try:
        pickle.dumps(task)
    except Exception:  # noqa: BLE001 (a user's model may hold anything: a hook that is a lambda, …)
        return False
    return True


@dataclass
class Worker:
    """A worker process and its connection."""

    process: Any
    wire: Connection
    orders: SharedBlock  # what it gets besides the broadcast
    replies: BlockReader = field(default_factory=BlockReader)
    group: _Group | None = None  # clients that it is training
    informed: int = -1  # number of the broadcast that it has
    seen: Tensor | None = None  # the block of broadcasts that it knows
    looked: float = 0.0  # when it was looked at whether it computes
    spent: float | None = None  # seconds that it had computed then

    def look(self) -> float | None:
        """Return how long it has computed since the last look, if the system tells."""
        before, self.spent = self.spent, read_cpu_seconds(self.process.pid)
        self.looked = time.monotonic()
        return None if before is None or self.spent is None else self.spent - before


class WorkerPool:
    """A fixed number of processes that train clients, each up to `stack` of them at once."""

    def __init__(
        self,
        task: Task,
        clients: ClientSource,
        count: int,
        *,
        stack: int = 1,
        byzantine: Collection[ClientId] = (),
        timeout: float = math.inf,
    ) -> None:
        refuse_uncopyable(task.model)
        self.timeout = timeout  # seconds without any computation after which a process is replaced
        self.context = prepare_context()
        # Tensors go to other processes as shared memory. That is meant for the data, not for the
        # model, which is a workspace: each process makes its own copy.
        self.arguments = (Surroundings(), _save_task(task), clients, stack, byzantine)
        self.trainer = StackedTrainer(task, stack)  # which groups the clients
        self.broadcasts = SharedBlock()
        self.number = -1  # of the last broadcast
        self.count = count
        self.workers = [self._start_worker() for _ in range(count)]

    def _start_worker(self) -> Worker:
        ours, theirs = self.context.Pipe()
        with block_interrupts():
            try:
                process = self._start_process(theirs)
            except ValueError:  # a server passes some 250 files; a tensor of `clients` is one
                self.context = multiprocessing.get_context("spawn")
                process = self._start_process(theirs)
        theirs.close()
        return Worker(process, ours, SharedBlock())

    def _start_process(self, wire: Connection) -> Any:
        process = self.context.Process(target=_serve, args=(wire, *self.arguments), daemon=True)
        process.start()
        return process

    def close(self) -> None:
        """End the processes."""
        for worker in self.workers:
            with contextlib.suppress(OSError):
                worker.wire.send(None)
            worker.wire.close()
        for worker in self.workers:
            worker.process.join(5)
            if worker.process.is_alive():
                worker.process.kill()
                worker.process.join()

    def train(
        self,
        received: Broadcast,
        client_states: Mapping[ClientId, ClientState],
        batches: Sequence[Batches],
    ) -> tuple[ClientResults, dict[str, Tensor]]:
        """Train the clients of a round."""
        self.number += 1
        plan, _ = self.broadcasts.write(received)
        groups = self.trainer.group_clients(batches, client_states)
        # The longest first: the last ones, for which other workers wait, should be short.
        groups.sort(key=lambda group: -sum(own.examples for own in group))
        waiting = [tuple(own.client for own in group) for group in groups]
        done: ClientResults = []
        deaths: dict[_Group, int] = {}
        while len(done) < len(batches):
            for worker in self._list_free(len(waiting)):
                self._send(worker, waiting.pop(0), plan, client_states)
            for worker in self._wait():
                group = worker.group
                assert group is not None, "only workers with work are waited for"  # noqa: S101
                worker.group = None
                try:
                    done += self._receive(worker)
                except (EOFError, ConnectionError):
                    deaths[group] = deaths.get(group, 0) + 1
                    self._replace(worker, group, deaths[group])
                    waiting.insert(0, group)
        return sorted(done, key=lambda result: result[0].client), {}

    def _list_free(self, waiting: int) -> list[Worker]:
        """Return the workers that get one of `waiting` groups now.

        If the last groups do not divide evenly among the workers, all of them start at once: three
        clients on two cores would otherwise take as long as four.
        """
        busy = sum(worker.group is not None for worker in self.workers)
        left = waiting + busy
        last = left < 2 * self.count and left % self.count > 0
        wanted = min(waiting, (left if last else self.count) - busy)
        while len(self.workers) - busy < wanted:
            self.workers.append(self._start_worker())
        return [worker for worker in self.workers if worker.group is None][: max(0, wanted)]

    def _send(
        self,
        worker: Worker,
        group: _Group,
        plan: Any,
        client_states: Mapping[ClientId, ClientState],
    ) -> None:
        worker.group = group
        worker.look()
        news, block = None, self.broadcasts.bytes
        if worker.informed != self.number:
            news = plan, block if worker.seen is not block else None
            worker.informed, worker.seen = self.number, block
        kept = worker.orders.write([client_states.get(client, ClientState()) for client in group])
        with contextlib.suppress(OSError):  # a dead worker is noticed when it is waited for
            worker.wire.send((news, group, kept))

    def _wait(self) -> list[Worker]:
        """Wait for an answer, or the end of a process; return the workers with one."""
        busy = {worker.wire: worker for worker in self.workers if worker.group is not None}
        while True:
            next_look = min(worker.looked for worker in busy.values()) + self.timeout
            patience = None if math.isinf(next_look) else max(0.0, next_look - time.monotonic())
            if ready := wait(list(busy), patience):
                return [busy[wire] for wire in ready if isinstance(wire, Connection)]
            for worker in busy.values():
                if time.monotonic() >= worker.looked + self.timeout:
                    computed = worker.look()
                    # A client may take long; a process that hangs computes nothing.
                    if computed is not None and computed < _BUSY * self.timeout:
                        worker.process.kill()

    def _receive(self, worker: Worker) -> ClientResults:
        kind, content, block = worker.wire.recv()
        if kind == "error":
            raise content
        found: ClientResults = worker.replies.read(content, block, copy=True)
        return found

    def _replace(self, worker: Worker, group: _Group, deaths: int) -> None:
        worker.process.join(1)
        check_guard([worker.process.exitcode])
        if deaths == DEATHS:
            raise WorkerError(
                f"processes that trained clients {', '.join(map(str, group))} died {deaths} times, "
                "perhaps for lack of memory; use fewer workers, or engine 'loop'."
            )
        worker.wire.close()
        self.workers[self.workers.index(worker)] = self._start_worker()


def _save_task(task: Task) -> Tensor:
    """Return the bytes of a task and the number of threads, in memory that workers see."""
    buffer = io.BytesIO()
    torch.save((task, torch.get_num_threads()), buffer)
    block = _allocate_shared(buffer.tell())
    return block.copy_(torch.frombuffer(buffer.getbuffer(), dtype=torch.uint8))


def _serve(
    wire: Connection,
    surroundings: Surroundings,
    saved: Tensor,
    clients: ClientSource,
    stack: int,
    byzantine: Collection[ClientId],
) -> None:
    """Train clients until the parent has no more, or is gone."""
    start_worker(surroundings)
    task, threads = torch.load(io.BytesIO(saved.numpy().tobytes()), weights_only=False)
    torch.set_num_threads(threads)
    trainer = StackedTrainer(task, stack, byzantine)
    replies, received = SharedBlock(), Broadcast(task.initial_state)
    broadcasts, orders = BlockReader(), BlockReader()
    with contextlib.suppress(EOFError, ConnectionError):
        while (order := wire.recv()) is not None:
            news, group, client_states = order
            if news is not None:
                received = broadcasts.read(*news, copy=False)
            # Client states outlive this order, and may be part of its answer.
            kept = orders.read(*client_states, copy=True)
            try:
                batches = [clients.batches(client, received.round) for client in group]
                states = dict(zip(group, kept, strict=True))
                results = trainer.train_group(received, states, batches)
                wire.send(("reply", *replies.write(results)))
            except Exception as error:  # noqa: BLE001 (the parent raises it)
                wire.send(("error", error, None))
