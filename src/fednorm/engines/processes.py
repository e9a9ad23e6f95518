"""Clients trained side by side, each in a process.

The processes stay for the whole run. What the server sends lies once in memory that all of them
see; a client's reply lies in memory of its process. A process that is done gets the next client;
the last ones are given out together, so that no core waits while there is work. One that dies is
replaced and its client trained again: a round is a function of what it is given. The result is that
of the loop, bit by bit; with cohorts, that of cohorts in one process.
"""

import contextlib
import copy
import dataclasses
import pickle
import signal
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
from torch import Tensor, multiprocessing

from fednorm.core.messages import Batches, Broadcast, ClientState
from fednorm.core.task import Task
from fednorm.core.types import ClientId
from fednorm.engines.base import NO_FAULTS, ClientSource, Faults
from fednorm.engines.loop import RoundResult, Start
from fednorm.engines.loop import rounds as rounds_in_turn
from fednorm.engines.stacked import ClientResults, StackedTrainer
from fednorm.errors import WorkerPoolError
from fednorm.nn.copies import refuse_uncopyable
from fednorm.system import keep_memory

_ALIGNED = 64  # bytes; a tensor begins where any number format may


@dataclasses.dataclass(frozen=True, slots=True)
class TensorPlace:
    """Where a tensor lies in a block."""

    start: int
    shape: tuple[int, ...]
    dtype: torch.dtype


class SharedBlock:
    """Memory that another process sees too; it grows when it must."""

    def __init__(self) -> None:
        self.bytes = _allocate_shared(0)

    def write(self, value: Any) -> tuple[Any, Tensor | None]:
        """Write all tensors of a value; return its plan, and the block if it is a new one."""
        found: list[Tensor] = []
        places: list[TensorPlace] = []

        def placed(tensor: Tensor) -> TensorPlace:
            end = places[-1].start + _size(found[-1]) if places else 0
            start = -(-end // _ALIGNED) * _ALIGNED
            found.append(tensor.detach())
            places.append(TensorPlace(start, tuple(tensor.shape), tensor.dtype))
            return places[-1]

        plan = _map_values(value, Tensor, placed)
        needed = places[-1].start + _size(found[-1]) if places else 0
        new = needed > len(self.bytes)
        if new:
            self.bytes = _allocate_shared(2 * needed)
        for tensor, place in zip(found, places, strict=True):
            _view(self.bytes, place).copy_(tensor)
        return plan, self.bytes if new else None


def read_plan(plan: Any, block: Tensor, *, copy: bool) -> Any:
    """Return the value of a plan; without a copy it lives as long as nobody writes."""

    def found(place: TensorPlace) -> Tensor:
        view = _view(block, place)
        return view.clone() if copy else view

    return _map_values(plan, TensorPlace, found)


def _allocate_shared(count: int) -> Tensor:
    client_state: Tensor = torch.empty(count, dtype=torch.uint8).share_memory_()  # type: ignore[no-untyped-call]
    return client_state


def _size(tensor: Tensor) -> int:
    return tensor.nbytes


def _view(block: Tensor, place: TensorPlace) -> Tensor:
    count = 1
    for length in place.shape:
        count *= length
    end = place.start + count * place.dtype.itemsize
    return block[place.start : end].view(place.dtype).view(place.shape)


def _map_values(value: Any, kind: type, change: Callable[[Any], Any]) -> Any:
    """Return the value with everything of one kind changed, however deep it lies."""
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


_DEATHS = 3  # of processes over the same clients, before the run gives up
_Group = tuple[ClientId, ...]  # clients that are trained by one process at once


def fits(task: Task) -> bool:
    """Return whether clients can be trained apart.

    Exchanges in mid-round need all of them, and what they train must travel to processes.
    """
    return not task.strategy.exchanges and _is_picklable(task)


def _is_picklable(task: Task) -> bool:
    try:
        pickle.dumps(task)
    except Exception:  # noqa: BLE001 (whatever a user's model holds: a hook that is a lambda, …)
        return False
    return True


def _make_empty() -> Tensor:
    return torch.empty(0, dtype=torch.uint8)


@dataclass
class Worker:
    """A worker process and its connection."""

    process: Any
    wire: Connection
    orders: SharedBlock  # what it gets beside the broadcast
    block: Tensor = field(default_factory=_make_empty)  # where its replies lie
    group: _Group | None = None  # whom it is training
    informed: int = -1  # number of the broadcast that it has
    seen: Tensor | None = None  # the block of broadcasts that it knows


class WorkerPool:
    """A fixed number of processes that train clients."""

    def __init__(
        self,
        task: Task,
        clients: ClientSource,
        count: int,
        *,
        cohort: int = 1,
        byzantine: Collection[ClientId] = (),
    ) -> None:
        """Start the processes; each trains up to `cohort` clients at once."""
        refuse_uncopyable(task.model)
        self.context = multiprocessing.get_context("spawn")
        # Tensors go to other processes as shared memory. That is meant for the data, not for the
        # model, which is a workspace: ours stays ours, and each process makes its own copy.
        self.recipe = (copy.deepcopy(task), clients, cohort, byzantine, torch.get_num_threads())
        self.cohorts = StackedTrainer(task, cohort)
        self.sent = SharedBlock()
        self.number = -1
        self.count = count
        self.members = [self._member() for _ in range(count)]

    def _member(self) -> Worker:
        ours, theirs = self.context.Pipe()
        process = self.context.Process(target=_serve, args=(theirs, *self.recipe), daemon=True)
        process.start()
        theirs.close()
        return Worker(process, ours, SharedBlock())

    def close(self) -> None:
        """Let the processes end."""
        for member in self.members:
            with contextlib.suppress(OSError):
                member.wire.send(None)
            member.wire.close()
        for member in self.members:
            member.process.join(5)
            if member.process.is_alive():
                member.process.kill()

    def train(
        self,
        task: Task,
        received: Broadcast,
        client_states: Mapping[ClientId, ClientState],
        batches: Sequence[Batches],
    ) -> tuple[ClientResults, dict[str, Tensor]]:
        """Train the clients of a round."""
        del task
        self.number += 1
        plan, _ = self.sent.write(received)
        groups = self.cohorts.groups(batches, client_states)
        # The longest first: what comes last should be short, so that nobody waits for it long.
        groups.sort(key=lambda group: -sum(own.examples for own in group))
        waiting = [tuple(own.client for own in group) for group in groups]
        done: ClientResults = []
        deaths: dict[_Group, int] = {}
        while len(done) < len(batches):
            for member in self._free(len(waiting)):
                self._give(member, waiting.pop(0), plan, client_states)
            for member in self._ready():
                group = member.group
                assert group is not None, "only members with work are waited for"  # noqa: S101
                member.group = None
                try:
                    done += self._take(member)
                except (EOFError, ConnectionError):
                    deaths[group] = deaths.get(group, 0) + 1
                    self._replace(member, group, deaths[group])
                    waiting.insert(0, group)
        return sorted(done, key=lambda result: result[0].client), {}

    def _free(self, waiting: int) -> list[Worker]:
        """Return who gets work now.

        Three clients on two cores take as long as four, unless all three run at once: less than
        two each, if they do not come out even, are given out together.
        """
        busy = sum(member.group is not None for member in self.members)
        left = waiting + busy
        last = left < 2 * self.count and left % self.count > 0
        wanted = min(waiting, (left if last else self.count) - busy)
        while len(self.members) - busy < wanted:
            self.members.append(self._member())
        return [member for member in self.members if member.group is None][: max(0, wanted)]

    def _give(
        self,
        member: Worker,
        group: _Group,
        plan: Any,
        client_states: Mapping[ClientId, ClientState],
    ) -> None:
        member.group = group
        news = None
        if member.informed != self.number:
            fresh = self.sent.bytes if member.seen is not self.sent.bytes else None
            news, member.informed, member.seen = (plan, fresh), self.number, self.sent.bytes
        kept = member.orders.write([client_states.get(client, ClientState()) for client in group])
        with contextlib.suppress(OSError):  # a dead one is noticed when it is waited for
            member.wire.send((news, group, kept))

    def _ready(self) -> list[Worker]:
        busy = {m.wire: m for m in self.members if m.group is not None}
        return [busy[wire] for wire in wait(list(busy)) if wire in busy]

    def _take(self, member: Worker) -> ClientResults:
        kind, content, block = member.wire.recv()
        if kind == "error":
            raise content
        if block is not None:  # a reply without tensors, such as a diverged liar's, needs none
            member.block = block
        found: ClientResults = read_plan(content, member.block, copy=True)
        return found

    def _replace(self, member: Worker, group: _Group, deaths: int) -> None:
        if deaths == _DEATHS:
            raise WorkerPoolError(
                f"processes that trained clients {', '.join(map(str, group))} died {deaths} times, "
                "perhaps for lack of memory; use fewer workers, or engine 'loop'."
            )
        member.wire.close()
        fresh = self._member()
        self.members[self.members.index(member)] = fresh


def _serve(
    wire: Connection,
    task: Task,
    clients: ClientSource,
    cohort: int,
    byzantine: Collection[ClientId],
    threads: int,
) -> None:
    """Train clients until the parent has no more, or is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent
    torch.set_num_threads(threads)
    keep_memory()
    cohorts = StackedTrainer(copy.deepcopy(task), cohort, byzantine)
    replies, received = SharedBlock(), Broadcast(0, None, {}, {}, {})
    blocks: dict[str, Tensor] = {}
    with contextlib.suppress(EOFError, ConnectionError):
        while (order := wire.recv()) is not None:
            news, group, client_states = order
            if news is not None:
                received = _read("broadcast", blocks, news, private=False)
            # What a client keeps outlives this order, and may be part of its answer.
            kept = _read("memory", blocks, client_states, private=True)
            try:
                batches = [clients.batches(client, received.round) for client in group]
                client_state = dict(zip(group, kept, strict=True))
                wire.send(("reply", *replies.write(cohorts.train(received, client_state, batches))))
            except Exception as error:  # noqa: BLE001 (the parent raises it)
                wire.send(("error", error, None))


def _read(
    name: str, blocks: dict[str, Tensor], sent: tuple[Any, Tensor | None], *, private: bool
) -> Any:
    plan, block = sent
    if block is not None:
        blocks[name] = block
    return read_plan(plan, blocks.get(name, _make_empty()), copy=private)


def rounds(  # noqa: PLR0913 (as in one process, and how many)
    task: Task,
    clients: ClientSource,
    count: int,
    start: Start | None = None,
    *,
    processes: int,
    cohort: int = 1,
    conditions: Faults = NO_FAULTS,
) -> Iterator[RoundResult]:
    """Run federated rounds with so many processes, up to round `count`."""
    crew = WorkerPool(task, clients, processes, cohort=cohort, byzantine=conditions.byzantine)
    try:
        yield from rounds_in_turn(
            task, clients, count, start, train=crew.train, conditions=conditions
        )
    finally:
        crew.close()
