"""Clients trained side by side, each in a process with one thread.

The processes stay for the whole run. What the server sends lies once in memory that all of them
see; a client's reply lies in memory of its process. A process that is done gets the next client, so
that none waits while there is work. One that dies is replaced and its client trained again: a round
is a function of what it is given. The result is that of the loop, bit by bit.
"""

import contextlib
import copy
import signal
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
from torch import Tensor, multiprocessing

from fednorm.core.exchange import Replay
from fednorm.core.messages import Batches, Broadcast, Memory, Reply
from fednorm.core.task import Task
from fednorm.core.types import ClientId
from fednorm.engines.allocator import keep_memory
from fednorm.engines.clients import Clients, train_client
from fednorm.engines.conditions import USUAL, Conditions
from fednorm.engines.flat import Block, read
from fednorm.engines.simulate import Round, Start
from fednorm.engines.simulate import rounds as rounds_in_turn

_DEATHS = 3  # of processes over one client, before the run gives up


class CrewError(OSError):
    """Processes that die over the same client again and again."""


def fits(task: Task) -> bool:
    """Return whether clients can be trained apart: exchanges in mid-round need all of them."""
    return not task.strategy.exchanges


@dataclass
class _Member:
    process: Any
    wire: Connection
    orders: Block  # what it gets beside the broadcast
    block: Tensor | None = None  # where its replies lie
    client: ClientId | None = None  # whom it is training
    informed: int = -1  # number of the broadcast that it has
    seen: Tensor | None = None  # the block of broadcasts that it knows


class Crew:
    """A fixed number of processes that train clients."""

    def __init__(
        self, task: Task, clients: Clients, count: int, byzantine: Collection[ClientId] = ()
    ) -> None:
        """Start the processes."""
        self.context = multiprocessing.get_context("spawn")
        # Tensors go to other processes as shared memory. That is meant for the data, not for the
        # model, which is a workspace: ours stays ours, and each process makes its own copy.
        self.recipe = (copy.deepcopy(task), clients, byzantine)
        self.sent = Block()
        self.number = -1
        self.members = [self._member() for _ in range(count)]

    def _member(self) -> _Member:
        ours, theirs = self.context.Pipe()
        process = self.context.Process(target=_serve, args=(theirs, *self.recipe), daemon=True)
        process.start()
        theirs.close()
        return _Member(process, ours, Block())

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
        memories: Mapping[ClientId, Memory],
        batches: Sequence[Batches],
    ) -> tuple[list[tuple[Reply, Memory]], dict[str, Tensor]]:
        """Train the clients of a round."""
        del task
        self.number += 1
        plan, _ = self.sent.write(received)
        # The longest first: what comes last should be short, so that nobody waits for it long.
        order = sorted(batches, key=lambda own: -own.examples)
        waiting = [own.client for own in order]
        done: dict[ClientId, tuple[Reply, Memory]] = {}
        deaths: dict[ClientId, int] = {}
        while len(done) < len(batches):
            for member in self.members:
                if member.client is None and waiting:
                    self._give(member, waiting.pop(0), plan, memories)
            for member in self._ready():
                client = member.client
                assert client is not None, "only members with a client are waited for"  # noqa: S101
                member.client = None
                try:
                    done[client] = self._take(member)
                except (EOFError, ConnectionError):
                    deaths[client] = deaths.get(client, 0) + 1
                    self._replace(member, client, deaths[client])
                    waiting.insert(0, client)
        return [done[own.client] for own in batches], {}

    def _give(
        self, member: _Member, client: ClientId, plan: Any, memories: Mapping[ClientId, Memory]
    ) -> None:
        member.client = client
        news = None
        if member.informed != self.number:
            fresh = self.sent.bytes if member.seen is not self.sent.bytes else None
            news, member.informed, member.seen = (plan, fresh), self.number, self.sent.bytes
        memory = member.orders.write(memories.get(client, Memory()))
        with contextlib.suppress(OSError):  # a dead one is noticed when it is waited for
            member.wire.send((news, client, memory))

    def _ready(self) -> list[_Member]:
        busy = {m.wire: m for m in self.members if m.client is not None}
        return [busy[wire] for wire in wait(list(busy)) if wire in busy]

    def _take(self, member: _Member) -> tuple[Reply, Memory]:
        kind, content, block = member.wire.recv()
        if kind == "error":
            raise content
        if block is not None:
            member.block = block
        assert member.block is not None, "the first reply brings its block"  # noqa: S101
        found: tuple[Reply, Memory] = read(content, member.block, copy=True)
        return found

    def _replace(self, member: _Member, client: ClientId, deaths: int) -> None:
        if deaths == _DEATHS:
            raise CrewError(
                f"processes that trained client {client} died {deaths} times, perhaps for lack of "
                "memory; use fewer workers, or engine 'loop'."
            )
        member.wire.close()
        fresh = self._member()
        self.members[self.members.index(member)] = fresh


def _serve(wire: Connection, task: Task, clients: Clients, byzantine: Collection[ClientId]) -> None:
    """Train clients until the parent has no more, or is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent
    torch.set_num_threads(1)
    keep_memory()
    task = copy.deepcopy(task)
    replies, received = Block(), Broadcast(0, None, {}, {}, {})
    blocks: dict[str, Tensor] = {}
    with contextlib.suppress(EOFError, ConnectionError):
        while (order := wire.recv()) is not None:
            news, client, memory = order
            if news is not None:
                received = _read("broadcast", blocks, news, private=False)
            # What a client keeps outlives this order, and may be part of its answer.
            kept = _read("memory", blocks, memory, private=True)
            try:
                batches = clients.batches(client, received.round)
                result = train_client(task, received, kept, batches, Replay({}), byzantine)
                wire.send(("reply", *replies.write(result)))
            except Exception as error:  # noqa: BLE001 (the parent raises it)
                wire.send(("error", error, None))


def _read(
    name: str, blocks: dict[str, Tensor], sent: tuple[Any, Tensor | None], *, private: bool
) -> Any:
    plan, block = sent
    if block is not None:
        blocks[name] = block
    return read(plan, blocks.get(name, torch.empty(0, dtype=torch.uint8)), copy=private)


def rounds(
    task: Task,
    clients: Clients,
    count: int,
    start: Start | None = None,
    *,
    processes: int,
    conditions: Conditions = USUAL,
) -> Iterator[Round]:
    """Run federated rounds with so many processes, up to round `count`."""
    crew = Crew(task, clients, processes, conditions.byzantine)
    try:
        yield from rounds_in_turn(
            task, clients, count, start, train=crew.train, conditions=conditions
        )
    finally:
        crew.close()
