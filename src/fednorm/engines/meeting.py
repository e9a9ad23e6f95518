"""Exchanges in mid-round: the clients of a round train side by side and wait for each other.

Each client has a thread and a copy of the model. One of them runs at a time, until it asks for a
mean over all clients; then it is the next one's turn. When all have asked, they get their answer
and go on, one after the other. The result is, bit by bit, that of `train_in_turn`, which trains
anew after each exchange. That is what still happens where there is no room for all clients at once,
and on other devices than a CPU, where the backward passes of all threads share one.
"""

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from queue import SimpleQueue
from threading import Thread
from typing import TypeAlias

import torch
from torch import Tensor

from fednorm.core.exchange import Exchange, PendingError, answer
from fednorm.core.layout import layout
from fednorm.core.messages import Batches, Broadcast, Memory, Reply
from fednorm.core.task import Task
from fednorm.core.types import ClientId
from fednorm.engines.clients import train_client, train_in_turn
from fednorm.nn.outputs import values

_ROOM = 2_000_000_000  # bytes that the clients of a round may hold at once

_Result: TypeAlias = tuple[Reply, Memory]


class _DismissedError(BaseException):
    """Ends the thread of a client that nobody waits for any more."""


class _Guest:
    """A client in a thread of its own; for its layers it is the exchange."""

    def __init__(self, train: Callable[[Exchange], _Result]) -> None:
        self.said: SimpleQueue[_Result | BaseException] = SimpleQueue()
        self.told: SimpleQueue[Tensor | None] = SimpleQueue()
        self.thread = Thread(target=self._run, args=(train,), daemon=True)

    def _run(self, train: Callable[[Exchange], _Result]) -> None:
        try:
            self.said.put(train(self))
        except BaseException as error:  # noqa: BLE001 (raised where it is heard)
            self.said.put(error)

    def mean(self, site: str, value: Tensor, weight: float) -> Tensor:
        """Ask for a mean over clients and wait for it."""
        randomness = torch.get_rng_state()  # others draw numbers of their own meanwhile
        self.said.put(PendingError(site, value.detach().clone(), weight))
        found = self.told.get()
        if found is None:
            raise _DismissedError
        torch.set_rng_state(randomness)
        return found

    def start(self) -> _Result | PendingError:
        """Let the client train until it asks for something or is done."""
        self.thread.start()
        return self._listen()

    def go_on(self, found: Tensor) -> _Result | PendingError:
        """Answer the client, and let it train until it asks again or is done."""
        self.told.put(found)
        return self._listen()

    def _listen(self) -> _Result | PendingError:
        heard = self.said.get()
        if isinstance(heard, BaseException) and not isinstance(heard, PendingError):
            raise heard
        return heard

    def dismiss(self) -> None:
        """Let the thread end."""
        if self.thread.is_alive():
            self.told.put(None)
            self.thread.join()


class Meeting:
    """Trains the clients of a round side by side."""

    def __init__(self, task: Task, byzantine: Collection[ClientId] = ()) -> None:
        self.task, self.byzantine = task, byzantine
        self.seats: list[Task] = []  # a workspace for each client
        self.most: int | None = None  # clients for which there is room, once that is known

    def train(
        self,
        task: Task,
        received: Broadcast,
        memories: Mapping[ClientId, Memory],
        batches: Sequence[Batches],
    ) -> tuple[list[_Result], dict[str, Tensor]]:
        """Train all clients; return what they send and the answers of their exchanges."""
        if self.most is None:
            self.most = most(task, batches[0])
        if not 1 < len(batches) <= self.most:
            return train_in_turn(task, received, memories, batches, self.byzantine)
        self.seats += (_copied(self.task) for _ in range(len(batches) - len(self.seats)))
        guests = [
            _Guest(partial(self._train, seat, received, memories.get(own.client, Memory()), own))
            for seat, own in zip(self.seats, _in_order(batches), strict=False)
        ]
        answers: dict[str, Tensor] = {}
        with torch.random.fork_rng([]):
            try:
                said = [guest.start() for guest in guests]
                while pending := [one for one in said if isinstance(one, PendingError)]:
                    found = answer(pending, task.aggregate_statistics)
                    answers[pending[0].site] = found
                    said = [
                        guest.go_on(found) if isinstance(one, PendingError) else one
                        for guest, one in zip(guests, said, strict=True)
                    ]
            finally:
                for guest in guests:
                    guest.dismiss()
        return [one for one in said if not isinstance(one, PendingError)], answers

    def _train(
        self, seat: Task, received: Broadcast, memory: Memory, own: Batches, exchange: Exchange
    ) -> _Result:
        return train_client(seat, received, memory, own, exchange, self.byzantine)


def _in_order(batches: Sequence[Batches]) -> list[Batches]:
    return sorted(batches, key=lambda own: own.client)  # a mean depends on it, in rounding


def _copied(task: Task) -> Task:
    model = copy.deepcopy(task.model)
    return replace(task, model=model, layout=layout(model, task.strategy.role))


def most(task: Task, own: Batches) -> int:
    """Return how many clients like this one can be trained side by side."""
    if next(task.model.parameters()).device.type != "cpu":
        return 1
    return _ROOM // max(1, held(task, own))


def beside(task: Task, first: Sequence[Batches]) -> int:
    """Return how many bytes the others hold while one client trains, roughly."""
    if not task.strategy.exchanges or not 1 < len(first) <= most(task, first[0]):
        return 0
    return (len(first) - 1) * held(task, first[0])


def held(task: Task, own: Batches) -> int:
    """Return how many bytes a client holds in the middle of a step, roughly."""
    x, _ = next(iter(own.steps))
    return values(task.model, x) * x.element_size()
