"""Exchanges in mid-round: the clients of a round train side by side and wait for each other.

Each client has a thread and a copy of the model. One of them runs at a time, until it asks for a
mean over all clients; then it is the next one's turn. When all have asked, they get their answer
and go on, one after the other. The result is, bit by bit, that of `train_in_turn`, which trains
anew after each exchange, and still does where there is no room for all clients at once.

Not for a model that keeps anything outside of its module between two layers: the clients' would be
mixed up. That is why `auto` trains only the library's own models so, and another is tried first, if
this engine is asked for. In full precision only (autocast remembers the weights that it has cast,
for all threads), and on a CPU (elsewhere all threads share one for their backward passes, in which
none may wait).
"""

import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from queue import SimpleQueue
from threading import Event, Thread
from typing import TypeAlias

import torch
from torch import Tensor

from fednorm.core.exchange import PendingError, answer_exchange
from fednorm.core.layout import find_layout
from fednorm.core.messages import Batches, Broadcast, ClientState, Reply
from fednorm.core.round import broadcast
from fednorm.core.task import Task, isolated_rng
from fednorm.core.types import ClientId, nbytes
from fednorm.engines import trial
from fednorm.engines.base import train_client, train_clients
from fednorm.nn.copies import copy_model
from fednorm.nn.stacked_model import count_activations

_COPIES = 4  # of the parameters: weights, gradients, momentum, update

_Result: TypeAlias = tuple[Reply, ClientState]


def fits(task: Task) -> bool:
    """Return whether clients may wait for each other, if the model is one of the library's own."""
    device = next(task.model.parameters()).device
    return task.strategy.exchanges and task.precision == "full" and device.type == "cpu"


def find_misfit(task: Task, batches: Sequence[Batches]) -> str:
    """Return why clients of a model cannot wait for each other, or nothing; by trying two."""
    pair = [trial.take_first_steps(own, 1) for own in batches[:2]]
    compare = partial(_compare, pair)
    return trial.find_misfit("barrier", [own.client for own in pair], task, compare)


def _compare(pair: Sequence[Batches], task: Task) -> trial.Gap:
    received = broadcast(task, task.initial_state)
    together, _ = BarrierTrainer(task, sys.maxsize).train(task, received, {}, pair)
    alone, _ = train_clients(task, received, {}, pair)
    return trial.find_gap(trial.collect_numbers(alone), trial.collect_numbers(together))


class _DismissedError(BaseException):
    """Ends the thread of a client that nobody waits for any more."""


class ClientThread:
    """A client in a thread of its own; for its layers it is the exchange."""

    def __init__(self, train: Callable[["ClientThread"], _Result]) -> None:
        self.said: SimpleQueue[_Result | BaseException] = SimpleQueue()
        self.told: SimpleQueue[Tensor | None] = SimpleQueue()
        self.dismissed = Event()
        self.thread = Thread(target=self._run, args=(train,), daemon=True)

    def _run(self, train: Callable[["ClientThread"], _Result]) -> None:
        torch.get_num_threads()  # without it, a new thread's first operation takes all cores
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

    def resume(self, found: Tensor) -> _Result | PendingError:
        """Answer the client, and let it train until it asks again or is done."""
        self.told.put(found)
        return self._listen()

    def _listen(self) -> _Result | PendingError:
        heard = self.said.get()
        if isinstance(heard, BaseException) and not isinstance(heard, PendingError):
            raise heard
        return heard

    def dismiss(self) -> None:
        """Let the thread end, at the next step or where it waits."""
        self.dismissed.set()
        self.told.put(None)


@dataclass(frozen=True, slots=True)
class _WhileWanted:
    """The batches of a client, as long as anybody waits for it."""

    steps: Iterable[tuple[Tensor, Tensor]]
    guest: ClientThread

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for batch in self.steps:
            if self.guest.dismissed.is_set():
                raise _DismissedError
            yield batch


class BarrierTrainer:
    """Trains the clients of a round side by side, if they hold no more than `room` bytes."""

    def __init__(self, task: Task, room: int, byzantine: Collection[ClientId] = ()) -> None:
        self.task, self.room, self.byzantine = task, room, byzantine
        self.seats: list[Task] = []  # a workspace for each client
        self.sample: float | None = None  # bytes that a model holds for a sample, once known

    def train(
        self,
        task: Task,
        received: Broadcast,
        client_states: Mapping[ClientId, ClientState],
        batches: Sequence[Batches],
    ) -> tuple[list[_Result], dict[str, Tensor]]:
        """Train all clients; return what they send and the answers of their exchanges."""
        if len(batches) == 1 or self.held(batches) > self.room:
            return train_clients(task, received, client_states, batches, self.byzantine)
        self.seats += (_copy_task(self.task) for _ in range(len(batches) - len(self.seats)))
        # In the order of clients, on which a mean depends in rounding.
        guests = [
            self._guest(seat, received, client_states.get(own.client, ClientState()), own)
            for seat, own in zip(self.seats, sorted(batches, key=_get_client), strict=False)
        ]
        answers: dict[str, Tensor] = {}
        with isolated_rng(None, torch.device("cpu")):
            try:
                said = [guest.start() for guest in guests]
                while pending := [one for one in said if isinstance(one, PendingError)]:
                    found = answer_exchange(pending, task.statistics_aggregator)
                    answers[pending[0].site] = found
                    said = [
                        guest.resume(found) if isinstance(one, PendingError) else one
                        for guest, one in zip(guests, said, strict=True)
                    ]
            finally:
                for guest in guests:
                    guest.dismiss()
                for guest in guests:
                    if guest.thread.is_alive():
                        guest.thread.join()
        return [one for one in said if not isinstance(one, PendingError)], answers

    def _guest(
        self, seat: Task, received: Broadcast, client_state: ClientState, own: Batches
    ) -> ClientThread:
        def train(guest: ClientThread) -> _Result:
            wanted = replace(own, steps=_WhileWanted(own.steps, guest))
            return train_client(seat, received, client_state, wanted, guest, self.byzantine)

        return ClientThread(train)

    def held(self, batches: Sequence[Batches]) -> int:
        """Return how many bytes these clients hold at once, roughly."""
        if self.sample is None:
            x, _ = next(iter(batches[0].steps))
            self.sample = count_activations(self.task.model, x) * x.element_size() / len(x)
        parameters = nbytes(self.task.model.parameters())
        samples = sum(_find_batch_size(own) for own in batches)
        return round(samples * self.sample) + len(batches) * _COPIES * parameters


def _get_client(own: Batches) -> ClientId:
    return own.client


def _find_batch_size(own: Batches) -> int:
    """Return the size of a client's first batch."""
    return own.batch_sizes[0] if own.batch_sizes else len(next(iter(own.steps))[1])


def _copy_task(task: Task) -> Task:
    model = copy_model(task.model)
    return replace(task, model=model, layout=find_layout(model, task.strategy.role))
