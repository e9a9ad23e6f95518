"""Exchanges in mid-round: the clients of a round wait for each other at a barrier.

Each client has a thread and a copy of the model. One of them runs at a time, until it asks for a
mean over all clients; then the next one runs. When all have asked, they get the answer and continue
one after the other. The result is, bit by bit, that of `train_clients`, which trains anew after
each exchange, and still does so where memory does not hold all clients at once.

Not for a model that keeps anything outside its module between two layers: the threads would mix it
up. So `auto` takes this engine for the library's own models only, and another model is tried first.
In full precision only (autocast caches the weights that it has cast, for all threads), and on a CPU
(elsewhere all threads share one for their backward passes, in which none may wait).
"""

import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from queue import Empty, SimpleQueue
from threading import Event, Thread
from typing import TypeAlias

import torch
from torch import Tensor

from fednorm.core.layer import PendingError, answer_exchange
from fednorm.core.layout import find_layout
from fednorm.core.messages import Batches, Broadcast, ClientState, Reply
from fednorm.core.round import broadcast
from fednorm.core.task import Task, isolated_rng
from fednorm.core.types import ClientId, nbytes
from fednorm.engines import loop, trial
from fednorm.engines.base import EngineRun, Progress, RoundResult, train_client, train_clients
from fednorm.nn.copies import copy_model
from fednorm.nn.stacked_model import count_activations
from fednorm.system import available_memory

_COPIES = 4  # of the parameters: weights, gradients, momentum, update
_WAKE = 0.05  # seconds between looks for an interruption
_ROOM = 2_000_000_000  # bytes that waiting clients may hold

_Result: TypeAlias = tuple[Reply, ClientState]


class BarrierEngine:
    """One thread per client, synchronized at every exchange."""

    name = "barrier"

    def why_not(self, run: EngineRun) -> str | None:
        """Return why clients cannot wait for each other, or None."""
        full = run.task.precision == "full" and run.device.type == "cpu"
        if not (run.task.strategy.exchanges and full):
            return (
                "engine 'barrier' is for strategies with exchanges in mid-round ('fedtan'), in "
                "full precision and with device 'cpu'"
            )
        return None if run.ours else find_misfit(run.task, run.list_first_batches())

    def rounds(self, run: EngineRun, start: Progress | None = None) -> Iterator[RoundResult]:
        """Run the rounds of `run`, or those after `start`."""
        free = available_memory()
        room = _ROOM if free is None else min(_ROOM, free // 8)
        trainer = BarrierTrainer(run.task, room, run.faults.byzantine)
        return loop.rounds(
            run.task, run.clients, run.rounds, start, train=trainer.train, faults=run.faults
        )


def find_misfit(task: Task, batches: Sequence[Batches]) -> str | None:
    """Try two clients that wait for each other; return how they differ from the loop, or None."""
    pair = [trial.take_first_steps(own, 1) for own in batches[:2]]
    compare = partial(_compare, pair)
    return trial.find_misfit("barrier", [own.client for own in pair], task, compare)


def _compare(pair: Sequence[Batches], task: Task) -> trial.Gap:
    received = broadcast(task, task.initial_state)
    together, _ = BarrierTrainer(task, sys.maxsize).train(received, {}, pair)
    alone, _ = train_clients(task, received, {}, pair)
    return trial.find_gap(trial.collect_numbers(alone), trial.collect_numbers(together))


class _DismissedError(BaseException):
    """Ends the thread of a client whose result is not needed any more."""


class ClientThread:
    """A client in a thread; its layers use it as their exchange."""

    def __init__(self, train: Callable[["ClientThread"], _Result]) -> None:
        self.sent: SimpleQueue[_Result | BaseException] = SimpleQueue()
        self.answers: SimpleQueue[Tensor | None] = SimpleQueue()
        self.dismissed = Event()
        self.thread = Thread(target=self._run, args=(train,), daemon=True)

    def _run(self, train: Callable[["ClientThread"], _Result]) -> None:
        torch.get_num_threads()  # without it, a new thread's first operation takes all cores
        try:
            self.sent.put(train(self))
        except BaseException as error:  # noqa: BLE001 (raised by `_receive`)
            self.sent.put(error)

    def mean(self, site: str, value: Tensor, weight: float) -> Tensor:
        """Ask for a mean over clients and wait for it."""
        randomness = torch.get_rng_state()  # other clients draw meanwhile
        self.sent.put(PendingError(site, value.detach().clone(), weight))
        found = self.answers.get()
        if found is None:
            raise _DismissedError
        torch.set_rng_state(randomness)
        return found

    def start(self) -> _Result | PendingError:
        """Let the client train until it asks for a mean or is done."""
        self.thread.start()
        return self._receive()

    def resume(self, found: Tensor) -> _Result | PendingError:
        """Answer the client and let it train until it asks again or is done."""
        self.answers.put(found)
        return self._receive()

    def _receive(self) -> _Result | PendingError:
        received = None
        while received is None:
            # Without a timeout, Ctrl-C waits for the client if another thread takes the signal.
            with suppress(Empty):
                received = self.sent.get(timeout=_WAKE)
        if isinstance(received, BaseException) and not isinstance(received, PendingError):
            raise received
        return received

    def dismiss(self) -> None:
        """End the thread, at the next step or where it waits."""
        self.dismissed.set()
        self.answers.put(None)


@dataclass(frozen=True, slots=True)
class _StepsUntilDismissed:
    """The batches of a client, until its thread is dismissed."""

    steps: Iterable[tuple[Tensor, Tensor]]
    thread: ClientThread

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for batch in self.steps:
            if self.thread.dismissed.is_set():
                raise _DismissedError
            yield batch


class BarrierTrainer:
    """Trains the clients of a round together, if they hold no more than `room` bytes."""

    def __init__(self, task: Task, room: int, byzantine: Collection[ClientId] = ()) -> None:
        self.task, self.room, self.byzantine = task, room, byzantine
        self.replicas: list[Task] = []  # a workspace for each client
        self.sample_bytes: float | None = None  # that a model holds for a sample, once known

    def train(
        self,
        received: Broadcast,
        client_states: Mapping[ClientId, ClientState],
        batches: Sequence[Batches],
    ) -> tuple[list[_Result], dict[str, Tensor]]:
        """Train all clients; return their results and the answers of their exchanges."""
        if len(batches) == 1 or self.count_bytes(batches) > self.room:
            return train_clients(self.task, received, client_states, batches, self.byzantine)
        while len(self.replicas) < len(batches):
            model = copy_model(self.task.model)
            layout = find_layout(model, self.task.strategy.role)
            self.replicas.append(replace(self.task, model=model, layout=layout))
        # In the order of clients, on which a mean depends in rounding.
        ordered = sorted(batches, key=lambda own: own.client)
        threads = [
            self._make_thread(replica, received, client_states.get(own.client, ClientState()), own)
            for replica, own in zip(self.replicas, ordered, strict=False)
        ]
        answers: dict[str, Tensor] = {}
        with isolated_rng(None, torch.device("cpu")):
            try:
                reached = [thread.start() for thread in threads]
                while pending := [one for one in reached if isinstance(one, PendingError)]:
                    found = answer_exchange(pending, self.task.statistics_aggregator)
                    answers[pending[0].site] = found
                    reached = [
                        thread.resume(found) if isinstance(one, PendingError) else one
                        for thread, one in zip(threads, reached, strict=True)
                    ]
            finally:
                for thread in threads:
                    thread.dismiss()
                for thread in threads:
                    if thread.thread.is_alive():
                        thread.thread.join()
        return [one for one in reached if not isinstance(one, PendingError)], answers

    def _make_thread(
        self, replica: Task, received: Broadcast, client_state: ClientState, own: Batches
    ) -> ClientThread:
        def train(thread: ClientThread) -> _Result:
            batches = replace(own, steps=_StepsUntilDismissed(own.steps, thread))
            return train_client(replica, received, client_state, batches, thread, self.byzantine)

        return ClientThread(train)

    def count_bytes(self, batches: Sequence[Batches]) -> int:
        """Return roughly how many bytes these clients hold at once."""
        if self.sample_bytes is None:
            x, _ = next(iter(batches[0].steps))
            self.sample_bytes = count_activations(self.task.model, x) * x.element_size() / len(x)
        parameters = nbytes(self.task.model.parameters())
        sizes = (
            o.batch_sizes[0] if o.batch_sizes else len(next(iter(o.steps))[1]) for o in batches
        )
        return round(sum(sizes) * self.sample_bytes) + len(batches) * _COPIES * parameters
